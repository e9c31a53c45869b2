"""The paged KV memory of all virtual ranks.

Decides which rank holds which layers and heads, and how a token's K and V are written and read
there. Refuses to know requests and what is done with K and V.

The model runs once; a *virtual rank* is a set of cache tensors that looks to peers like the cache
of one rank of a sharded engine.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kvcourier.ids import Rank
from kvcourier.layout.geometry import (
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    MemoryKind,
    RankCache,
    Region,
)
from kvcourier.layout.shards import ModelCache, instance_geometries


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token's KV is made of, for the whole model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token over all layers and heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the K and V of some tokens go: int64 tensors of shape [tokens]."""

    blocks: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """One rank's part of one layer: some heads, in a tensor of its own."""

    rank: Rank
    heads: slice
    tensor: torch.Tensor


class KVCache:
    """Cache tensors of every rank: one per layer held, K stacked before V.

    A tensor has shape [2, num_blocks, block_size, heads, head_dim] (NHD) or
    [2, num_blocks, heads, block_size, head_dim] (HND). With more ranks than KV heads, heads are
    replicated: each is written to all its ranks and read from the first.

    Raises:
        ConfigError: heads or layers cannot be split over so many ranks.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        num_blocks: int,
        cache_layout: CacheLayout = CacheLayout.NHD,
        tp_size: int = 1,
        pp_size: int = 1,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.block_size = block_size
        self.num_blocks = num_blocks
        model_cache = ModelCache(
            kind=CacheKind.KEY_VALUE,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            block_size=block_size,
            num_blocks=num_blocks,
            cache_layout=cache_layout,
        )
        self._is_nhd = cache_layout is CacheLayout.NHD
        self._geometries = instance_geometries(model_cache, tp_size, pp_size)
        self._shares: dict[int, list[_Share]] = {layer: [] for layer in range(shape.num_layers)}
        for rank, geometry in self._geometries.items():
            for layer in geometry.layers:
                self._shares[layer].append(self._allocate(rank, geometry))

    @property
    def stage_geometries(self) -> tuple[CacheGeometry, ...]:
        """Of one tensor-parallel rank of each pipeline stage: together they have all layers."""
        return tuple(each for rank, each in self._geometries.items() if rank.tp_rank == 0)

    def _allocate(self, rank: Rank, geometry: CacheGeometry) -> "_Share":
        inner = (geometry.block_size, geometry.num_heads)
        dims = (2, geometry.num_blocks, *(inner if self._is_nhd else inner[::-1]))
        tensor = torch.zeros((*dims, geometry.head_dim), dtype=self.dtype, device=self.device)
        return _Share(rank, slice(geometry.head_start, geometry.head_stop), tensor)

    def write(self, layer: int, slots: Slots, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store K and V, both [tokens, heads, head_dim], of some tokens in all ranks."""
        for share in self._shares[layer]:
            for plane, source in zip(share.tensor, (key, value), strict=True):
                if self._is_nhd:
                    plane[slots.blocks, slots.offsets] = source[:, share.heads]
                else:
                    plane[slots.blocks, :, slots.offsets] = source[:, share.heads]

    def read(self, layer: int, block_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather whole blocks of several sequences.

        Args:
            layer: global layer.
            block_table: int64 block ids, shape [sequences, blocks].

        Returns:
            K and V, both of shape [sequences, heads, blocks * block_size, head_dim].
        """
        return self._read_plane(layer, 0, block_table), self._read_plane(layer, 1, block_table)

    def _read_plane(self, layer: int, plane: int, block_table: torch.Tensor) -> torch.Tensor:
        num_sequences, num_blocks = block_table.shape
        flat = block_table.reshape(-1)
        parts: list[torch.Tensor] = []
        next_head = 0
        for share in self._shares[layer]:
            if share.heads.start != next_head:
                continue  # a replica of heads already read
            part = share.tensor[plane].index_select(0, flat)
            part = part.view(num_sequences, num_blocks, *part.shape[1:])
            # Both orders end as [sequences, heads, blocks, tokens, lanes].
            part = part.permute((0, 3, 1, 2, 4) if self._is_nhd else (0, 2, 1, 3, 4))
            parts.append(part.flatten(2, 3))
            next_head = share.heads.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def rank_caches(self) -> list[RankCache]:
        """What peers must know of every rank's memory, with its real addresses."""
        return [self._rank_cache(rank, geometry) for rank, geometry in self._geometries.items()]

    def _rank_cache(self, rank: Rank, geometry: CacheGeometry) -> RankCache:
        tensors = [
            share.tensor
            for layer in geometry.layers
            for share in self._shares[layer]
            if share.rank == rank
        ]
        on_gpu = self.device.type == "cuda"
        plane_bytes = self.num_blocks * geometry.block_bytes
        rows = np.arange(len(tensors), dtype=np.int64)
        placement = CachePlacement(
            region=np.stack([rows, rows], axis=1),
            offset_bytes=np.tile(np.array([0, plane_bytes], dtype=np.int64), (len(rows), 1)),
            block_stride_bytes=np.full((len(rows), 2), geometry.block_bytes, dtype=np.int64),
        )
        regions = tuple(
            Region(
                address=tensor.data_ptr(),
                size_bytes=tensor.nbytes,
                memory=MemoryKind.VRAM if on_gpu else MemoryKind.DRAM,
                device_id=(tensor.device.index or 0) if on_gpu else 0,
            )
            for tensor in tensors
        )
        return RankCache((GroupCache(rank, geometry, placement, regions),))
