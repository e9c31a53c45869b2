"""One streamed completion as a client sees it, however it ends.

Decides what of a stream is kept. Refuses to judge it: an error is as good an answer as tokens.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Stream:
    """What has come so far; `response` is open while the `with` block of `streaming` is."""

    response: httpx.Response
    token_ids: list[int] = field(default_factory=list)
    error: dict[str, Any] | None = None
    is_done: bool = False

    def read(self, num_tokens: int | None = None) -> "Stream":
        """Read up to so many tokens, or to the end.

        A connection that breaks without a word is kept as an error without a message.
        """
        try:
            for event in self._events():
                self.error = event.get("error", self.error)
                for choice in event.get("choices", ()):
                    self.token_ids += choice.get("token_ids") or ()
                if num_tokens is not None and len(self.token_ids) >= num_tokens:
                    return self
        except httpx.TransportError as error:
            self.error = {"message": "", "torn": repr(error)}
        return self

    def _events(self) -> Iterator[dict[str, Any]]:
        if self.response.status_code != 200:
            yield json.loads(self.response.read())
            return
        for line in self.response.iter_lines():
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                self.is_done = True
            elif data:
                yield json.loads(data)


@contextmanager
def streaming(
    client: httpx.Client, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> Iterator[Stream]:
    """Ask, and leave when the block ends, whether or not all has come."""
    path = f"{url}/v1/completions"
    with client.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
        yield Stream(response)
