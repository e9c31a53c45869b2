"""Runs the application on a socket until a signal.

Decides how the port is taken, when callers are told that it listens, and how it stops: no new
connections, what runs is ended with an error, at most `grace_s` for the answers to go out.
Refuses to know routes.
"""

import contextlib
import errno
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from kvcourier.errors import ConfigError

DEFAULT_GRACE_S = 5
_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """Serves one application on one socket.

    `run` blocks until SIGINT or SIGTERM (where it runs on the main thread) or `stop`. It returns
    instead of raising the signal again, so that the caller can close the engine; a second signal
    skips the grace.

    Args:
        sock: bound, not yet listening; see `bind`.
        grace_s: whole seconds for connections to finish once stopping has begun.
        on_ready: called on the event loop, with the URL, as soon as connections are accepted.
    """

    def __init__(
        self,
        app: Starlette,
        sock: socket.socket,
        *,
        grace_s: int = DEFAULT_GRACE_S,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=grace_s,
                # The router keeps connections; closing one under it would fail its next request.
                timeout_keep_alive=75,
            )
        )
        self._sock = sock
        self._on_ready = on_ready
        self._begin_stop: Callable[[], None] = app.state.begin_stop
        self.url = _url(sock)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped."""
        super().run(sockets if sockets is not None else [self._sock])

    def stop(self) -> None:
        """Begin to stop; from any thread, returns at once, idempotent."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then tell `on_ready`."""
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what runs, then close."""
        self._begin_stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come. It is not recorded, as recorded ones are raised again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port`; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is not an address of ours.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port: expected 0 to 65535, found {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host: expected an address of this machine, found {host!r}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        # Listening here and not later, since two sockets may be bound to one port, not listen.
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_bind_failure(host, port, error)) from error
    return sock


def serve(
    app: Starlette,
    host: str,
    port: int,
    *,
    grace_s: int = DEFAULT_GRACE_S,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve `app` until SIGINT or SIGTERM, then return.

    Call on the main thread. Once it accepts connections it prints one line on stdout, for whoever
    started the process: `kvcourier ready http://127.0.0.1:8100`.

    Args:
        grace_s: whole seconds for connections to finish after the signal.
        on_ready: called with the URL instead of printing.

    Raises:
        ConfigError: the address cannot be taken.
    """
    with contextlib.closing(bind(host, port)) as sock:
        HttpServer(app, sock, grace_s=grace_s, on_ready=on_ready or print_ready).run()


def print_ready(url: str) -> None:
    """Print the line that callers wait for."""
    print(f"kvcourier ready {url}", flush=True)


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken by another process; choose another port, or stop it"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs privileges; choose a port above 1023"
    return f"cannot listen on port {port} of {host!r}: {error.strerror or error}"


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # every address of ours; the caller is on this machine
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
