"""Sums of what lies on a GPU: one kernel per part, on a stream of their own, with an event to ask.

Decides what is uploaded. Never waits for the device, only in `warm_up` and `close`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import torch

from kvcourier.layout.digests import WORD_BYTES, Cells
from kvcourier.layout.geometry import Int64Array, MemoryKind, Region
from kvcourier.layout.packing import Parcel
from kvcourier.transport.copying.bounds import require_inside, require_parcel
from kvcourier.transport.copying.cuda import cut_of, table_of
from kvcourier.transport.copying.interface import LoadedCells, Sum


class CudaDigester:
    """A `Digester` for a cache on one GPU. Raises ImportError if triton is missing."""

    part_bytes = 1 << 30

    def __init__(self, regions: Sequence[Region], device_id: int) -> None:
        from kvcourier.transport.copying.digest_kernel import num_programs, start

        self._start = start
        self._num_programs = num_programs
        self._regions = tuple(regions)
        self._device_id = device_id
        self._device = torch.device("cuda", device_id)
        # The lowest priority: the engine's kernels go first.
        self._stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call, unused-ignore]

    def warm_up(self, cell_bytes: Collection[int]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for num_words in {-(-each // WORD_BYTES) for each in cell_bytes}:
                memory = torch.zeros(num_words + 8, dtype=torch.int64, device=self._device)
                # One row, position and head, whose numbers are 0 but for the cell's address.
                table = torch.zeros(6, dtype=torch.int64, device=self._device)
                table[3] = memory.data_ptr()
                count = self._num_programs(1, num_words)
                sums = torch.empty(count, dtype=torch.int64, device=self._device)
                self._start(
                    table,
                    torch.zeros(num_words + 4, dtype=torch.int64, device=self._device),
                    sums,
                    range(1),
                    (1, 1, 1),
                    cell_bytes=WORD_BYTES * num_words,
                    num_words=num_words,
                    part_bytes=WORD_BYTES,
                )
                sums.sum()
            self._stream.synchronize()

    def load(self, cells: Sequence[Cells]) -> LoadedCells:
        sides = [each.side for each in cells]
        require_inside(sides, self._regions, MemoryKind.VRAM, self._device_id)
        self._bind()
        numbers = [part for each in cells for part in (table_of(each.side), keys_of(each))]
        edges = np.cumsum([0, *map(len, numbers)]).tolist()
        # torch gives device memory out again to the same stream only, so that all of it may be
        # dropped while sums are under way.
        there = self._upload(np.concatenate(numbers))
        parts = [there[start:stop] for start, stop in pairwise(edges)]
        segments = tuple(
            _Segment(
                table,
                keys,
                each.side.shape,
                each.side.piece_bytes,
                len(each.word_weights),
                cut_of(each.side).word_bytes,
            )
            for each, table, keys in zip(cells, parts[::2], parts[1::2], strict=True)
        )
        return LoadedCells(_Loaded(tuple(cells), segments))

    def start(self, loaded: LoadedCells, part: Parcel) -> Sum:
        held = cast(_Loaded, loaded)
        require_parcel(part, [each.side for each in held.cells])
        segment = held.segments[part.segment]
        self._bind()
        count = self._num_programs(part.stop - part.start, segment.num_words)
        sums = torch.empty(count, dtype=torch.int64, device=self._device)
        self._start(
            segment.table,
            segment.keys,
            sums,
            range(part.start, part.stop),
            segment.shape,
            cell_bytes=segment.cell_bytes,
            num_words=segment.num_words,
            part_bytes=segment.part_bytes,
        )
        there = torch.empty(1, dtype=torch.int64, pin_memory=True)
        there.copy_(sums.sum().reshape(1), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(self._stream)
        return _Sum(there, event)

    def close(self) -> None:
        self._stream.synchronize()

    def _bind(self) -> None:
        """Make device and stream the calling thread's; see `cuda.CudaCopier`."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def _upload(self, numbers: Int64Array) -> torch.Tensor:
        pinned = torch.from_numpy(numbers).pin_memory()
        return pinned.to(self._device, non_blocking=True)


def keys_of(cells: Cells) -> Int64Array:
    """What the kernel reads of the weights, in the order that it tells."""
    keys = np.concatenate(
        (cells.row_keys, cells.token_keys, cells.head_keys, cells.word_weights)
    ).view(np.int64)
    return np.pad(keys, (0, len(keys) % 2))


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    there: torch.Tensor
    event: torch.cuda.Event

    def value(self) -> int | None:
        return int(self.there.item()) % (1 << 64) if self.event.query() else None  # type: ignore[no-untyped-call, unused-ignore]


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """On the device, or on the way there on the digester's stream."""

    table: torch.Tensor
    keys: torch.Tensor
    shape: tuple[int, int, int]
    cell_bytes: int
    num_words: int
    part_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    cells: tuple[Cells, ...]
    segments: tuple[_Segment, ...]
