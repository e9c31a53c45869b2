"""The router's routes.

Decides what is refused before any instance hears of it. Refuses to know how a call is served
(`exchange`), and what the router tells of itself (`pages`).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvcourier.api_keys import RequireApiKey
from kvcourier.config import Binding, TransferMode
from kvcourier.ids import RequestId
from kvcourier.router.admin import ADMIN_PREFIX, Admin, closed_routes
from kvcourier.router.answers import JSON_TYPE, error_content, send_error
from kvcourier.router.client_call import ClientCall
from kvcourier.router.config import InstanceSpec, RouterConfig
from kvcourier.router.conversations import Conversations, conversation_key
from kvcourier.router.events import CallOutcome, LegName
from kvcourier.router.exchange import Exchange
from kvcourier.router.instances import Instance, InstanceOptions
from kvcourier.router.intake import (
    CallRefused,
    binding_of,
    conversation_of,
    forwarded_headers,
    mode_of,
    parse_body,
    request_id_of,
    total_s_of,
)
from kvcourier.router.membership import InstancesFile, Membership
from kvcourier.router.metrics import RouterMetrics
from kvcourier.router.pages import Pages
from kvcourier.router.prompts import prompt_of
from kvcourier.router.services import Services
from kvcourier.router.sides import NO_PROMPT, Side
from kvcourier.router.state_questions import StateQuestions, ask_for_state
from kvcourier.router.upstream import Upstream, make_client
from kvcourier.tracing.interface import Tracing

_log = logging.getLogger(__name__)

_CALL_PATHS = ("/v1/completions", "/v1/chat/completions")
_FILE_PERIOD_S = 1.0


def create_app(config: RouterConfig, tracing: Tracing | None = None) -> Starlette:
    """The router as an ASGI app; `tracing` takes the spans of its dispatches.

    Its lifespan starts asking the instances about themselves, and ends all that it started. An
    instance that is not up yet is no error.
    """
    client = make_client(config.timeouts, config.instance_api_key)
    options = InstanceOptions(config.timeouts, config.breaker)

    def make(spec: InstanceSpec) -> Instance:
        return Instance(spec, client, options)

    prefill_policy, decode_policy = config.policies
    sides = {
        LegName.PREFILL: Side(map(make, config.prefill), prefill_policy),
        LegName.DECODE: Side(map(make, config.decode), decode_policy),
    }
    metrics = RouterMetrics(sides)
    conversations = Conversations(config.conversations, time.monotonic)
    metrics.conversations.set_function(lambda: len(conversations))
    upstream = Upstream(client, config.timeouts, config.limits)
    states = StateQuestions(
        partial(ask_for_state, config.engine_id, config.channel_keys, config.timeouts.state_s),
        conversations,
        lambda asked: metrics.states_asked.labels(asked).inc(),
    )
    services = Services(config, upstream, sides, metrics, conversations, states, tracing=tracing)
    membership = Membership(sides, make)
    file = None
    if config.instances_file is not None:
        file = InstancesFile(config.instances_file, membership, metrics.file_errors.inc)
    calls, pages = _Calls(services), Pages(services)
    app = Starlette(
        routes=[
            *(Route(path, calls, methods=["POST"]) for path in _CALL_PATHS),
            Route("/v1/models", pages.models),
            Route("/health", pages.health),
            Route("/metrics", pages.metrics),
            Route("/kvcourier/instances", pages.instances),
            *(closed_routes() if config.admin_keys is None else Admin(membership).routes()),
            Route("/kvcourier/story/{key:path}", pages.story),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lambda _app: _lifespan(services, file),
    )
    own = {} if config.admin_keys is None else {ADMIN_PREFIX: config.admin_keys}
    if config.api_keys is not None or own:
        app.add_middleware(RequireApiKey, keys=config.api_keys, by_prefix=own)
    app.state.services = services
    app.state.begin_stop = services.begin_stop
    return app


@asynccontextmanager
async def _lifespan(services: Services, file: InstancesFile | None) -> AsyncIterator[None]:
    watch = None
    if file is not None:
        file.look()
        watch = asyncio.create_task(file.watch(_FILE_PERIOD_S))
    for side in services.sides.values():
        side.start()
    try:
        yield
    finally:
        tasks = [*services.background, *([watch] if watch is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for side in services.sides.values():
            await side.stop()
        await services.upstream.client.aclose()


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    content = error_content(error.status_code, f"{error.detail}.")
    return Response(content, error.status_code, error.headers, JSON_TYPE)


class _TooLarge(Exception):
    """The body exceeds the limit."""


class _Calls:
    """ASGI endpoint of the paths whose calls are dispatched."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._services.metrics
        with metrics.in_flight.track_inprogress():
            self._in_flight += 1
            try:
                mode, outcome = await self._serve(scope, receive, send)
            finally:
                self._in_flight -= 1
        metrics.calls.labels(mode, outcome).inc()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> tuple[str, CallOutcome]:
        headers = Headers(scope=scope)
        request_id = request_id_of(headers, lambda: uuid.uuid4().hex)
        own = (("x-request-id", request_id),)
        limits = self._services.config.limits
        if self._in_flight > limits.max_in_flight:
            message = f"The router serves {limits.max_in_flight} calls at a time; try again later."
            await send_error(send, 503, message, own, code="max_in_flight")
            return "none", CallOutcome.REFUSED
        mode = "none"
        try:
            mode = transfer_mode = mode_of(headers, self._services.config.mode)
            call = await self._read(scope, receive, send, transfer_mode, RequestId(request_id))
        except CallRefused as error:
            await send_error(send, 400, str(error), own, param=error.param)
            return mode, CallOutcome.REFUSED
        except _TooLarge:
            message = f"The body is larger than {limits.max_body_bytes} bytes."
            await send_error(send, 413, message, own)
            return mode, CallOutcome.REFUSED
        except ClientDisconnect:
            return mode, CallOutcome.CLIENT_LEFT
        return mode, await Exchange(self._services, call).run()

    async def _read(
        self, scope: Scope, receive: Receive, send: Send, mode: TransferMode, request_id: RequestId
    ) -> ClientCall:
        """Check a call. Raises CallRefused, _TooLarge or ClientDisconnect."""
        config, headers = self._services.config, Headers(scope=scope)
        binding = binding_of(headers, mode, config.binding)
        conversation = conversation_key(conversation_of(headers), headers)
        is_near = binding is Binding.NEAR
        total_s = total_s_of(headers, config.timeouts.total_s)
        raw = await _read_body(Request(scope, receive), config.limits.max_body_bytes)
        body = parse_body(raw)
        return ClientCall(
            path=scope["path"],
            body=body,
            headers=forwarded_headers(headers.items(), config.has_keys),
            mode=mode,
            binding=binding,
            request_id=request_id,
            receive=receive,
            send=send,
            total_s=total_s,
            prompt=prompt_of(body) if config.needs_prompt or is_near else NO_PROMPT,
            conversation=conversation,
        )


async def _read_body(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _TooLarge
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _TooLarge
    return bytes(body)
