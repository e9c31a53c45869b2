"""Virtual time: one for the world, and a clock of its own for every process.

Decides what happens next. Refuses to know what that is. Time passes only from one thing that is
due to the next, so an hour without events costs nothing.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass


class Timeline:
    """Everything that is going to happen, in order of time, then of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = itertools.count()

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have `what` called at this time, or now if that is over."""
        heapq.heappush(self._due, (max(when, self.now), next(self._serial), what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Have `what` called so many seconds from now."""
        self.at(self.now + seconds, what)

    def run_until(self, stop: float) -> None:
        """Let everything happen that is due by then."""
        while self._due and self._due[0][0] <= stop:
            self.now, _, what = heapq.heappop(self._due)
            what()
        self.now = max(self.now, stop)


@dataclass(frozen=True, slots=True)
class ProcessClock:
    """What a process's own clock shows: it starts anywhere, and runs a little fast or slow."""

    timeline: Timeline
    skew_s: float = 0.0
    rate: float = 1.0

    def __call__(self) -> float:
        """Seconds on this clock, now."""
        return self.skew_s + self.rate * self.timeline.now

    def when(self, reading: float) -> float:
        """The world's time at which this clock shows `reading`."""
        return (reading - self.skew_s) / self.rate
