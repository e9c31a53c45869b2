"""When messages arrive and bytes land, and which of them do not: both ways between instances.

Decides the fate of everything that sets out, from the faults of the world. Refuses to know what
messages mean and what bytes are; `side_channel` and `data_path` carry them.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcourier.sim.faults import (
    CorruptOperations,
    Delay,
    Duplicate,
    FailOperations,
    Fault,
    Lose,
    OnTheWay,
    Partition,
    Path,
    RefusePosts,
    Shuffle,
    StickOperations,
)
from kvcourier.sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Speed:
    """How long things take without faults, each drawn between the two."""

    message_s: tuple[float, float] = (0.0002, 0.0006)
    operation_s: tuple[float, float] = (0.002, 0.02)


@dataclass(frozen=True, slots=True)
class OperationFate:
    """What becomes of an operation.

    Attributes:
        portions: (when, part of all pieces that have landed by then), ascending; the last is 1 if
            it ends well.
        fails_at: when it fails; None if it does not.
        refused: it cannot even be posted.
        corrupted: what it brings is wrong, and nobody is told.
    """

    portions: Sequence[tuple[float, float]] = ()
    fails_at: float | None = None
    refused: bool = False
    corrupted: bool = False


class Network:
    """The way from any place to any other."""

    def __init__(
        self, timeline: Timeline, faults: Iterable[Fault], speed: Speed, chance: random.Random
    ) -> None:
        self._timeline = timeline
        self._faults = [fault for fault in faults if isinstance(fault, OnTheWay)]
        self._speed = speed
        self._chance = chance
        self._last: dict[tuple[Path, str, str], float] = {}

    def heal(self) -> None:
        """Nothing goes wrong from now on."""
        self._faults = []

    def arrivals(self, path: Path, source: str, target: str) -> list[float]:
        """When a message that sets out now arrives: never, once, or twice."""
        now = self._timeline.now
        usual = now + self._chance.uniform(*self._speed.message_s)
        faults = [
            each
            for each in self._covering(source, target)
            if isinstance(each, Partition) or getattr(each, "path", None) is path
        ]
        if any(isinstance(each, Lose | Partition) for each in faults):
            return []
        late = 0.0
        for each in faults:
            if isinstance(each, Delay):
                late += each.by_s
            elif isinstance(each, Shuffle):
                late += self._chance.uniform(0.0, each.within_s)
        if late == 0.0:
            # One connection keeps the order of what it carries.
            way = (path, source, target)
            usual = self._last[way] = max(usual, self._last.get(way, 0.0))
        again = [usual + late + e.again_after_s for e in faults if isinstance(e, Duplicate)]
        return [usual + late, *again[:1]]

    def fate(self, source: str, target: str) -> OperationFate:
        """What becomes of an operation that is posted now."""
        now = self._timeline.now
        faults = self._covering(source, target)
        if any(isinstance(each, RefusePosts) for each in faults):
            return OperationFate(refused=True)
        seconds = self._chance.uniform(*self._speed.operation_s)
        middle = (now + seconds / 2, self._chance.choice((0.0, 0.5)))
        for each in faults:
            if isinstance(each, FailOperations):
                return OperationFate([(now + seconds / 2, each.part)], fails_at=now + seconds)
        until = [
            each.until if isinstance(each, StickOperations) else each.at + each.for_s
            for each in faults
            if isinstance(each, StickOperations | Partition)
        ]
        if None in until:
            return OperationFate([middle])
        stuck_until = max((at for at in until if at is not None), default=0.0)
        return OperationFate(
            [middle, (max(now, stuck_until) + seconds, 1.0)],
            corrupted=any(isinstance(each, CorruptOperations) for each in faults),
        )

    def _covering(self, source: str, target: str) -> list[OnTheWay]:
        now = self._timeline.now
        return [each for each in self._faults if each.covers(source, target, now)]
