"""One streamed completion as a client sees it, however it ends.

Decides what of a stream is kept. Refuses to judge it: an error is as good an answer as tokens.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx


class Stream:
    """What has come so far; more can be read while the `with` block of `streaming` runs.

    Attributes:
        error: the error object of a bad status or of an error event; for a connection that broke
            without a word, one with an empty message.
        is_done: whether the stream has ended with `[DONE]`.
        keys: of all events.
    """

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.token_ids: list[int] = []
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.keys: set[str] = set()
        self._rest = self._events()

    def read(self, num_tokens: int | None = None) -> "Stream":
        """Read until there are so many tokens, or to the end."""
        while num_tokens is None or len(self.token_ids) < num_tokens:
            event = next(self._rest, None)
            if event is None:
                break
            self.error = event.get("error", self.error)
            self.keys |= event.keys()
            for choice in event.get("choices", ()):
                self.token_ids += choice.get("token_ids") or ()
        return self

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            if self.response.status_code != 200:
                yield json.loads(self.response.read())
                return
            for line in self.response.iter_lines():
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    self.is_done = True
                elif data:
                    yield json.loads(data)
        except httpx.TransportError as error:
            yield {"error": {"message": "", "torn": repr(error)}}


@contextmanager
def streaming(
    client: httpx.Client, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> Iterator[Stream]:
    """Ask, and leave when the block ends, whether or not all has come."""
    path = f"{url}/v1/completions"
    with client.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
        yield Stream(response)
