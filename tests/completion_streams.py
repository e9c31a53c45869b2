"""An OpenAI server in memory, as a transport of httpx."""

import json
from collections.abc import Callable
from typing import Any

import httpx

Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(handler))


def stream(*events: Any, done: bool = True) -> httpx.Response:
    """A stream of server-sent events; strings are sent as they are."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    text = "".join(f"data: {line}\n\n" for line in (*lines, *(["[DONE]"] if done else [])))
    return httpx.Response(200, text=text, headers={"X-KV-Transfer-Id": "t-1"})


def chunk(text: str, *token_ids: int) -> dict[str, Any]:
    """One event with new text and tokens."""
    return {"choices": [{"index": 0, "text": text, "token_ids": list(token_ids)}]}
