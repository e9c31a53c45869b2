"""Which planes of one side take part in a mapping, and where they lie.

Decides the selection of layers and the addresses of their planes, in the order that both sides
share: layers of the plan, then planes. Refuses to know blocks, units and the other side.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcourier.errors import MappingError
from kvcourier.layout.geometry import GroupCache, Int64Array, MemoryKind
from kvcourier.layout.plan import MappingPlan


class Planes(NamedTuple):
    """Planes of one side that take part, layer by layer: arrays with one entry per plane."""

    region: Int64Array
    address: Int64Array
    block_stride_bytes: Int64Array
    memory: MemoryKind
    device_id: int


def selected_layers(plan: MappingPlan, layers: Sequence[int] | None) -> slice | list[int]:
    """Which of the plan's rows to move, in the plan's order; all of them if None.

    Raises:
        MappingError: no layer is named, or one that is not in the plan.
    """
    if layers is None:
        return slice(None)
    wanted = set(layers)
    unknown = wanted.difference(plan.route.layers)
    if unknown or not wanted:
        raise MappingError(
            f"layers: expected some of {plan.route.layers}, found {sorted(unknown) or 'none'}"
        )
    return [row for row, layer in enumerate(plan.route.layers) if layer in wanted]


def planes_of(side: str, cache: GroupCache, rows: Int64Array) -> Planes:
    """Planes of these placement rows of a cache.

    Args:
        side: what to call this side in an error.
        cache: cache of this side.
        rows: placement rows, one per layer that takes part.

    Raises:
        MappingError: they lie in regions of different kinds of memory, or on different devices.
    """
    placement = cache.placement
    region = placement.region[rows].ravel()
    used = [cache.regions[index] for index in set(region.tolist())]
    kinds = {(each.memory.value, each.device_id) for each in used}
    if len(kinds) > 1:
        raise MappingError(
            f"{side} regions of rank {cache.rank}: expected one kind of memory on one device, "
            f"found {sorted(kinds)}"
        )
    region_address = np.array([each.address for each in cache.regions], np.int64)
    return Planes(
        region=region,
        address=region_address[region] + placement.offset_bytes[rows].ravel(),
        block_stride_bytes=placement.block_stride_bytes[rows].ravel(),
        memory=used[0].memory,
        device_id=used[0].device_id,
    )
