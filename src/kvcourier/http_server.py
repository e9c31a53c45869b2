"""Serving an ASGI application until somebody says stop.

Decides how the port is taken, the ready line, and what the signals do: the first SIGINT or
SIGTERM stops politely, the second at once. Refuses to know what is served.
"""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from kvcourier.errors import ConfigError, KVCourierError

_GRACE_S = 3
_BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ServerFailed(KVCourierError):
    """The application did not start; the log has the traceback."""


def bind(host: str, port: int) -> socket.socket:
    """Take the address before anything slow starts; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    if not 0 <= port <= 65535:
        # The resolver takes the port modulo 65536 without a word.
        raise _unusable(host, port, ValueError("a port is a number from 0 to 65535"))
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # With its protocol named, asyncio turns Nagle's delay off for accepted connections;
        # without, every answer in two writes waits 40 ms.
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _unusable(host, port, error) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # Two sockets may be bound to one port, but not listen: a taken port shows here.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Address for clients on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def print_ready(url: str) -> None:
    """Print the line that whoever started the process waits for."""
    print(f"kvcourier ready {url}", flush=True)


def serve_until_stopped(application: Any, listener: socket.socket) -> None:
    """Serve; print the ready line once requests are answered; return after SIGTERM.

    Requests that run when a signal comes get a few seconds to end. Blocks; main thread only.

    Raises:
        KeyboardInterrupt: SIGINT stopped it (after the same polite end).
        ServerFailed: the application's start-up failed.
    """
    server = HttpServer(application, listener)
    server.run()
    if server.stopped_by is signal.SIGINT:
        raise KeyboardInterrupt


class HttpServer(uvicorn.Server):
    """One application on one bound socket.

    An application with `app.state.begin_stop` is told, on the event loop, before its connections
    are closed, so that open streams can end with an error instead of silently.

    Args:
        application: the ASGI application.
        listener: a socket from `bind`; closed at the end.
        on_ready: called on the event loop with the URL once connections are accepted.
    """

    def __init__(
        self,
        application: Any,
        listener: socket.socket,
        on_ready: Callable[[str], None] = print_ready,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                log_level="warning",
                access_log=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_GRACE_S,
                # The router keeps connections; closing one under it would fail its next request.
                timeout_keep_alive=75,
            )
        )
        self._application = application
        self._listener = listener
        self._on_ready = on_ready
        self.stopped_by: signal.Signals | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped; blocks.

        Raises:
            ServerFailed: the application's start-up failed.
        """
        with contextlib.closing(self._listener):
            try:
                asyncio.run(self.serve(sockets=[self._listener]))
            except SystemExit as error:  # uvicorn's way of saying it, after logging the reason
                raise ServerFailed("the server did not start; the log above says why") from error

    def stop(self) -> None:
        """Begin to stop; from any thread, returns at once, idempotent."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then tell `on_ready`."""
        await super().startup(sockets)
        if self.started:
            self._on_ready(url_of(self._listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the application end what runs, then close."""
        state = getattr(self._application, "state", None)
        getattr(state, "begin_stop", lambda: None)()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals ourselves: uvicorn raises a captured one again after its shutdown, which
        would end the process before our own clean-up."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopped_by = self.stopped_by or number


def _unusable(host: str, port: int, error: Exception) -> ConfigError:
    why = getattr(error, "strerror", None) or error
    return ConfigError(
        f"--host/--port: cannot listen at {host}:{port}: {why}; "
        "name another address, or port 0 for a free one"
    )
