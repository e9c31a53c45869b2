"""What each process told of a transfer, and how its clock stands to ours.

Decides what of an answer is believed: entries have a time and a name, details are plain values,
and there are bounds on all of it. Refuses to know how the answer came. Pure.
"""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_ENTRIES = 4096
MAX_TEXT = 512
_MAX_DETAILS = 64
_LATEST_UNIX_S = 1e11


class Unanswered(Exception):
    """No usable answer; says why in a few words."""


class Part(enum.StrEnum):
    """What somebody was asked as."""

    ROUTER = "router"
    PREFILL = "P"
    DECODE = "D"


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at another clock.

    Attributes:
        asked_at_s, answered_at_s: our clock, before and after.
        clock_s: theirs, at some moment in between.
    """

    asked_at_s: float
    answered_at_s: float
    clock_s: float

    @property
    def round_trip_s(self) -> float:
        """How long the question and its answer took."""
        return max(0.0, self.answered_at_s - self.asked_at_s)


@dataclass(frozen=True, slots=True)
class Clock:
    """How a clock stands to ours: theirs is ours plus `offset_s`, give or take `uncertainty_s`.

    The uncertainty is half the round trip: it holds however unevenly the two ways share it.
    """

    offset_s: float
    uncertainty_s: float


def compare_clocks(readings: Iterable[Reading]) -> Clock | None:
    """What the shortest of several round trips says, as in NTP; None without any."""
    best = min(readings, key=lambda each: each.round_trip_s, default=None)
    if best is None:
        return None
    half_s = best.round_trip_s / 2
    return Clock(best.clock_s - (best.asked_at_s + half_s), half_s)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened, on its teller's clock."""

    at_unix_s: float
    what: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Account:
    """What one process told. `clock` is None if it could not be compared; ours is assumed then."""

    part: Part
    place: str
    entries: tuple[Entry, ...]
    clock: Clock | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody who was asked: an account, or in a few words why there is none."""

    part: Part
    place: str
    account: Account | None = None
    problem: str = ""


def transfer_id(asked: Iterable[Asked]) -> str | None:
    """Under which id a router dispatched the call, if one says so."""
    for each in asked:
        for entry in each.account.entries if each.account is not None else ():
            told = entry.details.get("transfer_id")
            if isinstance(told, str) and told:
                return told
    return None


def read_entries(content: object) -> tuple[Entry, ...]:
    """The entries of an answer; what is none is passed over, what is too long is cut.

    Raises:
        Unanswered: it is not a list.
    """
    if not isinstance(content, list):
        raise Unanswered(f"told no story, but a {type(content).__name__}")
    found = (_entry(item) for item in content[:MAX_ENTRIES])
    return tuple(entry for entry in found if entry is not None)


def _entry(item: object) -> Entry | None:
    if not isinstance(item, dict):
        return None
    at, what = item.get("at_unix_s"), item.get("what")
    if isinstance(at, bool) or not isinstance(at, int | float) or not isinstance(what, str):
        return None
    if read_clock(at) is None:
        return None
    named = [(key, value) for key, value in item.items() if key not in ("at_unix_s", "what")]
    return Entry(
        float(at),
        plain(what),
        {plain(str(key)): _detail(value) for key, value in named[:_MAX_DETAILS]},
    )


def read_clock(unix_s: float) -> float | None:
    """A moment that somebody told; None if it is no number, or none of the next thousand years."""
    return float(unix_s) if abs(unix_s) < _LATEST_UNIX_S else None


def _detail(value: object) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        # JSON knows neither of the others.
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else plain(hex(value))
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"


def plain(text: str) -> str:
    """A text from the network as a terminal may show it: no control characters, not too long."""
    shown = "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT])
    return shown if len(text) <= MAX_TEXT else shown[:-3] + "..."
