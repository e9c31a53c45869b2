"""The router's routes.

Decides what is refused before any instance hears of it, and what the router tells of itself.
Refuses to know how a call is served (`exchange`).
"""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvcourier.api_keys import RequireApiKey
from kvcourier.ids import RequestId
from kvcourier.router.answers import JSON_TYPE, error_content, send_error
from kvcourier.router.attempt import ClientCall, Services
from kvcourier.router.config import RouterConfig
from kvcourier.router.events import CallOutcome, LegName
from kvcourier.router.exchange import Exchange
from kvcourier.router.instances import Instance, Side
from kvcourier.router.intake import (
    CallRefused,
    binding_of,
    forwarded_headers,
    mode_of,
    parse_body,
    request_id_of,
)
from kvcourier.router.legs import read_object
from kvcourier.router.metrics import RouterMetrics
from kvcourier.router.upstream import Upstream, make_client

_log = logging.getLogger(__name__)

_CALL_PATHS = ("/v1/completions", "/v1/chat/completions")


def create_app(config: RouterConfig) -> Starlette:
    """The router as an ASGI app.

    Its lifespan starts asking the instances about themselves, and ends all that it started. An
    instance that is not up yet is no error.
    """
    client = make_client(config.timeouts, config.instance_api_key)
    sides = {
        LegName.PREFILL: _side(config, config.prefill, client),
        LegName.DECODE: _side(config, config.decode, client),
    }
    services = Services(
        config, Upstream(client, config.timeouts, config.limits), sides, RouterMetrics()
    )
    calls, pages = _Calls(services), _Pages(services)
    app = Starlette(
        routes=[
            *(Route(path, calls, methods=["POST"]) for path in _CALL_PATHS),
            Route("/v1/models", pages.models),
            Route("/health", pages.health),
            Route("/metrics", pages.metrics),
            Route("/kvcourier/instances", pages.instances),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lambda _app: _lifespan(services),
    )
    if config.api_keys is not None:
        app.add_middleware(RequireApiKey, keys=config.api_keys)
    app.state.services = services
    app.state.begin_stop = services.begin_stop
    return app


def _side(config: RouterConfig, specs: Any, client: httpx.AsyncClient) -> Side:
    return Side([Instance(spec, client, config.timeouts) for spec in specs], config.policy)


@asynccontextmanager
async def _lifespan(services: Services) -> AsyncIterator[None]:
    watches = [
        asyncio.create_task(instance.watch())
        for side in services.sides.values()
        for instance in side.instances
    ]
    try:
        yield
    finally:
        tasks = [*watches, *services.background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
            config = self._services.config
            mode = transfer_mode = mode_of(headers, config.mode)
            binding = binding_of(headers, transfer_mode, config.binding)
            body = parse_body(await _read_body(Request(scope, receive), limits.max_body_bytes))
        except CallRefused as error:
            await send_error(send, 400, str(error), own, param=error.param)
            return mode, CallOutcome.REFUSED
        except _TooLarge:
            message = f"The body is larger than {limits.max_body_bytes} bytes."
            await send_error(send, 413, message, own)
            return mode, CallOutcome.REFUSED
        except ClientDisconnect:
            return mode, CallOutcome.CLIENT_LEFT
        call = ClientCall(
            path=scope["path"],
            body=body,
            headers=forwarded_headers(headers.items(), self._services.config.has_keys),
            mode=transfer_mode,
            binding=binding,
            request_id=RequestId(request_id),
            receive=receive,
            send=send,
        )
        return mode, await Exchange(self._services, call).run()


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


class _Pages:
    """What the router tells of itself and of its instances."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def health(self, _request: Request) -> Response:
        """200 if at least one instance of each side says that it is well."""
        details: dict[str, Any] = {}
        for leg, side in self._services.sides.items():
            answers = await asyncio.gather(*(_ask(one, "/health") for one in side.instances))
            details[leg] = {
                one.name: _health_line(answer)
                for one, answer in zip(side.instances, answers, strict=True)
            }
        well = all("ok" in states.values() for states in details.values())
        content = {"status": "ok" if well else "unavailable", **details}
        return _json(content, 200 if well else 503)

    async def models(self, _request: Request) -> Response:
        """The models that both a prefill and a decode instance serve."""
        cards: dict[LegName, dict[str, Any]] = {}
        for leg, side in self._services.sides.items():
            answers = await asyncio.gather(*(_ask(one, "/v1/models") for one in side.instances))
            if not any(isinstance(answer, httpx.Response) for answer in answers):
                names = ", ".join(instance.name for instance in side.instances)
                message = f"No {leg} instance answers ({names})."
                return Response(error_content(503, message), 503, media_type=JSON_TYPE)
            cards[leg] = _cards(answers)
        shared = [
            card for name, card in cards[LegName.DECODE].items() if name in cards[LegName.PREFILL]
        ]
        return _json({"object": "list", "data": shared})

    async def metrics(self, _request: Request) -> Response:
        """All metrics, as Prometheus text."""
        return Response(
            self._services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def instances(self, _request: Request) -> Response:
        """What is known of each instance."""
        config = self._services.config
        return _json(
            {
                "mode": config.mode,
                "binding": config.binding,
                "policy": config.policy,
                **{
                    leg: [instance.describe() for instance in side.instances]
                    for leg, side in self._services.sides.items()
                },
            }
        )


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type=JSON_TYPE)


async def _ask(instance: Instance, path: str) -> httpx.Response | str:
    """The answer, or why there is none."""
    try:
        return await instance.get(path)
    except TimeoutError:
        return "no answer in time"
    except httpx.HTTPError as error:
        return f"cannot be reached ({error})"


def _health_line(answer: httpx.Response | str) -> str:
    if isinstance(answer, str):
        return answer
    return "ok" if answer.is_success else f"answered {answer.status_code}"


def _cards(answers: list[httpx.Response | str]) -> dict[str, Any]:
    cards: dict[str, Any] = {}
    for answer in answers:
        if isinstance(answer, str) or not answer.is_success:
            continue
        with suppress(ValueError, TypeError, KeyError):
            cards |= {card["id"]: card for card in read_object(answer.content)["data"]}
    return cards
