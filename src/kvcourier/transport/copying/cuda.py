"""Copies on a GPU: one kernel per call, on a stream of their own, with an event to ask.

Decides what is uploaded, how wide the words are and which stream waits for what. Never waits for
the device, only for an event or its own stream, and only in `wait`, `warm_up` and `close`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from kvcourier.errors import ConfigError, MappingError
from kvcourier.layout.geometry import Int64Array, MemoryKind, Region
from kvcourier.layout.packing import PackedSide, Parcel
from kvcourier.transport.copying.bounds import (
    SLOT_ALIGNMENT_BYTES,
    STAGING_ALIGNMENT_BYTES,
    require_inside,
    require_parcel,
    require_slot,
)
from kvcourier.transport.copying.interface import Finished, LoadedTables, Ticket

_CHUNK_WORDS = (1024, 128, 32, 8, 1)
"""Chunks that pieces are cut into, in words. Few, because each is compiled by itself."""

_WARM_PIECE_BYTES = (8192, 1024, 256)
"""A piece for each of the chunk lengths that `warm_up` compiles: all that caches need whose pieces
are a multiple of 256 bytes and lie at multiples of 16."""

_MAX_CHUNKS = 1 << 30
"""Most chunks of a segment: the kernel counts them in int32, and its last program a few more."""

_PINNED_NUMBERS = 1 << 13
"""Numbers that pinned memory is taken for at a time, 64 KiB: more than almost every transfer
needs, so that its tables find memory that is pinned already."""

_NUM_KEPT_PINNED = 4


class CudaCopier:
    """A `Copier` for a cache on one GPU. Call `warm_up` before the first transfer.

    Raises ImportError if triton is missing.
    """

    def __init__(self, regions: Sequence[Region], device_id: int) -> None:
        from kvcourier.transport.copying.kernel import start

        self._start = start
        self._regions = tuple(regions)
        self._device_id = device_id
        self._device = torch.device("cuda", device_id)
        # Streams of torch never wait for the default stream. The lowest priority: the engine's
        # kernels go first where both want the same processors.
        self._stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call, unused-ignore]
        self._staging: list[Region] = []
        self._memory: list[torch.Tensor] = []

    def warm_up(self) -> None:
        """Compile what nearly every cache needs, and pin memory for tables; takes seconds.

        Kernels for pieces or placements of odd sizes are compiled when they are first used.
        """
        pinned = [self._pinned(1) for _ in range(_NUM_KEPT_PINNED)]
        del pinned
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            scratch = torch.zeros(
                2 * max(_WARM_PIECE_BYTES), dtype=torch.uint8, device=self._device
            )
            slot_address = scratch.data_ptr() + max(_WARM_PIECE_BYTES)
            for piece_bytes in _WARM_PIECE_BYTES:
                side = _lone_piece(scratch.data_ptr(), piece_bytes, self._device_id)
                (segment,) = self._upload([side])
                for to_slot in (True, False):
                    self._launch(segment, range(1), slot_address, to_slot=to_slot)
            self._stream.synchronize()

    def allocate(self, num_bytes: int) -> Region:
        # On our stream, memory never comes from what another stream's kernels may still use.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                memory = torch.empty(
                    num_bytes + STAGING_ALIGNMENT_BYTES, dtype=torch.uint8, device=self._device
                )
            except torch.cuda.OutOfMemoryError as error:
                free, _ = torch.cuda.mem_get_info(self._device)
                raise ConfigError(
                    f"staging memory: {num_bytes >> 20} MiB wanted on {self._device}, "
                    f"{free >> 20} MiB are free; lower the staging size, or leave more memory free"
                ) from error
        address = -(-memory.data_ptr() // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES
        region = Region(address, num_bytes, MemoryKind.VRAM, self._device_id)
        self._memory.append(memory)
        self._staging.append(region)
        return region

    def load(self, segments: Sequence[PackedSide]) -> LoadedTables:
        require_inside(segments, self._regions, MemoryKind.VRAM, self._device_id)
        self._bind()
        return LoadedTables(_Tables(tuple(segments), self._upload(segments)))

    def gather(
        self,
        tables: LoadedTables,
        parcel: Parcel,
        slot_address: int,
        after: Finished | None = None,
    ) -> Ticket:
        return self._copy(tables, parcel, slot_address, after, to_slot=True)

    def scatter(self, tables: LoadedTables, parcel: Parcel, slot_address: int) -> Ticket:
        return self._copy(tables, parcel, slot_address, None, to_slot=False)

    def done(self, ticket: Ticket) -> bool:
        return ticket.finished is None or ticket.finished.query()

    def wait(self, ticket: Ticket) -> None:
        if ticket.finished is not None:
            ticket.finished.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        self._staging.clear()
        self._memory.clear()

    def _copy(
        self,
        tables: LoadedTables,
        parcel: Parcel,
        slot_address: int,
        after: Finished | None,
        *,
        to_slot: bool,
    ) -> Ticket:
        loaded = cast(_Tables, tables)
        side = require_parcel(parcel, loaded.sides)
        num_bytes = (parcel.stop - parcel.start) * side.piece_bytes
        require_slot(slot_address, num_bytes, self._staging)
        segment = loaded.segments[parcel.segment]
        self._bind()
        if after is not None:
            self._stream.wait_event(cast(torch.cuda.Event, after))
        self._launch(segment, range(parcel.start, parcel.stop), slot_address, to_slot=to_slot)
        # Whoever waits sleeps; most only ask.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call, unused-ignore]
        event.record(self._stream)
        return Ticket(event)

    def _bind(self) -> None:
        """Make device and stream the calling thread's, and leave them so.

        It is the courier's own thread, and a context that puts them back would cost as much as the
        launch itself.
        """
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def _launch(
        self, segment: "_Segment", pieces: range, slot_address: int, *, to_slot: bool
    ) -> None:
        self._start(
            segment.table,
            slot_address,
            pieces,
            segment.shape,
            word_bytes=segment.cut.word_bytes,
            chunk_words=segment.cut.chunk_words,
            chunks_per_piece=segment.cut.chunks_per_piece,
            alignment=segment.cut.alignment,
            to_slot=to_slot,
        )

    def _upload(self, segments: Sequence[PackedSide]) -> "tuple[_Segment, ...]":
        """Put the tables into device memory, all in one piece; on the current stream."""
        arrays = [table_of(side) for side in segments]
        cuts = [cut_of(side) for side in segments]
        edges = np.cumsum([0, *map(len, arrays)]).tolist()
        pinned = self._pinned(edges[-1])
        np.concatenate(arrays, out=pinned.numpy()[: edges[-1]])
        # torch keeps pinned memory back until the stream has read it, and gives device memory out
        # again to the same stream only: both may be dropped while copies are under way.
        uploaded = pinned[: edges[-1]].to(self._device, non_blocking=True)
        return tuple(
            _Segment(uploaded[start:stop], side.shape[1:], cut)
            for start, stop, side, cut in zip(edges, edges[1:], segments, cuts, strict=False)
        )

    def _pinned(self, count: int) -> torch.Tensor:
        rounded = max(_PINNED_NUMBERS, count)
        with torch.cuda.device(self._device):
            return torch.empty(rounded, dtype=torch.int64, pin_memory=True)


@dataclass(frozen=True, slots=True)
class Cut:
    """How the kernel cuts pieces: see `kernel.start` for the words."""

    word_bytes: int
    chunk_words: int
    chunks_per_piece: int
    alignment: int


def cut_of(side: PackedSide) -> Cut:
    """The widest words and longest chunks that all addresses of a segment allow.

    Raises:
        MappingError: there are more chunks than the kernel can count.
    """
    steps = np.concatenate(
        (
            side.row_address,
            side.row_block_stride_bytes,
            side.piece_offset_bytes,
            [side.unit_stride_bytes if side.unit_in_block.any() else 0],
        )
    )
    common = math.gcd(int(np.gcd.reduce(steps)), side.piece_bytes, SLOT_ALIGNMENT_BYTES)
    word_bytes = min(8, common)
    words = side.piece_bytes // word_bytes
    chunk_words = next(each for each in _CHUNK_WORDS if words % each == 0)
    chunks_per_piece = words // chunk_words
    if side.num_pieces * chunks_per_piece > _MAX_CHUNKS:
        raise MappingError(
            f"segment: expected at most {_MAX_CHUNKS} chunks of {chunk_words * word_bytes} "
            f"bytes, found {side.num_pieces * chunks_per_piece}"
        )
    return Cut(
        word_bytes, chunk_words, chunks_per_piece, math.gcd(common, chunk_words * word_bytes)
    )


def table_of(side: PackedSide) -> Int64Array:
    """The numbers that the kernel reads of a segment, in the order that it tells.

    One more at the end where their number is odd, so that the next table begins at a multiple of
    16 bytes: the kernel is compiled for tables that do.
    """
    in_block = side.unit_in_block * side.unit_stride_bytes
    numbers = np.concatenate(
        (
            np.column_stack((side.block_of_unit, in_block)).ravel(),
            side.piece_offset_bytes,
            np.column_stack((side.row_address, side.row_block_stride_bytes)).ravel(),
        )
    )
    return np.pad(numbers, (0, len(numbers) % 2))


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """A segment whose table is on the device (or on its way there, on the copier's stream)."""

    table: torch.Tensor
    shape: tuple[int, int]
    cut: Cut


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    sides: tuple[PackedSide, ...]
    segments: tuple[_Segment, ...]


def _lone_piece(address: int, piece_bytes: int, device_id: int) -> PackedSide:
    """A segment of one piece."""
    zero = np.zeros(1, np.int64)
    return PackedSide(
        row_address=np.array([address], np.int64),
        row_block_stride_bytes=zero + piece_bytes,
        piece_offset_bytes=zero,
        piece_bytes=piece_bytes,
        block_of_unit=zero,
        unit_in_block=zero,
        unit_stride_bytes=piece_bytes,
        memory=MemoryKind.VRAM,
        device_id=device_id,
    )
