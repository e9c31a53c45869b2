"""Where the pieces of a packed transfer lie on one side, in the order that both sides share.

Decides that order and how it is cut into the contents of staging slots. Each side computes its own
half from the same plan and never learns the other's addresses. Refuses to know slots and how bytes
are copied.

The canonical order of a segment is C order over [rows, units, pieces]: planes as `planes` puts
them, units by token position, pieces as the plan has them. A slot holds consecutive pieces of it,
each as long as the next, without gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcourier.errors import MappingError
from kvcourier.layout.blocks import BlockRun, locate, require_distinct, units_of
from kvcourier.layout.geometry import CacheGeometry, GroupCache, Int64Array, MemoryKind, TokenSpan
from kvcourier.layout.plan import MappingPlan
from kvcourier.layout.planes import planes_of, selected_layers


@dataclass(frozen=True, slots=True, eq=False)
class PackedSide:
    """One side of one segment of a packed transfer: where its pieces lie.

    Piece (row, unit, piece) is `piece_bytes` long and starts at ``row_address[row] +
    block_of_unit[unit] * row_block_stride_bytes[row] + unit_in_block[unit] * unit_stride_bytes +
    piece_offset_bytes[piece]``. All arrays are int64.

    Attributes:
        row_address: address of block 0 of each plane, shape [rows].
        row_block_stride_bytes: bytes from a block to the next one, shape [rows].
        piece_offset_bytes: bytes from a unit's start, shape [pieces].
        piece_bytes: bytes of a piece; all pieces of a plan are equally long.
        block_of_unit: block id of each unit, shape [units].
        unit_in_block: position of each unit in its block, shape [units].
        unit_stride_bytes: bytes from a unit to the next one in its block.
        memory: kind of all memory of this side.
        device_id: device that it is on.
    """

    row_address: Int64Array
    row_block_stride_bytes: Int64Array
    piece_offset_bytes: Int64Array
    piece_bytes: int
    block_of_unit: Int64Array
    unit_in_block: Int64Array
    unit_stride_bytes: int
    memory: MemoryKind
    device_id: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of rows, units and pieces of a unit; equal on both sides."""
        return len(self.row_address), len(self.block_of_unit), len(self.piece_offset_bytes)

    @property
    def num_pieces(self) -> int:
        """Pieces in all."""
        rows, units, pieces = self.shape
        return rows * units * pieces

    @property
    def num_bytes(self) -> int:
        """Bytes that move in all."""
        return self.num_pieces * self.piece_bytes

    def addresses(self, start: int, stop: int) -> Int64Array:
        """Addresses of the pieces `start` to `stop`, by number in canonical order."""
        _, num_units, num_offsets = self.shape
        first = start // num_offsets
        row, unit = np.divmod(np.arange(first, -(-stop // num_offsets), dtype=np.int64), num_units)
        at = self.row_address[row] + self.block_of_unit[unit] * self.row_block_stride_bytes[row]
        at += self.unit_in_block[unit] * self.unit_stride_bytes
        whole_units = (at[:, None] + self.piece_offset_bytes).ravel()
        return whole_units[start - first * num_offsets : stop - first * num_offsets]


class Parcel(NamedTuple):
    """What goes into one slot: pieces `start` to `stop` of one segment, in canonical order."""

    segment: int
    start: int
    stop: int


def pack_source(
    plan: MappingPlan,
    source: GroupCache,
    blocks: BlockRun,
    span: TokenSpan,
    layers: Sequence[int] | None = None,
) -> PackedSide:
    """Find the pieces of a segment in the cache that has the bytes.

    Spans and layers mean what they mean to `bind.bind`, and so do the pieces, but none are merged:
    both sides must cut alike without knowing each other's blocks.

    Args:
        plan: the plan for these two ranks.
        source: cache that has the bytes.
        blocks: the request's blocks in it.
        span: positions to move; `span.start` is a multiple of `plan.unit_tokens`.
        layers: global layers to move, for streaming; all of the plan's if None.

    Raises:
        MappingError: the plan was made for another geometry; the span is empty, or starts inside
            a unit; blocks are missing or out of range; a layer is not in the plan; or the regions
            differ in memory kind or device.
    """
    half = _Half(
        "source",
        plan.source,
        plan.source_rows,
        plan.source_offsets,
        plan.source_unit_stride_bytes,
    )
    return _pack(half, plan, source, blocks, span, layers)


def pack_target(
    plan: MappingPlan,
    target: GroupCache,
    blocks: BlockRun,
    span: TokenSpan,
    layers: Sequence[int] | None = None,
) -> PackedSide:
    """Find the pieces of a segment in the cache that wants the bytes.

    As `pack_source`, and raises MappingError too if a block is there more than once.
    """
    half = _Half(
        "target",
        plan.target,
        plan.target_rows,
        plan.target_offsets,
        plan.target_unit_stride_bytes,
    )
    return _pack(half, plan, target, blocks, span, layers)


def parcels(segments: Sequence[tuple[int, int]], parcel_bytes: int) -> tuple[Parcel, ...]:
    """Cut segments into the contents of slots: as many whole pieces as fit, of one segment each.

    Args:
        segments: number of pieces and bytes of a piece, of each segment.
        parcel_bytes: bytes of a slot.

    Raises:
        MappingError: a piece is longer than a slot.
    """
    cut = []
    for segment, (num_pieces, piece_bytes) in enumerate(segments):
        per_parcel = parcel_bytes // piece_bytes
        if not per_parcel:
            raise MappingError(
                f"segment {segment}: expected pieces that fit into a slot of {parcel_bytes} "
                f"bytes, found pieces of {piece_bytes} bytes; make the slots larger"
            )
        cut += [
            Parcel(segment, start, min(start + per_parcel, num_pieces))
            for start in range(0, num_pieces, per_parcel)
        ]
    return tuple(cut)


class _Half(NamedTuple):
    """What a plan says of one side."""

    side: str
    geometry: CacheGeometry
    rows: Int64Array
    offsets: Int64Array
    unit_stride_bytes: int


def _pack(
    half: _Half,
    plan: MappingPlan,
    cache: GroupCache,
    blocks: BlockRun,
    span: TokenSpan,
    layers: Sequence[int] | None,
) -> PackedSide:
    if half.geometry != cache.geometry:
        raise MappingError(f"plan: made for another geometry than that of {cache.rank}")
    units = locate(half.side, cache, blocks, units_of(span, plan.unit_tokens), plan.unit_tokens)
    if half.side == "target":
        require_distinct(units.blocks)
    planes = planes_of(half.side, cache, half.rows[selected_layers(plan, layers)])
    inner = units.unit_in_block
    return PackedSide(
        row_address=planes.address,
        row_block_stride_bytes=planes.block_stride_bytes,
        piece_offset_bytes=half.offsets,
        piece_bytes=int(plan.lengths[0]),
        block_of_unit=units.block_of_unit,
        unit_in_block=np.zeros_like(units.block_of_unit) if inner is None else inner,
        unit_stride_bytes=half.unit_stride_bytes,
        memory=planes.memory,
        device_id=planes.device_id,
    )
