"""Which memory ranges move for one request: a plan, bound to regions and block ids.

Decides the descriptors of both sides, merged wherever bytes are consecutive on both. Refuses to
know who asks and who posts. Trusts the caches: a peer's goes through `validate.validate_cache`
first. Block ids are checked every time (`blocks`), because they come anew with every request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcourier.errors import MappingError
from kvcourier.layout.blocks import BlockRun, UnitPlaces, locate, require_distinct, units_of
from kvcourier.layout.geometry import GroupCache, Int64Array, MemoryKind, TokenSpan
from kvcourier.layout.plan import MappingPlan
from kvcourier.layout.planes import Planes, planes_of, selected_layers


@dataclass(frozen=True, slots=True, eq=False)
class BoundPieces:
    """Piece i moves from row i of the source table to row i of the target table.

    Attributes:
        source_table: int64 array of shape [n, 3]: address, length in bytes, device id.
        target_table: the same for the target side; lengths are equal row by row.
        source_memory: kind of all source memory.
        target_memory: kind of all target memory.
    """

    source_table: Int64Array
    target_table: Int64Array
    source_memory: MemoryKind
    target_memory: MemoryKind

    def __len__(self) -> int:
        return len(self.source_table)

    @property
    def num_bytes(self) -> int:
        """Bytes that move in all."""
        return int(self.source_table[:, 1].sum())


def bind(
    plan: MappingPlan,
    source: GroupCache,
    target: GroupCache,
    source_blocks: BlockRun,
    target_blocks: BlockRun,
    span: TokenSpan,
    layers: Sequence[int] | None = None,
) -> BoundPieces:
    """Find the memory ranges that hold the tokens of `span` on both sides.

    Blocks are paired by absolute token position, never by count or from the tail; blocks outside
    the span are left alone. Whole units move: where `span.stop` lies inside a unit, the slots
    after it in that unit are overwritten on the target side too. Both sides own the block that
    the last token is in, so nobody else's KV is touched; the caller sees to it that the target
    has none of its own in these slots yet.

    Args:
        plan: the plan for these two ranks.
        source: cache that has the bytes.
        target: cache that wants them.
        source_blocks: the request's blocks on the source side.
        target_blocks: the request's blocks on the target side.
        span: positions to move; `span.start` is a multiple of `plan.unit_tokens`.
        layers: global layers to move, for streaming; all of the plan's if None.

    Raises:
        MappingError: the plan was made for other geometries; the span is empty, or starts inside
            a unit; blocks are missing, out of range, or twice in the target; a layer is not in
            the plan; or the regions of one side differ in memory kind or device.
    """
    if plan.source != source.geometry or plan.target != target.geometry:
        raise MappingError(
            f"plan: made for other geometries than those of {source.rank} and {target.rank}"
        )
    units = units_of(span, plan.unit_tokens)
    source_units = locate("source", source, source_blocks, units, plan.unit_tokens)
    target_units = locate("target", target, target_blocks, units, plan.unit_tokens)
    require_distinct(target_units.blocks)
    selected = selected_layers(plan, layers)
    source_planes = planes_of("source", source, plan.source_rows[selected])
    target_planes = planes_of("target", target, plan.target_rows[selected])
    runs = _unit_runs(plan, source_planes, target_planes)
    tables = _tables(
        [_repeat(runs, members, plan, source_units, target_units) for members in _alike(runs)]
    )
    tables[0, :, 2] = source_planes.device_id
    tables[1, :, 2] = target_planes.device_id
    return BoundPieces(tables[0], tables[1], source_planes.memory, target_planes.memory)


def estimate_pieces(
    plan: MappingPlan,
    source: GroupCache,
    target: GroupCache,
    source_blocks: BlockRun,
    target_blocks: BlockRun,
    span: TokenSpan,
    layers: Sequence[int] | None = None,
) -> int:
    """How many pieces `bind` would make, without making them; arguments and errors as there.

    Counts runs of blocks in the first plane. Planes that lie side by side would be joined on top.
    """
    units = units_of(span, plan.unit_tokens)
    source_units = locate("source", source, source_blocks, units, plan.unit_tokens)
    target_units = locate("target", target, target_blocks, units, plan.unit_tokens)
    num_runs = len(units) * len(plan.lengths)
    if len(plan.lengths) == 1:
        source_row, target_row = plan.source_rows[0], plan.target_rows[0]
        source_stride = int(source.placement.block_stride_bytes[source_row, 0])
        target_stride = int(target.placement.block_stride_bytes[target_row, 0])
        joined = _adjoin(
            source_units.offsets(source_stride, plan.source_unit_stride_bytes),
            target_units.offsets(target_stride, plan.target_unit_stride_bytes),
            np.broadcast_to(plan.lengths, len(units)),
        )
        num_runs -= int(joined.sum())
    num_layers = len(plan.route.layers) if layers is None else len(set(layers))
    return num_runs * num_layers * plan.source.kind.num_planes


class _UnitRuns(NamedTuple):
    """Pieces of unit 0 of block 0 over all planes: arrays with one entry per piece.

    A piece of any other unit is found by stepping: all pieces of a plane step alike.
    """

    source: Int64Array
    target: Int64Array
    lengths: Int64Array
    source_block_stride: Int64Array
    target_block_stride: Int64Array


def _unit_runs(plan: MappingPlan, source: Planes, target: Planes) -> _UnitRuns:
    """Join pieces that adjoin on both sides, also across planes and layers.

    Planes that lie side by side in each block (K and V interleaved, or all layers in one block)
    become one piece that way. Joined pieces must step alike, or they would part in later blocks.
    """
    per_plane = len(plan.lengths)
    runs = _UnitRuns(
        (source.address[:, None] + plan.source_offsets).ravel(),
        (target.address[:, None] + plan.target_offsets).ravel(),
        np.tile(plan.lengths, len(source.address)),
        np.repeat(source.block_stride_bytes, per_plane),
        np.repeat(target.block_stride_bytes, per_plane),
    )
    joined = _adjoin(runs.source, runs.target, runs.lengths)
    if not joined.any():
        return runs
    for key in (
        np.repeat(source.region, per_plane),
        np.repeat(target.region, per_plane),
        runs.source_block_stride,
        runs.target_block_stride,
    ):
        joined &= key[1:] == key[:-1]
    starts = _starts(joined)
    return _UnitRuns(
        runs.source[starts],
        runs.target[starts],
        np.add.reduceat(runs.lengths, starts),
        runs.source_block_stride[starts],
        runs.target_block_stride[starts],
    )


def _alike(runs: _UnitRuns) -> Iterator[slice | npt.NDArray[np.bool_]]:
    """Groups of runs of one length that step alike; almost always there is one."""
    keys = np.stack((runs.lengths, runs.source_block_stride, runs.target_block_stride), axis=1)
    if (keys == keys[0]).all():
        yield slice(None)
        return
    for key in np.unique(keys, axis=0):
        yield (keys == key).all(axis=1)


class _Repeated(NamedTuple):
    """Runs of unit 0, repeated at the same steps: piece (i, j) is at `source[i] +
    source_steps[j]`, and `lengths[j]` bytes long."""

    source: Int64Array
    target: Int64Array
    source_steps: Int64Array
    target_steps: Int64Array
    lengths: Int64Array


def _repeat(
    runs: _UnitRuns,
    members: slice | npt.NDArray[np.bool_],
    plan: MappingPlan,
    source_units: UnitPlaces,
    target_units: UnitPlaces,
) -> _Repeated:
    """Step a group of runs from unit to unit, and join those that follow each other directly.

    That depends on the steps alone, so it is decided once and not for every plane.
    """
    source_steps = source_units.offsets(
        int(runs.source_block_stride[members][0]), plan.source_unit_stride_bytes
    )
    target_steps = target_units.offsets(
        int(runs.target_block_stride[members][0]), plan.target_unit_stride_bytes
    )
    lengths = np.full(len(source_steps), runs.lengths[members][0], np.int64)
    joined = _adjoin(source_steps, target_steps, lengths)
    if joined.any():
        starts = _starts(joined)
        source_steps, target_steps = source_steps[starts], target_steps[starts]
        lengths = np.add.reduceat(lengths, starts)
    return _Repeated(
        runs.source[members], runs.target[members], source_steps, target_steps, lengths
    )


def _adjoin(source: Int64Array, target: Int64Array, lengths: Int64Array) -> npt.NDArray[np.bool_]:
    """Whether each piece but the first starts where the one before it ends, on both sides."""
    joined: npt.NDArray[np.bool_] = source[1:] == source[:-1] + lengths[:-1]
    joined &= target[1:] == target[:-1] + lengths[:-1]
    return joined


def _starts(joined: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Index of the first piece of every joined run."""
    return np.flatnonzero(np.concatenate(([True], ~joined)))


def _tables(groups: Sequence[_Repeated]) -> Int64Array:
    """Descriptors of both sides, shape [2, n, 3], without the device ids.

    One array for both: freeing two of this size makes the allocator give the memory back to the
    system each time, and taking it again then costs ten times as much as filling it.
    """
    sizes = [len(group.source) * len(group.lengths) for group in groups]
    tables = np.empty((2, sum(sizes), 3), np.int64)
    start = 0
    for group, size in zip(groups, sizes, strict=True):
        part = tables[:, start : start + size].reshape(2, len(group.source), -1, 3)
        np.add(group.source[:, None], group.source_steps, out=part[0, ..., 0])
        np.add(group.target[:, None], group.target_steps, out=part[1, ..., 0])
        part[..., 1] = group.lengths
        start += size
    return tables
