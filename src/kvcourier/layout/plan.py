"""Which bytes of a source block go where in a target block, without addresses.

Decides the pieces of one *unit*: the largest number of tokens that never crosses a block border
on either side. Refuses to know addresses and block ids, so one plan serves every request between
two ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcourier.errors import MappingError
from kvcourier.layout.compatibility import require_same_model
from kvcourier.layout.geometry import CacheGeometry, CacheLayout, Int64Array
from kvcourier.layout.routes import Route


@dataclass(frozen=True, slots=True, eq=False)
class MappingPlan:
    """Pieces of one unit of one plane, and how to step to the next unit. Immutable.

    Every layer and plane of a rank has the same shape, so one set of pieces serves them all.

    Attributes:
        source: geometry of the rank that has the bytes.
        target: geometry of the rank that wants them.
        route: layers and heads that move.
        unit_tokens: tokens of a unit; the route's.
        source_rows: placement row of each of `route.layers` on the source side.
        target_rows: the same on the target side.
        source_offsets: bytes from the unit's start in its block, one per piece, ascending.
        target_offsets: the same on the target side.
        lengths: bytes of each piece; contiguous on both sides, and maximal.
        source_unit_stride_bytes: from a unit of a source block to the next one in that block.
        target_unit_stride_bytes: the same on the target side.
    """

    source: CacheGeometry
    target: CacheGeometry
    route: Route
    unit_tokens: int
    source_rows: Int64Array
    target_rows: Int64Array
    source_offsets: Int64Array
    target_offsets: Int64Array
    lengths: Int64Array
    source_unit_stride_bytes: int
    target_unit_stride_bytes: int

    @property
    def bytes_per_unit(self) -> int:
        """Bytes that move for one unit, over all layers and planes of the route."""
        planes = len(self.route.layers) * self.source.kind.num_planes
        return planes * int(self.lengths.sum())


def plan_mapping(source: CacheGeometry, target: CacheGeometry, route: Route) -> MappingPlan:
    """Plan one route between two ranks; quick, and worth keeping per pair of ranks.

    Args:
        source: geometry of group `route.source_group` of rank `route.source`.
        target: geometry of group `route.target_group` of rank `route.target`.
        route: one of the routes that `routes.route` gives for the two instances.

    Raises:
        MappingError: the caches are of different models, or one does not hold what the route
            moves; names the field, layer or heads with both values.
    """
    require_same_model(source, target)
    source_rows = _rows("source", source, route)
    target_rows = _rows("target", target, route)
    unit_tokens = route.unit_tokens
    num_heads = route.head_stop - route.head_start
    source_strides = strides_of(source)
    target_strides = strides_of(target)
    axes = [
        _Axis(unit_tokens, source_strides.token, target_strides.token),
        _Axis(num_heads, source_strides.head, target_strides.head),
    ]
    source_offsets, target_offsets, lengths = _pieces(axes, source.cell_bytes)
    source_offsets += (route.head_start - source.head_start) * source_strides.head
    target_offsets += (route.head_start - target.head_start) * target_strides.head
    for array in (source_rows, target_rows, source_offsets, target_offsets, lengths):
        array.setflags(write=False)
    return MappingPlan(
        source=source,
        target=target,
        route=route,
        unit_tokens=unit_tokens,
        source_rows=source_rows,
        target_rows=target_rows,
        source_offsets=source_offsets,
        target_offsets=target_offsets,
        lengths=lengths,
        source_unit_stride_bytes=unit_tokens * source_strides.token,
        target_unit_stride_bytes=unit_tokens * target_strides.token,
    )


class Strides(NamedTuple):
    """Bytes from a cell to the next token's, and to the next head's, in a block of one plane."""

    token: int
    head: int


class _Axis(NamedTuple):
    """One dimension of the box of cells that moves, with its byte strides on both sides."""

    size: int
    source_stride: int
    target_stride: int


def strides_of(geometry: CacheGeometry) -> Strides:
    cell = geometry.cell_bytes
    if geometry.cache_layout is CacheLayout.NHD:
        return Strides(token=geometry.num_heads * cell, head=cell)
    return Strides(token=cell, head=geometry.block_size * cell)


def _pieces(axes: Sequence[_Axis], cell_bytes: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Maximal runs of a box of cells, in source order: source offsets, target offsets, lengths.

    From the innermost axis outwards, an axis whose steps are as long as the run so far, on both
    sides, makes the run longer; every other one is enumerated. Past an axis that was enumerated
    none can make the run longer, because its steps are longer than the run. Nothing else can be
    contiguous: stepping back along an inner axis is no step of one run forward.
    """
    length = cell_bytes
    source_offsets = np.zeros(1, np.int64)
    target_offsets = np.zeros(1, np.int64)
    for size, source_stride, target_stride in sorted(axes, key=lambda axis: axis.source_stride):
        if source_stride == target_stride == length:
            length *= size
            continue
        steps = np.arange(size, dtype=np.int64)[:, None]
        source_offsets = (steps * source_stride + source_offsets).ravel()
        target_offsets = (steps * target_stride + target_offsets).ravel()
    return source_offsets, target_offsets, np.full(len(source_offsets), length, np.int64)


def _rows(side: str, geometry: CacheGeometry, route: Route) -> Int64Array:
    """Placement row of each layer of the route; also checks that this side holds all of it."""
    if not geometry.head_start <= route.head_start < route.head_stop <= geometry.head_stop:
        raise MappingError(
            f"heads: route {route.source} to {route.target} moves {route.head_start} to "
            f"{route.head_stop}, {side} holds {geometry.head_start} to {geometry.head_stop}"
        )
    row_of_layer = {layer: row for row, layer in enumerate(geometry.layers)}
    for layer in route.layers:
        if layer not in row_of_layer:
            raise MappingError(
                f"layer {layer}: route {route.source} to {route.target} moves it, "
                f"{side} holds {geometry.layers}"
            )
    return np.array([row_of_layer[layer] for layer in route.layers], np.int64)
