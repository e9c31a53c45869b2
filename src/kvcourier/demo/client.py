"""One streamed completion, and what its reader sees of it.

Decides how tokens and times are read from an OpenAI stream. Refuses to know which instance, or
how many, are behind the address.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from kvcourier.errors import KVCourierError

TRANSFER_ID_HEADER = "X-KV-Transfer-Id"
MODE_HEADER = "X-KV-Mode"


class RequestFailed(KVCourierError):
    """The request was refused, or its stream ended with an error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        first_token_unix_s: wall clock when the first token was read.
        ttft_s: from sending the request until then.
        tpot_s: mean time per token after the first.
        transfer_id: the router's name for the transfer; empty where none is involved.
    """

    token_ids: tuple[int, ...]
    text: str
    first_token_unix_s: float
    ttft_s: float
    tpot_s: float
    transfer_id: str


def complete(
    client: httpx.Client,
    url: str,
    model: str,
    prompt: str,
    max_tokens: int,
    *,
    mode: str | None = None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Have a prompt continued greedily; blocks until the stream has ended.

    Args:
        url: address of an instance or of the router.
        mode: transfer mode to ask the router for.
        on_text: called with each new piece of text.

    Raises:
        RequestFailed: refused, broken off, or without a token.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    text: list[str] = []
    first_unix_s = first_s = last_s = 0.0
    start_s = time.perf_counter()
    headers = {MODE_HEADER: mode} if mode else {}
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                response.read()
                raise RequestFailed(f"HTTP {response.status_code}: {_message(response.text)}")
            for choice in _choices(response):
                new = choice.get("token_ids") or []
                if new:
                    last_s = time.perf_counter()
                    if not tokens:
                        first_s, first_unix_s = last_s, time.time()
                    tokens += new
                if piece := choice.get("text"):
                    text.append(piece)
                    on_text(piece)
            transfer_id = response.headers.get(TRANSFER_ID_HEADER, "")
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    if len(tokens) != max_tokens:
        raise RequestFailed(f"expected {max_tokens} tokens, found {len(tokens)}")
    return Answer(
        token_ids=tuple(tokens),
        text="".join(text),
        first_token_unix_s=first_unix_s,
        ttft_s=first_s - start_s,
        tpot_s=(last_s - first_s) / max(1, len(tokens) - 1),
        transfer_id=transfer_id,
    )


def _choices(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The choices in a stream of server-sent events.

    Raises:
        RequestFailed: an event carries an error, or the stream ends without `[DONE]`.
    """
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise RequestFailed(f"an event of the stream is not JSON: {data[:80]!r}") from error
        if "error" in event:
            raise RequestFailed(_message(data))
        yield from event.get("choices", ())
    raise RequestFailed("the stream ended before [DONE]")


def _message(text: str) -> str:
    """The sentence in an OpenAI error body, or the body itself."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or "(no body)"
