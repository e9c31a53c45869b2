"""Two proxies as routers of vLLM are: what a deployment has in front of it before it knows us.

Decides only what vLLM documents that a router sends, and sends no key beyond it. The sequential
one waits for the prefill leg and hands its `kv_transfer_params` on as they came; the concurrent
one sends both legs at once, so it must be told where the prefill instance's KV is found. Refuses
to know kvcourier: nothing of it is imported here, or a misreading would agree with itself.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

PATHS = ("/v1/completions", "/v1/chat/completions")
LEG_TIMEOUT_S = 300.0

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill instance; all but the address is what the concurrent proxy must know beforehand."""

    url: str
    engine_id: str = ""
    kv_host: str = ""
    kv_port: int = 5600
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One client's request on its way to both instances.

    Attributes:
        request_id: the `X-Request-Id` of both legs.
        transfer_id: None for a router that mints none.
    """

    client: httpx.AsyncClient
    path: str
    body: Body
    request_id: str
    transfer_id: str | None = None

    async def send(self, url: str, body: Body) -> httpx.Response:
        """Send one leg; returns at its status, with the content still to be read."""
        request = self.client.build_request(
            "POST", url + self.path, json=body, headers={"X-Request-Id": self.request_id}
        )
        return await self.client.send(request, stream=True)

    async def prefill(self, url: str) -> httpx.Response:
        """Send the prefill leg and read its answer."""
        response = await self.send(url, self.prefill_body())
        await response.aread()
        return response

    def prefill_body(self) -> Body:
        """The client's request for one token, with its KV kept for somebody."""
        body = {k: v for k, v in self.body.items() if k not in ("stream_options", "min_tokens")}
        body |= {"max_tokens": 1, "stream": False}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        params: Body = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        return body | {"kv_transfer_params": params | self._named()}

    def push_body(self, prefill: Prefill) -> Body:
        """The client's request, with the place where a prefill that still runs keeps its KV."""
        params: Body = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": prefill.engine_id,
            "remote_host": prefill.kv_host,
            "remote_port": prefill.kv_port,
            "tp_size": prefill.tp_size,
            "pp_size": prefill.pp_size,
            "remote_request_id": self.request_id,
        }
        return self.body | {"kv_transfer_params": params | self._named()}

    def _named(self) -> Body:
        return {} if self.transfer_id is None else {"transfer_id": self.transfer_id}


def pull_proxy(prefill: Prefill, decode_url: str) -> Starlette:
    """A sequential proxy: P first, then D with P's `kv_transfer_params` unchanged."""

    async def handle(dispatch: Dispatch) -> Response:
        answer = await dispatch.prefill(prefill.url)
        if answer.status_code != 200:
            return _relayed(answer)
        handoff = answer.json().get("kv_transfer_params")
        if not handoff:
            # D would compute the prompt itself, and a test of the transfer would pass.
            return Response("the prefill instance answered without kv_transfer_params", 502)
        body = dispatch.body | {"kv_transfer_params": handoff}
        return _relayed(await dispatch.send(decode_url, body))

    return _app(handle, mints_transfer_ids=False)


def push_proxy(prefill: Prefill, decode_url: str, *, send_transfer_id: bool = True) -> Starlette:
    """A concurrent proxy: both legs at once.

    Without `send_transfer_id` it is as routers were before that key: the instances can only pair
    the legs by their request ids.
    """

    async def handle(dispatch: Dispatch) -> Response:
        prefill_leg = asyncio.create_task(dispatch.prefill(prefill.url))
        decode_leg = asyncio.create_task(dispatch.send(decode_url, dispatch.push_body(prefill)))
        legs = (prefill_leg, decode_leg)
        answering = decode_leg
        try:
            # One leg alone is of no use to the client, so the first refusal is the answer.
            for next_leg in asyncio.as_completed(legs):
                if (await next_leg).status_code != 200:
                    answering = next(leg for leg in legs if leg.done() and _refused(leg))
                    break
        except BaseException:
            await _let_go(*legs)
            raise
        await _let_go(*(leg for leg in legs if leg is not answering))
        return _relayed(answering.result())

    return _app(handle, mints_transfer_ids=send_transfer_id)


def _app(
    handle: Callable[[Dispatch], Coroutine[Any, Any, Response]], *, mints_transfer_ids: bool
) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            timeout=LEG_TIMEOUT_S, trust_env=False, limits=limits
        ) as client:
            app.state.client = client
            yield

    async def endpoint(request: Request) -> Response:
        dispatch = Dispatch(
            client=request.app.state.client,
            path=request.url.path,
            body=json.loads(await request.body()),
            request_id=request.headers.get("x-request-id") or uuid.uuid4().hex,
            transfer_id=uuid.uuid4().hex if mints_transfer_ids else None,
        )
        try:
            return await handle(dispatch)
        except httpx.TransportError as error:
            return Response(f"an instance did not answer: {error!r}", 502)

    routes = [Route(path, endpoint, methods=["POST"]) for path in PATHS]
    return Starlette(routes=routes, lifespan=lifespan)


def _refused(leg: asyncio.Task[httpx.Response]) -> bool:
    return leg.exception() is None and leg.result().status_code != 200


async def _let_go(*legs: asyncio.Task[httpx.Response]) -> None:
    """Close the connections of legs, answered or not; their instances then abort the requests."""
    for leg in legs:
        leg.cancel()
    for answer in await asyncio.gather(*legs, return_exceptions=True):
        if isinstance(answer, httpx.Response):
            await answer.aclose()


def _relayed(answer: httpx.Response) -> Response:
    kind = answer.headers.get("content-type")
    if answer.is_closed:
        return Response(answer.content, answer.status_code, media_type=kind)

    async def content() -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
        finally:
            # Also if the client has left: D then aborts.
            await answer.aclose()

    return StreamingResponse(content(), answer.status_code, media_type=kind)
