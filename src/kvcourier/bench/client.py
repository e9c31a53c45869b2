"""One streamed completion, timed token by token.

Decides what a request holds and which answers count. Refuses to know when requests are sent.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvcourier.bench.plan import ASKED, Way
from kvcourier.bench.samples import Answered, Failed, Outcome
from kvcourier.demo.client import (
    DONE,
    NOT_DONE,
    RequestFailed,
    error_sentence,
    event_data,
    read_event,
)
from kvcourier.demo.run import MODE_HEADER, TRANSFER_ID_HEADER

_BINDING_HEADER = "X-KV-Binding"
_MAX_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that is ready to be sent: nothing is rendered once the clock runs."""

    url: str
    headers: Mapping[str, str]
    body: bytes
    num_tokens: int


def make_ask(url: str, way: Way, model: str, prompt: Sequence[int], num_tokens: int) -> Ask:
    """A greedy request of exactly `num_tokens` tokens, to a server's address without a path."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # A token may have no text: then only its id tells that it came.
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    if way in ASKED:
        mode, binding = ASKED[way]
        headers[MODE_HEADER] = mode.value
        if binding is not None:
            headers[_BINDING_HEADER] = binding.value
    return Ask(f"{url}/v1/completions", headers, json.dumps(body).encode(), num_tokens)


def make_client() -> httpx.AsyncClient:
    """For a load: as many connections as there are requests, none of them through a proxy."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(timeout=None, trust_env=False, limits=limits)


async def send(client: httpx.AsyncClient, ask: Ask, timeout_s: float, lag_s: float = 0) -> Outcome:
    """Send it and read the answer to its end; what goes wrong is an outcome as well."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _send(client, ask, lag_s)
    except RequestFailed as failed:
        return Failed(str(failed))
    except TimeoutError:
        return Failed(f"not answered in {timeout_s:g} s")
    except httpx.HTTPError as error:
        return Failed(f"{type(error).__name__}: {error}")


async def _send(client: httpx.AsyncClient, ask: Ask, lag_s: float) -> Answered:
    sent_unix_s, start_s = time.time(), time.perf_counter()
    token_s: list[float] = []
    counted: int | None = None
    async with client.stream("POST", ask.url, content=ask.body, headers=ask.headers) as response:
        if response.status_code != 200:
            sentence = error_sentence(await response.aread(), _MAX_SHOWN)
            raise RequestFailed(f"HTTP {response.status_code}: {sentence}")
        async for event in _events(response):
            now_s = time.perf_counter() - start_s
            choices = event.get("choices") or ()
            token_s += [now_s] * sum(_num_tokens(choice) for choice in choices)
            usage = event.get("usage")
            if isinstance(usage, dict):
                counted = usage.get("completion_tokens", counted)
    found = len(token_s) if counted is None else counted
    if found != ask.num_tokens or not token_s:
        raise RequestFailed(f"expected {ask.num_tokens} tokens, found {found}")
    transfer_id = response.headers.get(TRANSFER_ID_HEADER, "")
    return Answered(sent_unix_s, lag_s, tuple(token_s), transfer_id)


def _num_tokens(choice: Any) -> int:
    """How many tokens a choice of an event brings; servers without ids send one at a time."""
    if not isinstance(choice, dict):
        return 0
    ids = choice.get("token_ids")
    return len(ids) if isinstance(ids, list) and ids else int(bool(choice.get("text")))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events; raises RequestFailed as `read_event`, or if `[DONE]` does not come."""
    async for line in response.aiter_lines():
        data = event_data(line)
        if data == DONE:
            return
        if data is not None:
            yield read_event(data, _MAX_SHOWN)
    raise RequestFailed(NOT_DONE)
