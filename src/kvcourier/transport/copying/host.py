"""Copies in DRAM with numpy: done when the call returns.

Decides how a row's pieces become items of one array, so that numpy copies a whole row of a parcel
at a time. Refuses to wait for anything but `after`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvcourier.layout.geometry import Int64Array, MemoryKind, Region
from kvcourier.layout.packing import PackedSide, Parcel
from kvcourier.transport.copying.bounds import (
    STAGING_ALIGNMENT_BYTES,
    require_inside,
    require_parcel,
    require_slot,
    row_bounds,
    strides_in,
    unit_steps,
)
from kvcourier.transport.copying.interface import Finished, LoadedTables, Ticket

Items = npt.NDArray[Any]
"""Bare memory as items of equal length: a dtype of that many bytes without a meaning."""

_DONE = Ticket(None)


class HostCopier:
    """A `Copier` for a cache in DRAM."""

    def __init__(self, regions: Sequence[Region], device_id: int = 0) -> None:
        self._regions = tuple(regions)
        self._device_id = device_id
        self._staging: list[Region] = []
        self._memory: list[npt.NDArray[np.uint8]] = []

    def allocate(self, num_bytes: int) -> Region:
        memory = np.empty(num_bytes + STAGING_ALIGNMENT_BYTES, np.uint8)
        # Touched now, or the first transfer would wait for the system to find every page.
        memory.fill(0)
        address = -(-memory.ctypes.data // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES
        region = Region(address, num_bytes, MemoryKind.DRAM, self._device_id)
        self._memory.append(memory)
        self._staging.append(region)
        return region

    def load(self, segments: Sequence[PackedSide]) -> LoadedTables:
        require_inside(segments, self._regions, MemoryKind.DRAM, self._device_id)
        return LoadedTables(_Tables(tuple(segments), tuple(map(rows_of, segments))))

    def gather(
        self,
        tables: LoadedTables,
        parcel: Parcel,
        slot_address: int,
        after: Finished | None = None,
    ) -> Ticket:
        if after is not None:
            after.synchronize()
        for row, index, slot in self._parts(tables, parcel, slot_address):
            # Indices are known to be inside; with "raise", numpy would copy to and fro once more.
            np.take(row, index, out=slot, mode="clip")
        return _DONE

    def scatter(self, tables: LoadedTables, parcel: Parcel, slot_address: int) -> Ticket:
        for row, index, slot in self._parts(tables, parcel, slot_address):
            row[index] = slot
        return _DONE

    def done(self, ticket: Ticket) -> bool:
        return True

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        self._staging.clear()
        self._memory.clear()

    def _parts(
        self, tables: LoadedTables, parcel: Parcel, slot_address: int
    ) -> list[tuple[Items, Int64Array, Items]]:
        loaded = cast(_Tables, tables)
        side = require_parcel(parcel, loaded.sides)
        num_pieces = parcel.stop - parcel.start
        require_slot(slot_address, num_pieces * side.piece_bytes, self._staging)
        return parts_of(side, loaded.rows[parcel.segment], parcel, slot_address)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Memory from a row's first piece to its last, and the item each piece starts with."""

    items: Items
    first_item: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    sides: tuple[PackedSide, ...]
    rows: tuple[tuple[Row, ...], ...]


def parts_of(
    side: PackedSide, rows: Sequence[Row], parcel: Parcel, address: int
) -> list[tuple[Items, Int64Array, Items]]:
    """Of each row: its items, which of them, and the items at `address` they belong to, where the
    parcel's pieces follow each other."""
    _, num_units, num_offsets = side.shape
    per_row = num_units * num_offsets
    parts = []
    for number in range(parcel.start // per_row, -(-parcel.stop // per_row)):
        row = rows[number]
        start = max(parcel.start, number * per_row)
        stop = min(parcel.stop, (number + 1) * per_row)
        item_bytes = row.items.itemsize
        there = _items(
            address + (start - parcel.start) * side.piece_bytes,
            (stop - start) * side.piece_bytes,
            item_bytes,
        )
        first = row.first_item[start - number * per_row : stop - number * per_row]
        if item_bytes < side.piece_bytes:
            first = (first[:, None] + np.arange(side.piece_bytes // item_bytes)).ravel()
        parts.append((row.items, first, there))
    return parts


def rows_of(side: PackedSide) -> tuple[Row, ...]:
    """Cut each row into the longest items that every piece of it is a whole number of.

    An item is a whole piece unless blocks are padded, or heads are split unevenly.
    """
    firsts, stops = row_bounds(side)
    items_of: dict[int, tuple[int, Int64Array]] = {}
    for stride in strides_in(side):
        steps = (unit_steps(side, stride)[:, None] + side.piece_offset_bytes).ravel()
        steps -= steps.min()
        item_bytes = int(np.gcd.reduce(steps, initial=side.piece_bytes))
        items_of[stride] = item_bytes, steps // item_bytes
    rows = []
    for first, stop, stride in zip(
        firsts.tolist(), stops.tolist(), side.row_block_stride_bytes.tolist(), strict=True
    ):
        item_bytes, first_item = items_of[stride]
        rows.append(Row(_items(first, stop - first, item_bytes), first_item))
    return tuple(rows)


class _Memory:
    """Lets numpy view memory that somebody else owns."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }


def _items(address: int, num_bytes: int, item_bytes: int) -> Items:
    return np.asarray(_Memory(address, (num_bytes // item_bytes,), f"|V{item_bytes}"))
