"""KV caches in real memory, and a copier too dumb to be wrong, for tests of anything above them.

`make_cache` lays a group's planes out in one of the ways engines do, `make_rank` several groups
over the same memory; `plane_cells` shows a plane by logical index, whatever its layout;
`copy_pieces` runs descriptors, checking every address.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvcourier.ids import Rank
from kvcourier.layout import (
    BoundPieces,
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    GroupGeometries,
    MemoryKind,
    ModelCache,
    RankCache,
    Region,
)

Buffer = npt.NDArray[np.uint8]

CANARY = 0xA5
"""What every byte of a fresh cache holds."""

GUARD_BYTES = 64
"""Bytes before and after the blocks of every buffer that belong to nobody."""


class PlacementStyle(enum.Enum):
    """How the planes of a rank lie in memory."""

    SEPARATE = "a tensor per plane"
    STACKED = "a tensor [planes, blocks] per layer"
    INTERLEAVED = "a tensor [blocks, planes] per layer"
    ONE_REGION = "one tensor [layers, planes, blocks]"
    CROSS_LAYER = "one tensor [blocks, layers, planes]"
    MIXED = "even layers [planes, blocks], odd layers [blocks, planes], in one tensor"


def model_cache(**changes: object) -> ModelCache:
    """A small K and V cache: 2 layers, 4 heads of 4 float16 lanes, 8 blocks of 16, NHD."""
    small = ModelCache(
        kind=CacheKind.KEY_VALUE,
        num_layers=2,
        num_kv_heads=4,
        head_dim=4,
        dtype="float16",
        itemsize=2,
        block_size=16,
        num_blocks=8,
        cache_layout=CacheLayout.NHD,
    )
    return dataclasses.replace(small, **changes)  # type: ignore[arg-type]


def make_cache(
    geometry: CacheGeometry,
    style: PlacementStyle = PlacementStyle.SEPARATE,
    rank: Rank = Rank(0, 0),  # noqa: B008
) -> tuple[GroupCache, list[Buffer]]:
    """Allocate the cache of a rank with one group, all CANARY; buffer i is the memory of region i.

    The buffers must be kept for as long as anything copies to their addresses.
    """
    cache, buffers = make_rank((geometry,), style, rank)
    return cache.groups[0], buffers


def make_rank(
    geometries: GroupGeometries,
    style: PlacementStyle = PlacementStyle.SEPARATE,
    rank: Rank = Rank(0, 0),  # noqa: B008
) -> tuple[RankCache, list[Buffer]]:
    """Allocate a rank's cache. All groups lie over the same bytes, as in vLLM: give them blocks of
    one size, and each block id to one of them."""
    placements = [_placement(geometry, style) for geometry in geometries]
    sizes: dict[int, int] = {}
    for geometry, (region, offset, stride) in zip(geometries, placements, strict=True):
        stops = offset + (geometry.num_blocks - 1) * stride + geometry.block_bytes
        for index, stop in zip(region.ravel().tolist(), stops.ravel().tolist(), strict=True):
            sizes[index] = max(sizes.get(index, 0), stop + GUARD_BYTES)
    buffers = [np.full(sizes[index], CANARY, np.uint8) for index in range(len(sizes))]
    regions = tuple(
        Region(buffer.ctypes.data, buffer.nbytes, MemoryKind.DRAM, 0) for buffer in buffers
    )
    groups = tuple(
        GroupCache(rank, geometry, CachePlacement(*placement), regions)
        for geometry, placement in zip(geometries, placements, strict=True)
    )
    return RankCache(groups), buffers


def make_instance(
    geometries: Mapping[Rank, CacheGeometry], style: PlacementStyle = PlacementStyle.SEPARATE
) -> dict[Rank, tuple[GroupCache, list[Buffer]]]:
    """A cache for every rank of an instance with one group."""
    return {rank: make_cache(each, style, rank) for rank, each in geometries.items()}


def one_group(geometries: Mapping[Rank, CacheGeometry]) -> dict[Rank, GroupGeometries]:
    """Every rank's groups, where there is one."""
    return {rank: (geometry,) for rank, geometry in geometries.items()}


def plane_cells(
    cache: GroupCache, buffers: Sequence[Buffer], row: int, plane: int
) -> npt.NDArray[np.uint8]:
    """A writable view [block, token, head, cell byte] of one plane of one held layer."""
    geometry, placement = cache.geometry, cache.placement
    cell = geometry.cell_bytes
    tokens_outside = geometry.cache_layout is CacheLayout.NHD
    token_stride = geometry.num_heads * cell if tokens_outside else cell
    head_stride = cell if tokens_outside else geometry.block_size * cell
    return np.lib.stride_tricks.as_strided(
        buffers[int(placement.region[row, plane])][int(placement.offset_bytes[row, plane]) :],
        shape=(geometry.num_blocks, geometry.block_size, geometry.num_heads, cell),
        strides=(int(placement.block_stride_bytes[row, plane]), token_stride, head_stride, 1),
    )


def copy_pieces(
    pieces: BoundPieces,
    source: tuple[GroupCache, Sequence[Buffer]],
    target: tuple[GroupCache, Sequence[Buffer]],
) -> list[npt.NDArray[np.uint8]]:
    """Move the bytes piece by piece; returns how often each target byte was written."""
    writes = [np.zeros(buffer.nbytes, np.uint8) for buffer in target[1]]
    for (source_address, length, source_device), (target_address, size, target_device) in zip(
        pieces.source_table.tolist(), pieces.target_table.tolist(), strict=True
    ):
        assert length == size > 0
        assert source_device == target_device == 0
        from_buffer, start = _find(source[0], source_address, length)
        to_buffer, to_start = _find(target[0], target_address, length)
        there = slice(to_start, to_start + length)
        target[1][to_buffer][there] = source[1][from_buffer][start : start + length]
        writes[to_buffer][there] += 1
    return writes


def _find(cache: GroupCache, address: int, length: int) -> tuple[int, int]:
    """Region that a piece lies in as a whole, and the offset in it."""
    for index, region in enumerate(cache.regions):
        start = address - region.address
        if start >= 0 and start + length <= region.size_bytes:
            return index, start
    raise AssertionError(f"{length} bytes at {address} lie in no region of {cache.rank}")


def _placement(
    geometry: CacheGeometry, style: PlacementStyle
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    layers, planes = len(geometry.layers), geometry.kind.num_planes
    block = geometry.block_bytes
    whole_plane = geometry.num_blocks * block
    row, plane = np.indices((layers, planes), dtype=np.int64)
    zero = np.zeros_like(row)
    match style:
        case PlacementStyle.SEPARATE:
            region, offset, stride = row * planes + plane, zero, zero + block
        case PlacementStyle.STACKED:
            region, offset, stride = row, plane * whole_plane, zero + block
        case PlacementStyle.INTERLEAVED:
            region, offset, stride = row, plane * block, zero + planes * block
        case PlacementStyle.ONE_REGION:
            region, stride = zero, zero + block
            offset = (row * planes + plane) * whole_plane
        case PlacementStyle.CROSS_LAYER:
            region, stride = zero, zero + layers * planes * block
            offset = (row * planes + plane) * block
        case PlacementStyle.MIXED:
            odd = row % 2
            region, stride = zero, np.where(odd, planes * block, block)
            offset = row * planes * whole_plane + plane * np.where(odd, block, whole_plane)
    return region, offset + GUARD_BYTES, stride
