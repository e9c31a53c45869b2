"""Every exception that kvcourier raises, as one tree.

KVCourierError
├── ConfigError            a flag, a file or an environment variable cannot be used
├── ParamsError            a request's kv_transfer_params cannot be used (HTTP 400)
├── HandshakeRejected      two instances do not fit; lists each differing field
├── ProtocolError          never raised directly
│   ├── LocalProtocolError     our caller broke the contract of an interface
│   └── RemoteProtocolError    a peer sent something malformed
├── MappingError           two cache geometries, or two lists of block ids, cannot be paired
└── TransportError         never raised directly by our code
    ├── RegistrationFailed     memory could not be registered
    ├── PostFailed             an operation could not be posted; nothing is in flight for it
    └── PeerLost               the agent on the other side is gone

In `core`, things that go wrong in the world are events. Exceptions are for misuse and for
malformed input.
"""

from collections.abc import Sequence


class KVCourierError(Exception):
    """Base of all errors raised by kvcourier."""


class ConfigError(KVCourierError):
    """A setting cannot be used; the message names it, what was found and what is allowed."""


class ParamsError(KVCourierError):
    """A field of a request's `kv_transfer_params` is missing or unusable.

    Engines answer such a request with HTTP 400 and go on.
    """

    def __init__(self, field: str, expected: str, found: object) -> None:
        self.field = field
        super().__init__(f"kv_transfer_params.{field}: expected {expected}, found {shorten(found)}")


class HandshakeRejected(KVCourierError):
    """Two instances cannot exchange KV; `reasons` has one sentence per differing field."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class ProtocolError(KVCourierError):
    """One side broke the protocol. Raised only as one of the two subclasses."""


class LocalProtocolError(ProtocolError):
    """Our own side broke the contract of an interface: a bug in the caller."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something malformed; the message is dropped, nothing else changes."""


class MappingError(KVCourierError):
    """Two caches cannot be mapped on each other. Nothing was moved."""


class TransportError(KVCourierError):
    """Moving bytes failed. Raised as one of the subclasses."""


class RegistrationFailed(TransportError):
    """Memory could not be registered with the transport."""


class PostFailed(TransportError):
    """An operation could not be posted. Nothing of it is in flight."""


class PeerLost(TransportError):
    """The agent on the other side is gone: its process died or its connection was reset."""


def shorten(value: object, limit: int = 80) -> str:
    """How a refusal shows a value that came from outside: at most so many characters of it."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        # Nested too deeply, or a number too long to be printed: the type must do.
        text = f"a {type(value).__name__}"
    return clip(text, limit)


def clip(text: str, limit: int = 300) -> str:
    """A text that may repeat what came from outside, cut to so many characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
