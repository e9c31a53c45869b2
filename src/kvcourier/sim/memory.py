"""The KV caches of an instance's ranks, in real memory.

Decides where cells lie, and finds out which blocks an address range touches and which cells are
not what they should be. Refuses to know who owns a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcourier.ids import Rank
from kvcourier.layout import (
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    Int64Array,
    MemoryKind,
    ModelCache,
    RankCache,
    Region,
    TokenSpan,
    instance_geometries,
)
from kvcourier.sim.content import CELL_BYTES, Cells, cells


@dataclass(frozen=True, slots=True)
class Shape:
    """How an instance keeps the model's cache.

    Attributes:
        blocks_first: a block's layers lie side by side; else the blocks of a layer do.
    """

    num_blocks: int = 16
    block_size: int = 4
    tp_size: int = 1
    pp_size: int = 1
    cache_layout: CacheLayout = CacheLayout.NHD
    blocks_first: bool = False
    num_layers: int = 2
    num_kv_heads: int = 2

    def geometries(self) -> dict[Rank, CacheGeometry]:
        """Each rank's share."""
        model = ModelCache(
            kind=CacheKind.KEY_VALUE,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=CELL_BYTES // 2,
            dtype="float16",
            itemsize=2,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            cache_layout=self.cache_layout,
        )
        return instance_geometries(model, self.tp_size, self.pp_size)


class RankMemory:
    """One rank's cache, in one region; a fresh cell holds zeros, which no computed one does."""

    def __init__(self, rank: Rank, geometry: CacheGeometry, *, blocks_first: bool) -> None:
        self.geometry = geometry
        layers, planes = len(geometry.layers), geometry.kind.num_planes
        block, blocks = geometry.block_bytes, geometry.num_blocks
        self._words = np.zeros(layers * planes * blocks * block // CELL_BYTES, np.uint64)
        self._units_first = blocks_first
        if blocks_first:
            block_stride, plane_stride = layers * planes * block, block
        else:
            block_stride, plane_stride = block, blocks * block
        layer_stride = planes * plane_stride
        heads = geometry.num_heads
        token_stride, head_stride = heads * CELL_BYTES, CELL_BYTES
        if geometry.cache_layout is CacheLayout.HND:
            token_stride, head_stride = CELL_BYTES, geometry.block_size * CELL_BYTES
        self._view = np.lib.stride_tricks.as_strided(
            self._words,
            (layers, planes, blocks, geometry.block_size, heads),
            (layer_stride, plane_stride, block_stride, token_stride, head_stride),
        )
        row, plane = np.indices((layers, planes), dtype=np.int64)
        placement = CachePlacement(
            np.zeros_like(row),
            row * layer_stride + plane * plane_stride,
            np.full_like(row, block_stride),
        )
        self.region = Region(self._words.ctypes.data, self._words.nbytes, MemoryKind.DRAM, 0)
        self.cache = RankCache((GroupCache(rank, geometry, placement, (self.region,)),))

    def write(
        self,
        hashes: Sequence[int],
        blocks: Sequence[int],
        span: TokenSpan,
        layers: int | None = None,
    ) -> None:
        """Compute the KV of these positions of a sequence whose first block is `blocks[0]`, for
        the first so many layers of the model, or all."""
        block, slot = self._places(blocks, span)
        fresh = cells(self.geometry, hashes[span.start : span.stop])
        rows = [i for i, each in enumerate(self.geometry.layers) if layers is None or each < layers]
        for row in rows:
            self._view[row][:, block, slot] = fresh[row]

    def wrong(
        self, hashes: Sequence[int], blocks: Sequence[int], span: TokenSpan
    ) -> list[tuple[int, int]]:
        """(layer, position) of every cell that is not what the model computes there."""
        block, slot = self._places(blocks, span)
        found: Cells = self._view[:, :, block, slot]
        differs = (found != cells(self.geometry, hashes[span.start : span.stop])).any(axis=(1, 3))
        return [
            (self.geometry.layers[row], span.start + at)
            for row, at in np.argwhere(differs).tolist()
        ]

    def blocks_at(self, address: int, size_bytes: int) -> set[int]:
        """Blocks that this range touches; none if it lies elsewhere."""
        first = address - self.region.address
        if not 0 <= first < self.region.size_bytes:
            return set()
        block = self.geometry.block_bytes
        units = range(first // block, -(-(first + size_bytes) // block))
        if self._units_first:
            per_block = len(self.geometry.layers) * self.geometry.kind.num_planes
            return {unit // per_block for unit in units}
        return {unit % self.geometry.num_blocks for unit in units}

    def _places(self, blocks: Sequence[int], span: TokenSpan) -> tuple[Int64Array, Int64Array]:
        positions = np.arange(span.start, span.stop)
        block, slot = np.divmod(positions, self.geometry.block_size)
        return np.asarray(blocks, np.int64)[block], slot


class Memory:
    """All ranks of one life of an instance."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.ranks: Mapping[Rank, RankMemory] = {
            rank: RankMemory(rank, geometry, blocks_first=shape.blocks_first)
            for rank, geometry in shape.geometries().items()
        }

    def write(
        self,
        hashes: Sequence[int],
        blocks: Sequence[int],
        span: TokenSpan,
        layers: int | None = None,
    ) -> None:
        """As `RankMemory.write`, on every rank."""
        for rank in self.ranks.values():
            rank.write(hashes, blocks, span, layers)

    def wrong(self, hashes: Sequence[int], blocks: Sequence[int], span: TokenSpan) -> list[str]:
        """Every cell that is not what the model computes there, in words."""
        return [
            f"{rank} layer {layer} position {position}"
            for rank, memory in self.ranks.items()
            for layer, position in memory.wrong(hashes, blocks, span)
        ]

    def blocks_at(self, address: int, size_bytes: int) -> set[int]:
        """Blocks that a range of addresses touches, whichever rank's it is."""
        return set().union(*(rank.blocks_at(address, size_bytes) for rank in self.ranks.values()))
