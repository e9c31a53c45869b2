"""One leg of a dispatch, over HTTP.

Decides how an HTTP exchange with an instance becomes exactly one final event, whatever happens.
Refuses to know what follows from it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import httpx

from kvcourier.api_keys import bearer
from kvcourier.router.answers import EventStream
from kvcourier.router.cancelling import CancelSafeTransport
from kvcourier.router.config import RouterLimits, Timeouts
from kvcourier.router.events import (
    Answer,
    ClientLeft,
    DecodeAnswered,
    DecodeEnded,
    DecodeStreaming,
    Event,
    FailureKind,
    LegLost,
    LegName,
    PrefillAnswered,
)
from kvcourier.router.legs import Leg

_log = logging.getLogger(__name__)

# uvicorn closes a connection after 5 idle seconds; a request must not meet that moment.
_KEEPALIVE_S = 2.0

Post = Callable[[Event], None]
LegHeaders = tuple[tuple[str, str], ...]

_KINDS: tuple[tuple[type[Exception], FailureKind, str], ...] = (
    (httpx.ConnectError, FailureKind.CONNECT, "cannot be reached"),
    (httpx.ConnectTimeout, FailureKind.CONNECT, "cannot be reached in time"),
    (httpx.PoolTimeout, FailureKind.CONNECT, "has no connection free"),
    (TimeoutError, FailureKind.TIMEOUT, "did not answer in time"),
    (httpx.TimeoutException, FailureKind.TIMEOUT, "did not answer in time"),
    (httpx.TransportError, FailureKind.DROPPED, "dropped the connection"),
)


class _AnswerTooLarge(Exception):
    """An answer that is not streamed exceeds the limit."""


class _ClientGone(Exception):
    """The client's connection takes no more bytes."""


def make_client(timeouts: Timeouts, api_key: str | None = None) -> httpx.AsyncClient:
    """The HTTP client for all instances, which have this key; deadlines beyond connecting are the
    legs' own."""
    return httpx.AsyncClient(
        headers=None if api_key is None else [bearer(api_key)],
        timeout=httpx.Timeout(None, connect=timeouts.connect_s),
        transport=CancelSafeTransport(
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S
            ),
            trust_env=False,
        ),
        # Instances are addressed as configured, never through a proxy of the environment.
        trust_env=False,
    )


@dataclass(frozen=True, slots=True)
class Upstream:
    """Sends legs. Each coroutine posts one final event, unless it is cancelled."""

    client: httpx.AsyncClient
    timeouts: Timeouts
    limits: RouterLimits

    async def prefill(self, url: str, leg: Leg, post: Post) -> None:
        """Send P its leg and wait for the whole answer."""
        try:
            async with (
                asyncio.timeout(self.timeouts.prefill_s),
                self._request(url, leg) as response,
            ):
                answer = await self._read(response)
        except Exception as error:
            post(_as_lost(LegName.PREFILL, error))
        else:
            post(PrefillAnswered(answer))

    async def decode(
        self, url: str, leg: Leg, post: Post, relay: asyncio.Event, stream: EventStream
    ) -> None:
        """Send D its leg; a stream is announced at its first byte and passed on after `relay`."""
        first_byte_s = self.timeouts.first_byte_s if leg.stream else None
        try:
            async with (
                asyncio.timeout(first_byte_s) as deadline,
                self._request(url, leg) as response,
            ):
                if not _is_event_stream(response):
                    post(DecodeAnswered(await self._read(response)))
                    return
                chunks = aiter(response.aiter_raw())
                # Servers send the head before there is anything to say. While no byte of the
                # body is there, the client can still get another status.
                chunk = await anext(chunks, b"")
                if not chunk:
                    reason = "ended the stream before its first byte"
                    post(LegLost(LegName.DECODE, FailureKind.INCOMPLETE, reason))
                    return
                deadline.reschedule(None)
                post(DecodeStreaming())
                await relay.wait()
                await _to_client(stream.start(response.status_code, _content_type(response)))
                while chunk:
                    await _to_client(stream.write(chunk))
                    chunk = await anext(chunks, b"")
                post(DecodeEnded(stream.ending))
        except _ClientGone:
            post(ClientLeft())
        except Exception as error:
            post(_as_lost(LegName.DECODE, error))

    async def let_go(self, url: str, headers: LegHeaders) -> None:
        """Tell P that nobody will collect a transfer; one that is gone keeps nothing anyway."""
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(self.timeouts.learn_s):
                await self.client.delete(url, headers=_encoded(headers))

    def _request(self, url: str, leg: Leg) -> AbstractAsyncContextManager[httpx.Response]:
        headers = _encoded(leg.headers)
        return self.client.stream("POST", url, content=leg.content, headers=headers)

    async def _read(self, response: httpx.Response) -> Answer:
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self.limits.max_answer_bytes:
                raise _AnswerTooLarge
        return Answer(response.status_code, _content_type(response), bytes(content))


def _encoded(headers: LegHeaders) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers]


def _content_type(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "application/octet-stream"))


def _is_event_stream(response: httpx.Response) -> bool:
    return response.is_success and _content_type(response).startswith("text/event-stream")


async def _to_client(sending: Awaitable[None]) -> None:
    try:
        await sending
    except OSError as error:
        raise _ClientGone from error


def _as_lost(leg: LegName, error: Exception) -> LegLost:
    if isinstance(error, _AnswerTooLarge):
        return LegLost(leg, FailureKind.TOO_LARGE, "gave a larger answer than the router takes")
    for kind_of_error, kind, reason in _KINDS:
        if isinstance(error, kind_of_error):
            detail = str(error)
            return LegLost(leg, kind, f"{reason} ({detail})" if detail else reason)
    # A leg that ended without an event would leave the client waiting for ever.
    _log.error("the %s leg ended in an unexpected error", leg, exc_info=error)
    return LegLost(leg, FailureKind.UNREADABLE, f"could not be used: {error!r}")
