"""How the router itself answers a client.

Decides the shape of error objects (OpenAI's) and how an answer or a stream is put on the wire.
Refuses to know why.
"""

from collections.abc import Callable, Iterable

import msgspec
from starlette.types import Send

from kvcourier.openai import ErrorBody, ErrorDetail
from kvcourier.router.conversations import StateFilter
from kvcourier.router.events import StreamEnding

JSON_TYPE = "application/json"
_TAIL_BYTES = 4096

Headers = Iterable[tuple[str, str]]


def error_content(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    """An OpenAI error object for this HTTP status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, code)))


async def send_answer(
    send: Send, status: int, content: bytes, headers: Headers = (), content_type: str = JSON_TYPE
) -> None:
    """Send one complete answer."""
    await _send_head(send, status, content_type, (*headers, ("content-length", str(len(content)))))
    await send({"type": "http.response.body", "body": content, "more_body": False})


async def send_error(
    send: Send,
    status: int,
    message: str,
    headers: Headers = (),
    param: str | None = None,
    code: str | None = None,
) -> None:
    """Send one complete answer that holds an OpenAI error object."""
    await send_answer(send, status, error_content(status, message, param, code), headers)


class EventStream:
    """A relayed stream of server-sent events: bytes go through as they come.

    Looks at the last event only, to tell a whole answer from a torn one. `headers` are asked for
    when it starts.
    """

    def __init__(
        self, send: Send, headers: Callable[[], Headers], state: StateFilter | None = None
    ) -> None:
        """`state` takes what is not for the client out of it."""
        self._send = send
        self._state = state
        self._headers = headers
        self._tail = b""
        self.started = False

    async def start(self, status: int, content_type: str) -> None:
        """Send the head, once."""
        self.started = True
        await _send_head(self._send, status, content_type, self._headers())

    async def write(self, chunk: bytes) -> None:
        """Pass one chunk on."""
        if self._state is not None:
            chunk = self._state.chunk(chunk)
            if not chunk:
                return
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    @property
    def ending(self) -> StreamEnding:
        """What the last events say about how the stream ended."""
        events = self._tail.replace(b"\r\n", b"\n").strip().split(b"\n\n")
        payloads = [event.removeprefix(b"data:").strip() for event in events[-2:]]
        done = payloads[-1] == b"[DONE]"
        # Some servers send [DONE] after an error too.
        said = payloads[:-1] if done else payloads[-1:]
        if said and said[-1].startswith(b'{"error"'):
            return StreamEnding.ERROR_TOLD
        return StreamEnding.DONE if done else StreamEnding.TORN

    async def end(self) -> None:
        """End the stream in good order."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def break_off(self, message: str, code: str) -> None:
        """End the stream with an error event, set apart from a torn last one."""
        if not self.started:
            await self.start(200, "text/event-stream")
        apart = b"" if not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
        event = apart + b"data: " + error_content(502, message, code=code) + b"\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


async def _send_head(send: Send, status: int, content_type: str, headers: Headers) -> None:
    pairs = [("content-type", content_type), *headers]
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs],
        }
    )
