"""Points in time, in order, that can be moved and cancelled.

Decides which names are due. Owns its ordering: vllm#58222 and #50789 took insertion order for
expiry order and leaked blocks. Refuses to know what a deadline means, and what time it is.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline per name.

    A moved or cancelled entry stays in the heap until it surfaces; the heap is rebuilt when such
    entries outnumber the live ones, so its size stays proportional to what is live.
    """

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, name: K) -> bool:
        return name in self._at

    def at(self, name: K) -> float | None:
        """When the name is due; None if it has no deadline."""
        return self._at.get(name)

    def set(self, name: K, at: float) -> None:
        """Give the name a deadline, in place of any it had."""
        self._at[name] = at
        # The serial keeps names of different types from being compared.
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, name))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._rebuild()

    def cancel(self, name: K) -> None:
        """Take the name's deadline away; unknown names are fine."""
        self._at.pop(name, None)

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[K]:
        """Remove and return every name due at `now`, earliest first."""
        due: list[K] = []
        while (name := self.pop_due(now)) is not None:
            due.append(name)
        return due

    def pop_due(self, now: float) -> K | None:
        """Remove and return the earliest name due at `now`; None if none is.

        One at a time, for whoever acts on each: acting on one may cancel the next.
        """
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        name = heapq.heappop(self._heap)[2]
        del self._at[name]
        return name

    def _drop_stale(self) -> None:
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    def _rebuild(self) -> None:
        entries = sorted(self._at.items(), key=lambda item: item[1])
        self._heap = [(at, serial, name) for serial, (name, at) in enumerate(entries)]
        self._serial = len(entries)
