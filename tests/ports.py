"""Ports for servers that tests start."""

import contextlib
import itertools
import os
import socket

_NUMBERS = itertools.count()
_FIRST, _NUM_PORTS = 20_000, 10_000
_APART = 6_181
"""Between the first ports of processes that follow each other: the golden section keeps any few of
them far apart, so that none takes a port that another has found free and not bound yet."""


def free_port() -> int:
    """A port that nobody listens at, and that no outgoing connection gets.

    A peer of a dead server tries its port again and again. From the range that the system gives to
    outgoing connections, one of these tries would sooner or later be from that very port, connect
    to itself, and keep it from the server's successor.
    """
    return free_ports(1).start


def free_ports(count: int) -> range:
    """As many of them, one after the other."""
    for _ in range(_NUM_PORTS):
        first = _FIRST + (os.getpid() * _APART + next(_NUMBERS)) % _NUM_PORTS
        ports = range(first, first + count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports
    raise AssertionError(f"no {count} free ports from {_FIRST} on")
