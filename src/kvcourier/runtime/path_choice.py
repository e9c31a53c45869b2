"""Direct or packed: which of the two should be faster for one WRITE to one peer.

Decides by a model with four costs, each measured anew with every transfer. Refuses to know how
either path works. Pure: times come in as values.

    direct = pieces * post + bytes * wire
    packed = open + parcels * turn + bytes * (wire + copy)

On UCX a piece costs 2 to 7 us inside the post call, however small it is, so scattered blocks cost
up to eighty times the wire's time (design, section 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvcourier.config import PathPolicy, TransferPath
from kvcourier.layout.geometry import MemoryKind

_WEIGHT = 0.25
"""Of a new measurement; the rest is what was known before."""

_MOST_FACTOR = 8.0
"""How far the costs of our own work may be learnt away from their first guess. Whatever a crowd of
transfers has suffered, the next one alone must not be sent the slow way for it."""

_FORGET = 0.05
"""How much of its first guess comes back to the path that was not taken, with every choice: a cost
that keeps a path from being taken would never be measured again."""

_MEASURABLE_S = 0.004
"""What a wire must be expected to take for its time to be learnt: the end of an operation is seen
up to a millisecond late."""


@dataclass(frozen=True, slots=True)
class PathCosts:
    """What moving costs, in seconds.

    Attributes:
        post_s: posting one piece.
        wire_s: one byte on its way.
        copy_s: gathering and scattering one byte.
        open_s: opening a stream until its first slot is granted.
        turn_s: handing one parcel over.
    """

    post_s: float
    wire_s: float
    copy_s: float
    open_s: float
    turn_s: float

    def estimate(self, pieces: int, parcels: int, num_bytes: int) -> dict[TransferPath, float]:
        """Seconds by each path."""
        wire = num_bytes * self.wire_s
        return {
            TransferPath.DIRECT: pieces * self.post_s + wire,
            TransferPath.PACKED: self.open_s
            + parcels * self.turn_s
            + num_bytes * self.copy_s
            + wire,
        }


# Where a peer has not been measured yet: two H200 on NVLink, and two cores with shared memory.
FIRST_GUESS: Mapping[MemoryKind, PathCosts] = {
    MemoryKind.VRAM: PathCosts(4e-6, 1 / 3.4e11, 2 / 3e12, 3e-4, 2e-4),
    MemoryKind.DRAM: PathCosts(7e-6, 1 / 2.5e9, 2 / 4e9, 3e-3, 1e-3),
}


class PathChooser:
    """What is known of one peer rank, and the choice that follows from it."""

    def __init__(self, policy: PathPolicy, memory: MemoryKind) -> None:
        self._policy = policy
        self._guess = FIRST_GUESS[memory]
        self.costs = self._guess

    def choose(
        self, pieces: int, parcels: int, num_bytes: int
    ) -> tuple[TransferPath, dict[TransferPath, float]]:
        """The path, and what both are expected to take in seconds."""
        estimates = self.costs.estimate(pieces, parcels, num_bytes)
        if self._policy is PathPolicy.AUTO:
            path = min(estimates, key=lambda path: estimates[path])
            self._forget("turn_s" if path is TransferPath.DIRECT else "post_s")
            return path, estimates
        return TransferPath(self._policy.value), estimates

    def learn_direct(self, pieces: int, num_bytes: int, post_s: float, total_s: float) -> None:
        """A direct transfer took so long, of which posting took `post_s`."""
        self._learn_work("post_s", post_s / pieces)
        # What few bytes take is latency, and while many pieces are posted the first ones move.
        wire_s = total_s - post_s
        if num_bytes * self._guess.wire_s > _MEASURABLE_S and wire_s > post_s:
            self._learn("wire_s", wire_s / num_bytes)

    def learn_packed(self, parcels: int, num_bytes: int, total_s: float) -> None:
        """A packed transfer that shared no slots with others took so long."""
        costs = self.costs
        moved_s = costs.open_s + num_bytes * (costs.copy_s + costs.wire_s)
        self._learn_work("turn_s", max(0.0, total_s - moved_s) / parcels)

    def _learn_work(self, name: str, value: float) -> None:
        guess: float = getattr(self._guess, name)
        self._learn(name, min(max(value, guess / _MOST_FACTOR), guess * _MOST_FACTOR))

    def _forget(self, name: str) -> None:
        known, guess = getattr(self.costs, name), getattr(self._guess, name)
        self.costs = replace(self.costs, **{name: known + _FORGET * (guess - known)})

    def _learn(self, name: str, value: float) -> None:
        known: float = getattr(self.costs, name)
        self.costs = replace(self.costs, **{name: known + _WEIGHT * (value - known)})
