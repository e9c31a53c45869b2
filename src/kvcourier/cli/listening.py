"""Serving an ASGI application until somebody says stop.

Decides the ready line, and what the signals do: the first SIGINT or SIGTERM stops politely, the
second at once. Refuses to know what is served.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from kvcourier.errors import ConfigError, KVCourierError

_GRACE_S = 3


class ServerFailed(KVCourierError):
    """The application did not start; the log has the traceback."""


def bind(host: str, port: int) -> socket.socket:
    """Take the address before anything slow starts; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host/--port: cannot listen at {host}:{port}: {error.strerror or error}; "
            "name another port, or 0 for a free one"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Address for clients on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_until_stopped(application: Any, listener: socket.socket) -> None:
    """Serve; print the ready line once requests are answered; return after SIGTERM.

    Requests that run when a signal comes get a few seconds to end. Blocks; main thread only.

    Raises:
        KeyboardInterrupt: SIGINT stopped it (after the same polite end).
        ServerFailed: the application's start-up failed.
    """
    server = _Server(
        uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_S,
            # The router keeps connections; closing one under it would fail its next request.
            timeout_keep_alive=75,
        ),
        ready_line=f"kvcourier ready {url_of(listener)}",
    )
    with contextlib.closing(listener):
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except SystemExit as error:  # uvicorn's way of saying it, after logging the reason
            raise ServerFailed("the server did not start; the log above says why") from error
    if server.stopped_by is signal.SIGINT:
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    """uvicorn raises a captured signal again after its shutdown, which would end the process
    before our own clean-up; so the signals are ours."""

    def __init__(self, config: uvicorn.Config, ready_line: str) -> None:
        super().__init__(config)
        self._ready_line = ready_line
        self.stopped_by: signal.Signals | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._ready_line, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # An embedded instance ends its running requests with an error of their own.
        state = getattr(self.config.app, "state", None)
        getattr(state, "begin_stop", lambda: None)()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopped_by = self.stopped_by or number
