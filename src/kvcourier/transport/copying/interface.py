"""What the rest of kvcourier asks of something that copies between a cache and a staging slot.

Decides the verbs and their errors. Refuses to know about requests, peers and who owns a slot.

Threading: all calls on one copier come from one thread, the courier's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvcourier.layout.digests import Cells
from kvcourier.layout.geometry import Region
from kvcourier.layout.packing import PackedSide, Parcel

LoadedTables = NewType("LoadedTables", object)
"""Segments where a copier's copies can read them; opaque, and valid for that copier only.

Keep it until every copy that was started with it is done.
"""


class Finished(Protocol):
    """Tells whether work that was given to a device has ended; a `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has ended; never blocks."""

    def synchronize(self) -> None:
        """Block until it has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One copy that was started; `finished` is None if it had ended when the call returned."""

    finished: Finished | None


LoadedCells = NewType("LoadedCells", object)
"""Cells where a digester's sums can read what they weigh; opaque, and valid for it only."""


class Sum(Protocol):
    """The sum over one part of some cells, started."""

    def value(self) -> int | None:
        """The sum modulo 2**64, or None while it is under way; never blocks."""


class Digester(Protocol):
    """Sums up cells of a cache on one device; see `layout.digests`.

    Only reads. Sums run in the order in which they were started, on a GPU beside the engine's
    kernels and any copier's.
    """

    def warm_up(self, cell_bytes: Collection[int]) -> None:
        """Make the first sum over cells of these sizes as quick as the others.

        Takes seconds on a GPU, where kernels are compiled. Without it, the first sum does.
        """

    @property
    def part_bytes(self) -> int:
        """How much to sum up at a time: on the host `start` takes as long as its part does."""

    def load(self, cells: Sequence[Cells]) -> LoadedCells:
        """Put what cells weigh where sums can read it; once a digest.

        Raises MappingError if a cell lies outside the cache's regions.
        """

    def start(self, loaded: LoadedCells, part: Parcel) -> Sum:
        """Start the sum over cells `part.start` to `part.stop` of `cells[part.segment]`.

        Keep `loaded` until it is there. Raises MappingError if there are no such cells.
        """

    def close(self) -> None:
        """Wait for all sums. Idempotent."""


class Copier(Protocol):
    """Copies pieces between a cache and staging slots on one device.

    Copies run in the order in which they were started, so one that waits holds up all behind it.
    """

    def allocate(self, num_bytes: int) -> Region:
        """Staging memory, aligned to 4 KiB at least; the copier owns it until `close`.

        Raises ConfigError if the device has not so much free.
        """

    def load(self, segments: Sequence[PackedSide]) -> LoadedTables:
        """Put one transfer's segments where copies can read them; once a transfer.

        Raises MappingError if a piece lies outside the cache's regions; nothing is kept then.
        """

    def gather(
        self,
        tables: LoadedTables,
        parcel: Parcel,
        slot_address: int,
        after: Finished | None = None,
    ) -> Ticket:
        """Start copying a parcel's pieces from the cache into a slot, one right after the other.

        The cache is read once `after` has ended: on a GPU, the event behind the kernels that
        write these pieces. Raises MappingError if there is no such parcel, or the slot is not
        in memory from `allocate`, too short, or not aligned to 16 bytes.
        """

    def scatter(self, tables: LoadedTables, parcel: Parcel, slot_address: int) -> Ticket:
        """Start copying a slot to where the parcel's pieces lie in the cache.

        Raises MappingError as `gather` does.
        """

    def done(self, ticket: Ticket) -> bool:
        """Whether a copy has ended, and its bytes are visible to everyone; never blocks."""

    def wait(self, ticket: Ticket) -> None:
        """Block until a copy has ended."""

    def close(self) -> None:
        """Wait for all copies, then give the staging memory back.

        First see to it that no peer can still touch that memory. Idempotent.
        """
