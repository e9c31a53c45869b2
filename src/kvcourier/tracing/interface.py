"""Tracing as servers use it.

Decides the facts of a span. Refuses to know OpenTelemetry.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

Carrier = Mapping[str, str]
"""Headers that say whose child a span is (W3C trace context), by lower-case names."""

UNTRACED: Carrier = MappingProxyType({})
"""Names no span."""

TRACE_HEADERS = frozenset({"traceparent", "tracestate", "baggage"})
"""The headers of W3C trace context and baggage."""

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)

Value = str | bool | int | float


class Kind(enum.Enum):
    """A span's part in a call from process to process, as OpenTelemetry means it."""

    INTERNAL = enum.auto()
    SERVER = enum.auto()
    CLIENT = enum.auto()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at a moment within a span."""

    at_unix_s: float
    name: str
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted, and is over.

    Attributes:
        failure: one sentence where it failed, else empty.
    """

    name: str
    start_unix_s: float
    end_unix_s: float
    kind: Kind = Kind.INTERNAL
    failure: str = ""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[Event, ...] = ()


class LiveSpan(Protocol):
    """A span that has begun; `end` it once."""

    def carrier(self) -> Carrier:
        """Headers that make spans of another process its children."""

    def child(
        self, name: str, kind: Kind, at_unix_s: float, attributes: Mapping[str, Value]
    ) -> "LiveSpan":
        """Begin a span within this one."""

    def end(self, at_unix_s: float, failure: str = "") -> None:
        """It is over."""


class Tracing(Protocol):
    """Takes spans; never blocks, never raises for what becomes of them."""

    def begin(
        self,
        name: str,
        kind: Kind,
        parent: Carrier,
        at_unix_s: float,
        attributes: Mapping[str, Value],
    ) -> LiveSpan:
        """Begin a span under the one that the headers name, or at the root of a new trace."""

    def tell(self, parent: Carrier, root: Span, children: Sequence[Span]) -> None:
        """Take a finished span and those directly within it."""

    def close(self) -> None:
        """Send what is left, within seconds; blocks until then."""


def trace_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Those of a request's headers that name a span."""
    lowered = ((name.lower(), value) for name, value in headers)
    return {name: value for name, value in lowered if name in TRACE_HEADERS}


def parent_of(traceparent: object) -> Carrier:
    """The headers of a parent that came by another way; none if it is malformed."""
    if isinstance(traceparent, str) and _TRACEPARENT.fullmatch(traceparent):
        return {"traceparent": traceparent}
    return UNTRACED
