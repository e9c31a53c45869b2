"""Who listens at an address, by ZMQ's own greeting, before a word is said.

Decides how handshake servers of kvcourier make themselves known, and who is taken for one. Refuses
to know what is said afterwards.

vLLM's own connectors listen on a ZMQ socket of the same kind, in a thread that ends by an exception
at the first message that it does not know, for all its peers (read in vLLM 0.26 and 0.32). While a
fleet is switched over, node by node, one misdirected request would do that. So nothing is sent to
a listener that does not say who it is.

The greeting is ZMTP 3 (https://rfc.zeromq.org/spec/23/): 64 bytes from either side, then, where no
keys are used, a READY command each, in which a ROUTER socket tells its routing id as Identity.
"""

import enum
import socket

from kvcourier.runtime import looks

NAME = b"kvcourier"
"""The routing id of a handshake server's socket, which ZMQ tells whoever connects."""

_NULL = b"NULL"
_GREETING_BYTES = 64
_SIGNATURE_AND_VERSION = b"\xff" + bytes(8) + b"\x7f\x03\x00"
# Held back until the other side has said what it uses: one with keys hangs up at this.
_REST_OF_GREETING = _NULL.ljust(20, b"\0") + bytes(32)
_COMMAND, _LONG = 0x04, 0x02
_MAX_READY_BYTES = 4096


class Listener(enum.Enum):
    """What a look at an address has found."""

    OURS = enum.auto()
    """A handshake server of kvcourier."""
    LOCKED = enum.auto()
    """One with keys: ZMQ itself sees to it that nothing reaches who does not fit."""
    FOREIGN = enum.auto()
    """Somebody else."""
    SILENT = enum.auto()
    """Stopped, or out of reach."""
    GONE = enum.auto()
    """Nobody."""


def meet(host: str, port: int, timeout_s: float) -> Listener:
    """Find out who listens there; blocks for about `timeout_s` at most."""
    return looks.look(host, port, timeout_s, _read, silent=Listener.SILENT, gone=Listener.GONE)


def _read(connection: socket.socket) -> Listener | None:
    connection.sendall(_SIGNATURE_AND_VERSION)
    greeting = _receive(connection, _GREETING_BYTES)
    if greeting is None:
        return None
    if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
        return Listener.FOREIGN
    if greeting[12:32].rstrip(b"\0") != _NULL:
        return Listener.LOCKED
    connection.sendall(_REST_OF_GREETING + _ready())
    flags = _receive(connection, 1)
    if flags is None:
        return None
    length = _receive(connection, 8 if flags[0] & _LONG else 1)
    if length is None:
        return None
    num_bytes = int.from_bytes(length, "big")
    if not flags[0] & _COMMAND or num_bytes > _MAX_READY_BYTES:
        return Listener.FOREIGN
    ready = _receive(connection, num_bytes)
    if ready is None:
        return None
    return Listener.OURS if _property(b"Identity", NAME) in ready else Listener.FOREIGN


def _receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    """So many bytes; None if the other side hangs up before."""
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            return None
        received += part
    return received


def _ready() -> bytes:
    body = b"\x05READY" + _property(b"Socket-Type", b"DEALER")
    return bytes([_COMMAND, len(body)]) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
