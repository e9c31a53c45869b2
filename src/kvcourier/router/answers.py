"""How the router itself answers a client.

Decides the shape of error objects (OpenAI's) and how an answer or a stream is put on the wire.
Refuses to know why.
"""

from collections.abc import Iterable

import msgspec
from starlette.types import Send

from kvcourier.openai import ErrorBody, ErrorDetail

JSON_TYPE = "application/json"
_TAIL_BYTES = 4096

Headers = Iterable[tuple[str, str]]

_ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_content(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    """An OpenAI error object for this HTTP status."""
    kind = _ERROR_TYPES.get(status, "upstream_error")
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

    Looks at the last event only, to tell a whole answer from a torn one.
    """

    def __init__(self, send: Send, headers: Headers) -> None:
        self._send = send
        self._headers = tuple(headers)
        self._tail = b""
        self.started = False

    async def start(self, status: int, content_type: str) -> None:
        """Send the head, once."""
        self.started = True
        await _send_head(self._send, status, content_type, self._headers)

    async def write(self, chunk: bytes) -> None:
        """Pass one chunk on."""
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    @property
    def complete(self) -> bool:
        """Whether the last event is `[DONE]`, or an error that D itself has told."""
        events = self._tail.replace(b"\r\n", b"\n").strip().rsplit(b"\n\n", 1)
        payload = events[-1].removeprefix(b"data:").strip()
        return payload == b"[DONE]" or payload.startswith(b'{"error"')

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
