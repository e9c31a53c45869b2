"""Sums of what lies in DRAM, with numpy: there when the call returns.

Decides how cells become rows of words: copied together first, a part that a processor's cache
holds at a time, as numpy adds up evenly spaced words only.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from kvcourier.layout.digests import WORD_BYTES, Cells, UInt64Array, digest_of
from kvcourier.layout.geometry import MemoryKind, Region
from kvcourier.layout.packing import Parcel
from kvcourier.transport.copying.bounds import require_inside, require_parcel
from kvcourier.transport.copying.host import Row, parts_of, rows_of
from kvcourier.transport.copying.interface import LoadedCells, Sum


class HostDigester:
    """A `Digester` for a cache in DRAM."""

    part_bytes = 1 << 19

    def __init__(self, regions: Sequence[Region], device_id: int = 0) -> None:
        self._regions = tuple(regions)
        self._device_id = device_id
        self._scratch = np.empty(self.part_bytes, np.uint8)

    def warm_up(self, cell_bytes: Collection[int]) -> None:
        """Nothing is compiled."""

    def load(self, cells: Sequence[Cells]) -> LoadedCells:
        sides = [each.side for each in cells]
        require_inside(sides, self._regions, MemoryKind.DRAM, self._device_id)
        return LoadedCells(_Loaded(tuple(cells), tuple(map(rows_of, sides))))

    def start(self, loaded: LoadedCells, part: Parcel) -> Sum:
        held = cast(_Loaded, loaded)
        require_parcel(part, [each.side for each in held.cells])
        cells = held.cells[part.segment]
        words = self._words(cells, held.rows[part.segment], part)
        return _Summed(digest_of(words, cells.weights(part.start, part.stop), cells.word_weights))

    def close(self) -> None:
        """Nothing is under way."""

    def _words(self, cells: Cells, rows: Sequence[Row], part: Parcel) -> UInt64Array:
        """The bytes of these cells as words, a row each; good until the next call."""
        count, cell_bytes = part.stop - part.start, cells.side.piece_bytes
        if count * cell_bytes > len(self._scratch):
            self._scratch = np.empty(count * cell_bytes, np.uint8)
        packed = self._scratch[: count * cell_bytes]
        for items, index, there in parts_of(cells.side, rows, part, packed.ctypes.data):
            # Indices are known to be inside; with "raise", numpy would copy to and fro once more.
            np.take(items, index, out=there, mode="clip")
        by_cell = packed.reshape(count, cell_bytes)
        if cell_bytes % WORD_BYTES:
            padded = np.zeros((count, len(cells.word_weights) * WORD_BYTES), np.uint8)
            padded[:, :cell_bytes] = by_cell
            by_cell = padded
        return by_cell.view("<u8")


@dataclass(frozen=True, slots=True)
class _Summed:
    number: int

    def value(self) -> int:
        return self.number


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    cells: tuple[Cells, ...]
    rows: tuple[tuple[Row, ...], ...]
