"""One generation as an HTTP answer, whole or streamed.

Decides when the status line goes out (with the first event, so that what fails before it has its
proper status), how a failure after it is shown, and that a client that leaves ends the work.
Refuses to know requests and the objects in the body.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
from starlette.types import Receive, Scope, Send

from kvcourier.engine.server.errors import ApiError, json_response
from kvcourier.engine.server.generation import (
    ActiveGenerations,
    ClientGone,
    Delta,
    Generation,
)
from kvcourier.engine.server.metrics import ServerMetrics
from kvcourier.engine.server.render import Renderer

logger = logging.getLogger(__name__)

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects chunks would undo the streaming
]
_DONE = b"data: [DONE]\n\n"


class GenerationAnswer:
    """An ASGI application that runs one generation and sends what comes."""

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        active: ActiveGenerations,
        metrics: ServerMetrics,
    ) -> None:
        self._generation = generation
        self._renderer = renderer
        self._active = active
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; returns when the answer is complete or the client has gone."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            with self._active.running(self._generation):
                self._generation.start()
                if self._generation.job.stream:
                    await self._stream(send)
                else:
                    async for delta in self._generation.deltas():
                        self._renderer.collect(delta)
                    await json_response(self._renderer.body())(scope, receive, send)
        except ClientGone:
            logger.debug("%s: the client has gone", self._generation.job.response_id)
        except ApiError as error:
            self._count(error)
            await error.response()(scope, receive, send)
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        """Abort as soon as the client leaves; the body was read before, so nothing else comes."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.fail(ClientGone("the client has closed the connection"))

    async def _stream(self, send: Send) -> None:
        deltas = self._generation.deltas()
        first = await anext(deltas)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS})
        try:
            await self._send_events(first, deltas, send)
            end = _DONE
        except ClientGone:
            raise
        except ApiError as error:
            self._count(error)
            end = _event(error.body)
        except Exception:
            # A bug of ours. The status is out, so this is the only way not to end silently.
            logger.exception("%s: the stream broke", self._generation.job.response_id)
            failure = ApiError(500, "an internal error ended the stream; the log has details")
            self._count(failure)
            end = _event(failure.body)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_events(self, first: Delta, rest: AsyncIterator[Delta], send: Send) -> None:
        await self._send_delta(first, send)
        async for delta in rest:
            await self._send_delta(delta, send)
        for chunk in self._renderer.closing():
            await send(_more(_event(chunk)))

    async def _send_delta(self, delta: Delta, send: Send) -> None:
        # In one piece, as the parts of one delta belong to one moment. An empty piece still
        # makes the status line go out.
        await send(_more(b"".join(_event(chunk) for chunk in self._renderer.chunks(delta))))

    def _count(self, error: ApiError) -> None:
        self._metrics.count_failed(error.status)
        if error.status >= 500:
            logger.warning("%s: %s", self._generation.job.response_id, error)


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _more(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}
