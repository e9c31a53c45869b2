"""A small HTTP server for tests, on loopback and in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_LOOK_S = 0.01


class Handler(BaseHTTPRequestHandler):
    """What handlers have in common: they keep connections, and write no log."""

    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a whole answer."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        """What came with the request."""
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class Listener:
    """Serves from the start; `close` it."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # It looks that often whether it is to end.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Nobody listens any more; idempotent."""
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a listener that is closed at the end of the block."""
    listener = Listener(handler)
    try:
        yield listener.url
    finally:
        listener.close()
