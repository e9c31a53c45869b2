"""Digests of our own blocks, a part at a time between everything else that a courier does.

Decides how much is summed up before the courier looks elsewhere, and whose turn it is. Refuses to
know what a digest is for. Used on the courier's thread only.

On the host a part is arithmetic on this thread, which numpy does without the interpreter, so no
engine's step waits for it; that no thread of its own does it means that blocks can be given back
at any time. On a GPU a part is a kernel at low priority, which is asked whether it has ended.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcourier.core.commands import TakeDigest
from kvcourier.core.events import DigestTaken, Event, OperationId, PostRefused
from kvcourier.errors import ConfigError, MappingError
from kvcourier.layout import Parcel, RankCache, added, block_run, cells_of, parcels
from kvcourier.transport.copying import Digester, LoadedCells, Sum, digester_for

_BYTES_AT_A_TIME = 2 << 20
"""Summed up on the host before anything else is looked at: less than a millisecond's work."""


@dataclass(slots=True)
class _Job:
    operation_id: OperationId
    loaded: LoadedCells
    parts: deque[Parcel]
    cell_bytes: int
    under_way: Sum | None = None
    sums: list[int] = field(default_factory=list)


class DigestTaker:
    """All digests that one rank takes."""

    def __init__(
        self, cache: RankCache, clock: Callable[[], float], *, is_expected: bool = False
    ) -> None:
        """With `is_expected`, what the first digest needs is made now.

        Raises ConfigError then, if digests cannot be taken where the cache is.
        """
        self._cache = cache
        self._clock = clock
        self._digester: Digester | None = None
        self._jobs: deque[_Job] = deque()
        if is_expected:
            self._opened().warm_up({each.cell_bytes for each in cache.geometries})

    @property
    def busy(self) -> bool:
        """Whether anything is to be summed up."""
        return bool(self._jobs)

    def next_deadline(self) -> float | None:
        """When `poll` is due at the latest: as soon as the courier has looked elsewhere, unless all
        that is left to do is a GPU's."""
        has_work = any(job.under_way is None for job in self._jobs)
        return self._clock() if has_work else None

    def start(self, command: TakeDigest) -> list[Event]:
        """Find the cells; `poll` does the rest."""
        cache, group = self._cache, command.group
        try:
            if group >= len(cache.groups):
                raise MappingError(
                    f"group: expected one of {len(cache.groups)} cache groups, found {group}"
                )
            blocks = block_run("digest", cache, group, command.block_ids, command.held)
            cells = cells_of(
                cache.groups[group], blocks, command.share, command.integrity, command.seed
            )
            digester = self._opened()
            loaded = digester.load(cells)
        except (MappingError, ConfigError) as error:
            return [PostRefused(command.operation_id, str(error))]
        cell_bytes = cells[0].side.piece_bytes
        sizes = [(each.side.num_pieces, cell_bytes) for each in cells]
        parts = parcels(sizes, max(digester.part_bytes, cell_bytes))
        self._jobs.append(_Job(command.operation_id, loaded, deque(parts), cell_bytes))
        return []

    def abandon(self, operation_id: OperationId) -> None:
        """Nobody needs it; unknown ones are fine. A part that runs on a GPU only reads."""
        self._jobs = deque(job for job in self._jobs if job.operation_id != operation_id)

    def poll(self) -> list[Event]:
        """Sum up a little more, each in turn; returns what is complete."""
        events: list[Event] = []
        left = _BYTES_AT_A_TIME
        waiting = 0
        while self._jobs and left > 0 and waiting < len(self._jobs):
            job = self._jobs.popleft()
            num_bytes = self._advance(job)
            left -= num_bytes
            waiting = 0 if num_bytes else waiting + 1
            if job.under_way is None and not job.parts:
                events.append(DigestTaken(job.operation_id, added(job.sums)))
            else:
                self._jobs.append(job)
        return events

    def close(self) -> None:
        """Wait for what runs."""
        self._jobs.clear()
        if self._digester is not None:
            self._digester.close()

    def _advance(self, job: _Job) -> int:
        """Take a sum that is there, or start the next; returns how many bytes were worked on."""
        assert self._digester is not None
        if job.under_way is None:
            part = job.parts.popleft()
            job.under_way = self._digester.start(job.loaded, part)
            num_bytes = (part.stop - part.start) * job.cell_bytes
        else:
            num_bytes = 0
        value = job.under_way.value()
        if value is not None:
            job.sums.append(value)
            job.under_way = None
        return num_bytes

    def _opened(self) -> Digester:
        """Made when it is first needed: most instances never take a digest."""
        if self._digester is None:
            first = self._cache.regions[0]
            self._digester = digester_for(first.memory, first.device_id, self._cache.regions)
        return self._digester
