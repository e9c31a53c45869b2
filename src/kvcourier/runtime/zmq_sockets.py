"""ZMQ sockets of the side channel: opened at an address, connected to one, looked at and closed.

Decides how addresses are written and what is said where one cannot be used. Refuses to know what
the sockets are for.
"""

import zmq

from kvcourier.errors import ConfigError, RemoteProtocolError
from kvcourier.runtime.channel_keys import KeyCheck


def readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message waits in it."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def destroy(
    context: "zmq.Context[zmq.Socket[bytes]]", key_check: KeyCheck | None, linger: int
) -> None:
    """Close a context with all its sockets, after whoever checks keys in it."""
    if key_check is not None and not context.closed:
        key_check.close()
    context.destroy(linger=linger)


def connect(socket: "zmq.Socket[bytes]", host: str, port: int) -> None:
    """Connect to an address; raises RemoteProtocolError, and closes it, if that is none."""
    socket.setsockopt(zmq.IPV6, ":" in host)
    try:
        socket.connect(f"tcp://{_bracketed(host)}:{port}")
    except (zmq.ZMQError, UnicodeError) as error:
        socket.close()
        raise RemoteProtocolError(f"host {host!r} cannot be connected: {error}") from None


def bind(socket: "zmq.Socket[bytes]", host: str, port: int) -> int:
    """Open at an address, 0 being any port; returns the port. Raises ConfigError."""
    socket.setsockopt(zmq.IPV6, ":" in host)
    endpoint = f"tcp://{_bracketed(host)}:{port if port else '*'}"
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"side channel {host}:{port} cannot be opened: {error.strerror}; "
            "choose another --side-channel-host or --side-channel-port"
        ) from None
    last = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(last.rsplit(":", 1)[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
