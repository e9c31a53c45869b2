"""Ports for servers that tests start."""

import itertools
import os
import socket

_NUMBERS = itertools.count()
_FIRST, _NUM_PORTS = 20_000, 10_000


def free_port() -> int:
    """A port that nobody listens at, and that no outgoing connection gets.

    A peer of a dead server tries its port again and again. From the range that the system gives to
    outgoing connections, one of these tries would sooner or later be from that very port, connect
    to itself, and keep it from the server's successor.
    """
    for _ in range(_NUM_PORTS):
        port = _FIRST + (os.getpid() * 37 + next(_NUMBERS)) % _NUM_PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port from {_FIRST} on")
