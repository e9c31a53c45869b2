"""All accounts of a transfer in one order.

Decides where an entry stands on our clock, and what is told of the clocks themselves. Refuses to
reorder what one process told: its own clock is exact. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcourier.story.accounts import Account, Asked, Part


@dataclass(frozen=True, slots=True)
class Moment:
    """An entry, in seconds since the first of the timeline."""

    at_s: float
    part: Part
    place: str
    what: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is known of a transfer. `start_unix_s` is the first moment, on our clock."""

    key: str
    start_unix_s: float
    moments: tuple[Moment, ...]
    asked: tuple[Asked, ...]

    @property
    def accounts(self) -> tuple[Account, ...]:
        """Of those who know it."""
        return tuple(each.account for each in self.asked if each.account is not None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: milliseconds, and who was asked with what came of it."""
        return {
            "key": self.key,
            "start_unix_s": self.start_unix_s,
            "moments": [
                {
                    "at_ms": round(each.at_s * 1e3, 6),
                    "who": each.part.value,
                    "place": each.place,
                    "what": each.what,
                    "details": dict(each.details),
                }
                for each in self.moments
            ],
            "asked": [_asked_as_dict(each) for each in self.asked],
        }


def make_timeline(key: str, asked: Iterable[Asked]) -> Timeline:
    """Put what was told on our clock, in order; without accounts it has no moments."""
    asked = tuple(asked)
    placed = [
        (entry.at_unix_s - _offset_s(each.account), each, entry)
        for each in asked
        if each.account is not None
        for entry in each.account.entries
    ]
    placed.sort(key=lambda item: item[0])
    start = placed[0][0] if placed else 0.0
    moments = tuple(
        Moment(at - start, each.part, each.place, entry.what, entry.details)
        for at, each, entry in placed
    )
    return Timeline(key, start, moments, asked)


def _offset_s(account: Account) -> float:
    return account.clock.offset_s if account.clock is not None else 0.0


def _asked_as_dict(asked: Asked) -> dict[str, Any]:
    told: dict[str, Any] = {"who": asked.part.value, "place": asked.place}
    if asked.account is None:
        return told | {"problem": asked.problem}
    told["entries"] = len(asked.account.entries)
    if (clock := asked.account.clock) is not None:
        told["clock_offset_ms"] = round(clock.offset_s * 1e3, 6)
        told["clock_uncertainty_ms"] = round(clock.uncertainty_s * 1e3, 6)
    return told
