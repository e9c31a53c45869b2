"""HTTP requests that may be cancelled at any moment, without a connection being lost by it.

Decides what goes on when the task that made a request has been cancelled. Refuses to know what is
requested.

httpcore 1.0 keeps a connection for ever, open and never used again, if a task is cancelled before
its first request has begun to send, or while an answer is put away (encode/httpcore#1093; it
shields itself from anyio's cancellation, and not from asyncio's). A router cancels often: clients
leave, and one leg is refused while the other one connects. So a request is ended once it has begun
to send, or has failed to connect, which `Timeout.connect` bounds; and an answer is put away by a
task of its own.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

import httpx

_BEGUN = ".send_request_headers.started"


class CancelSafeTransport(httpx.AsyncHTTPTransport):
    """An httpx transport for asyncio; see the module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ending: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for the head of its answer."""
        begun = asyncio.Event()

        async def trace(name: str, _info: Mapping[str, Any]) -> None:
            if name.endswith(_BEGUN):
                begun.set()

        request.extensions = {**request.extensions, "trace": trace}
        sending = asyncio.create_task(super().handle_async_request(request))
        try:
            response = await asyncio.shield(sending)
        except asyncio.CancelledError:
            await self.to_its_end(_end(sending, begun))
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, self)
        return response

    async def to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`, which goes on if who waits is cancelled."""
        ending = asyncio.create_task(work)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)


class _Body(httpx.AsyncByteStream):
    """An answer's body."""

    def __init__(self, stream: httpx.AsyncByteStream, transport: CancelSafeTransport) -> None:
        self._stream = stream
        self._transport = transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        await self._transport.to_its_end(self._stream.aclose())


async def _end(sending: asyncio.Task[httpx.Response], begun: asyncio.Event) -> None:
    beginning = asyncio.create_task(begun.wait())
    await asyncio.wait({sending, beginning}, return_when=asyncio.FIRST_COMPLETED)
    beginning.cancel()
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        response = await sending
        await response.aclose()
