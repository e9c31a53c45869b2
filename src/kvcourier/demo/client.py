"""One streamed completion, and what its reader sees of it.

Decides how tokens and times are read from an OpenAI stream. Refuses to know which instance, or
how many, are behind the address.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from kvcourier.errors import KVCourierError

DONE = "[DONE]"
NOT_DONE = "the stream ended before [DONE]"


class RequestFailed(KVCourierError):
    """The request was refused, or its stream ended with an error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        token_ids: where the server tells them (`return_token_ids`), else empty.
        first_token_unix_s: wall clock when the first token was read.
        ttft_s: from sending the request until then.
        total_s: from sending the request until the last token was read.
        num_prompt_tokens: the server's count, where the stream has one (`stream_options`).
        headers: of the response.
    """

    token_ids: tuple[int, ...]
    text: str
    first_token_unix_s: float
    ttft_s: float
    total_s: float
    num_prompt_tokens: int | None
    headers: Mapping[str, str]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for a single token."""
        return (self.total_s - self.ttft_s) / max(1, len(self.token_ids) - 1)


def complete(
    client: httpx.Client,
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Have a prompt continued; blocks until the stream has ended.

    Args:
        url: address of the server, without a path.
        body: of POST /v1/completions; `stream` is added.
        on_text: called with each new piece of text.

    Raises:
        RequestFailed: refused, broken off, or without a token.
    """
    tokens: list[int] = []
    text: list[str] = []
    num_prompt_tokens: int | None = None
    first_s = first_unix_s = last_s = 0.0
    start_s = time.perf_counter()
    try:
        with client.stream(
            "POST", f"{url}/v1/completions", json={**body, "stream": True}, headers=headers
        ) as response:
            if response.status_code != 200:
                response.read()
                raise RequestFailed(f"HTTP {response.status_code}: {error_sentence(response.text)}")
            for event in _events(response):
                if usage := event.get("usage"):
                    num_prompt_tokens = usage.get("prompt_tokens")
                for choice in event.get("choices", ()):
                    token_ids, piece = choice.get("token_ids") or (), choice.get("text")
                    # A token may have no text yet, and not every server tells token ids.
                    if not token_ids and not piece:
                        continue
                    last_s = time.perf_counter()
                    if not first_s:
                        first_s, first_unix_s = last_s, time.time()
                    tokens += token_ids
                    if piece:
                        text.append(piece)
                        on_text(piece)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    if not first_s:
        raise RequestFailed("the stream ended without a token")
    return Answer(
        token_ids=tuple(tokens),
        text="".join(text),
        first_token_unix_s=first_unix_s,
        ttft_s=first_s - start_s,
        total_s=last_s - start_s,
        num_prompt_tokens=num_prompt_tokens,
        headers=response.headers,
    )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream.

    Raises:
        RequestFailed: an event carries an error or no JSON object, or `[DONE]` does not come.
    """
    for line in response.iter_lines():
        data = event_data(line)
        if data == DONE:
            return
        if data is not None:
            yield read_event(data)
    raise RequestFailed(NOT_DONE)


def event_data(line: str) -> str | None:
    """What a line of a stream carries; None if it is no event's."""
    return line.removeprefix("data:").strip() if line.startswith("data:") else None


def read_event(data: str, max_shown: int | None = None) -> dict[str, Any]:
    """One event of a stream.

    Raises:
        RequestFailed: it carries an error, or no JSON object.
    """
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise RequestFailed(f"an event of the stream is no JSON object: {data[:80]!r}")
    if "error" in event:
        raise RequestFailed(error_sentence(data, max_shown))
    return event


def error_sentence(content: str | bytes, max_shown: int | None = None) -> str:
    """The sentence in an OpenAI error body, or the beginning of the body itself."""
    try:
        error = json.loads(content)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = content if isinstance(content, str) else content.decode(errors="replace")
        text = text.strip()[:500]
    return text[:max_shown] or "(no body)"
