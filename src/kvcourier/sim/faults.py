"""What goes wrong in a world, as data.

Decides the kinds of faults. Refuses to know how a world is built: `network` and `world` bring them
about. Each stands for itself, so that any of them can be left out; `shrink` does that.

Times are the world's, in seconds. A fault of the network concerns one way from one place to
another and everything that sets out there from `at` on, for `for_s`. A place is where an instance
runs, whichever life of it.
"""

import enum
from dataclasses import dataclass


class Path(enum.StrEnum):
    """By which way something travels."""

    SIDE = "side channel"
    DATA = "data path"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTheWay:
    """Base of the faults of the network."""

    source: str
    target: str
    at: float
    for_s: float

    def covers(self, source: str, target: str, now: float) -> bool:
        """Whether it concerns what sets out now."""
        begun = self.at <= now < self.at + self.for_s
        return begun and (self.source, self.target) == (source, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lose(OnTheWay):
    """Messages and notifications do not arrive."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(OnTheWay):
    """Messages and notifications take longer, so that later ones overtake them."""

    path: Path
    by_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate(OnTheWay):
    """Messages and notifications arrive twice."""

    path: Path
    again_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle(OnTheWay):
    """Messages and notifications take any time up to `within_s`, each its own."""

    path: Path
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusePosts(OnTheWay):
    """Operations of `source` on `target` cannot be posted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailOperations(OnTheWay):
    """Operations fail in flight, after this part of their pieces has landed."""

    part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StickOperations(OnTheWay):
    """Operations do not end, then all land at `until`; None: they never do."""

    until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptOperations(OnTheWay):
    """Operations end well, but some bits that they bring are wrong. Only for worlds in which D
    compares everything: nothing else could notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(OnTheWay):
    """Nothing gets through this way; what sets out is lost, operations stay until it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """An instance is killed; another one starts at its address after `down_s`."""

    place: str
    at: float
    down_s: float
    keeps_engine_id: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """An instance's process is stopped for a while."""

    place: str
    at: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """An instance's clock starts anywhere and runs at another rate."""

    place: str
    skew_s: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """So many of the free blocks of an instance are somebody else's for a while."""

    place: str
    at: float
    for_s: float
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """The youngest sequence that runs loses its blocks, in the middle of a step; the next one that
    does, if none runs."""

    place: str
    at: float


class Leaver(enum.StrEnum):
    """Who ends a request early."""

    CLIENT = "client"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A dispatch is ended early: by its client, or by one engine for reasons of its own."""

    dispatch: int
    at: float
    by: Leaver


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """The router dies between a dispatch's legs: D never hears of it, and nobody tells P."""

    dispatch: int


Fault = (
    Lose
    | Delay
    | Duplicate
    | Shuffle
    | RefusePosts
    | FailOperations
    | StickOperations
    | CorruptOperations
    | Partition
    | Crash
    | Stall
    | Clock
    | Shortage
    | Preempt
    | Abort
    | Forget
)
