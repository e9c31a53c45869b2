"""Whether a cache that a peer described can be addressed at all.

Decides bounds and consistency, once per handshake, so that nothing computed from the cache later
can leave its regions or overflow. Refuses to know whether it fits our own cache (see
`compatibility`) and where the numbers came from.
"""

from collections.abc import Iterator

import numpy as np

from kvcourier.config import Limits
from kvcourier.errors import MappingError
from kvcourier.layout.geometry import CacheGeometry, CacheKind, GroupCache, RankCache, Region

ADDRESS_LIMIT = 1 << 63
"""One past the largest address: descriptors are int64."""

MAX_BLOCKS = 1 << 31
MAX_WINDOW = 1 << 30
MAX_HEAD_DIM = 1 << 16
MAX_ITEMSIZE = 16
MAX_DEVICES = 1 << 16
MAX_BLOCK_CELLS = 1 << 20
"""Tokens times heads of a block: the most pieces a plan can have for one plane of a unit."""


def validate_cache(cache: RankCache, limits: Limits) -> None:
    """Refuse a cache whose numbers are insane or whose blocks would lie outside its regions.

    Raises:
        MappingError: names the rank, the group if there are several, the field, what was expected
            and what was found.
    """
    name = f"cache of rank {cache.rank}"
    _check_bounds(name, _rank_numbers(cache, limits))
    for index, region in enumerate(cache.regions):
        if region.address + region.size_bytes > ADDRESS_LIMIT:
            raise MappingError(
                f"{name}: region {index}: expected an end below 2**63, found address "
                f"{region.address} and {region.size_bytes} bytes"
            )
    for index, group in enumerate(cache.groups):
        part = f"{name}: group {index}" if len(cache.groups) > 1 else name
        _check_bounds(part, _group_numbers(group.geometry, limits))
        _check_consistent(part, group.geometry, limits)
        _check_shapes(part, group)
        _check_blocks(part, group)
    layers = [layer for geometry in cache.geometries for layer in geometry.layers]
    if len(set(layers)) < len(layers):
        raise MappingError(f"{name}: layers: expected each in one group, found {layers}")


_Bound = tuple[str, int, int, int]
"""A single number as (name, lowest, one past the highest, found)."""


def _check_bounds(name: str, numbers: Iterator[_Bound]) -> None:
    for field, low, high, found in numbers:
        if not low <= found < high:
            raise MappingError(f"{name}: {field}: expected {low} to {high - 1}, found {found}")


def _rank_numbers(cache: RankCache, limits: Limits) -> Iterator[_Bound]:
    yield "number of groups", 1, limits.max_groups + 1, len(cache.groups)
    yield "pp_rank", 0, limits.max_ranks, cache.rank.pp_rank
    yield "tp_rank", 0, limits.max_ranks, cache.rank.tp_rank
    planes = sum(len(each.layers) * each.kind.num_planes for each in cache.geometries)
    yield (
        "number of layers",
        1,
        limits.max_layers + 1,
        sum(len(each.layers) for each in cache.geometries),
    )
    yield "number of regions", 1, planes + 1, len(cache.regions)
    for index, region in enumerate(cache.regions):
        yield from _region_numbers(index, region)


def _group_numbers(geometry: CacheGeometry, limits: Limits) -> Iterator[_Bound]:
    yield "number of layers", 1, limits.max_layers + 1, len(geometry.layers)
    for layer in geometry.layers:
        yield "layer", 0, limits.max_layers, layer
    yield "block_size", 1, MAX_BLOCK_CELLS + 1, geometry.block_size
    yield "num_kv_heads", 1, MAX_BLOCK_CELLS + 1, geometry.num_kv_heads
    yield "head_start", 0, geometry.num_kv_heads, geometry.head_start
    yield "head_stop", geometry.head_start + 1, geometry.num_kv_heads + 1, geometry.head_stop
    yield "head_dim", 1, MAX_HEAD_DIM + 1, geometry.head_dim
    yield "itemsize", 1, MAX_ITEMSIZE + 1, geometry.itemsize
    yield "num_blocks", 1, MAX_BLOCKS + 1, geometry.num_blocks
    yield "block_size x heads", 1, MAX_BLOCK_CELLS + 1, geometry.block_size * geometry.num_heads
    yield "num_reserved_blocks", 0, geometry.num_blocks, geometry.num_reserved_blocks
    if geometry.window is not None:
        yield "window", 2, MAX_WINDOW + 1, geometry.window


def _region_numbers(index: int, region: Region) -> Iterator[_Bound]:
    yield f"region {index}: address", 0, ADDRESS_LIMIT, region.address
    yield f"region {index}: size_bytes", 1, ADDRESS_LIMIT, region.size_bytes
    yield f"region {index}: device_id", 0, MAX_DEVICES, region.device_id


def _check_consistent(name: str, geometry: CacheGeometry, limits: Limits) -> None:
    if len(set(geometry.layers)) < len(geometry.layers):
        raise MappingError(f"{name}: layers: expected each once, found {geometry.layers}")
    if geometry.kind is CacheKind.LATENT and geometry.num_kv_heads != 1:
        raise MappingError(
            f"{name}: num_kv_heads: expected 1 for a latent cache, found {geometry.num_kv_heads}"
        )
    if not 0 < len(geometry.dtype) <= limits.max_id_bytes:
        raise MappingError(
            f"{name}: dtype: expected a name of 1 to {limits.max_id_bytes} characters, "
            f"found {len(geometry.dtype)}"
        )


def _check_shapes(name: str, cache: GroupCache) -> None:
    expected = (len(cache.geometry.layers), cache.geometry.kind.num_planes)
    for field in ("region", "offset_bytes", "block_stride_bytes"):
        array = getattr(cache.placement, field)
        if array.shape != expected or array.dtype != np.int64:
            raise MappingError(
                f"{name}: placement.{field}: expected int64 of shape {expected}, "
                f"found {array.dtype} of shape {array.shape}"
            )


def _check_blocks(name: str, cache: GroupCache) -> None:
    """Every block of every plane lies inside its region. In Python's numbers: no overflow."""
    placement, geometry = cache.placement, cache.geometry
    rows = zip(
        placement.region.tolist(),
        placement.offset_bytes.tolist(),
        placement.block_stride_bytes.tolist(),
        strict=True,
    )
    for layer, row in zip(geometry.layers, rows, strict=True):
        for plane, (region, offset, stride) in enumerate(zip(*row, strict=True)):
            where = f"{name}: layer {layer}, plane {plane}"
            if not 0 <= region < len(cache.regions):
                raise MappingError(
                    f"{where}: expected a region from 0 to {len(cache.regions) - 1}, found {region}"
                )
            if stride < geometry.block_bytes:
                raise MappingError(
                    f"{where}: expected a block stride of at least {geometry.block_bytes} bytes "
                    f"(one block), found {stride}"
                )
            size = cache.regions[region].size_bytes
            stop = offset + (geometry.num_blocks - 1) * stride + geometry.block_bytes
            if offset < 0 or stop > size:
                raise MappingError(
                    f"{where}: expected all blocks within the {size} bytes of region {region}, "
                    f"found {offset} to {stop}"
                )
