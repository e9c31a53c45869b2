"""What one rank's KV cache looks like: the logical shape, and where it lies in memory.

Decides the vocabulary of the mapping: layers, planes (K and V, or one latent plane), heads,
tokens, blocks, and cache groups. Refuses to know about requests, peers and how bytes are moved.

A *plane* is one of the independent arrays of a layer: K and V for ordinary attention, a single
one for a latent (MLA) cache. Inside a block, a plane is contiguous: ``[token, head, lane]`` for
NHD and ``[head, token, lane]`` for HND.
"""

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcourier.ids import Rank

Int64Array = npt.NDArray[np.int64]


class CacheLayout(enum.StrEnum):
    """Order of the dimensions inside a block (vLLM's VLLM_KV_CACHE_LAYOUT)."""

    NHD = "NHD"
    HND = "HND"


class CacheKind(enum.StrEnum):
    """What a layer stores per token."""

    KEY_VALUE = "key_value"
    PACKED_KEY_VALUE = "packed_key_value"
    LATENT = "latent"

    @property
    def num_planes(self) -> int:
        """Independent arrays per layer: K and V, or one that holds both side by side, or one
        latent vector. Packed means that a head of a token is one cell of K followed by V, as in
        vLLM's caches, so that `head_dim` is the sum of both."""
        return 2 if self is CacheKind.KEY_VALUE else 1


class MemoryKind(enum.StrEnum):
    """Where registered memory lies; values are NIXL's names."""

    DRAM = "DRAM"
    VRAM = "VRAM"


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Logical shape of one cache group of one rank: layers that share their blocks.

    Attributes:
        kind: K and V, or one latent plane.
        layers: global indices of the layers this rank holds, in the order of its placement rows.
        num_kv_heads: KV heads of the whole model (1 for a latent cache).
        head_start: first global KV head this rank holds.
        head_stop: one past the last. Several ranks may hold the same heads (replicated KV).
        head_dim: lanes per head.
        dtype: name of the element type, e.g. ``bfloat16``. Part of the compatibility verdict.
        itemsize: bytes per element.
        block_size: tokens per block.
        num_blocks: blocks in the cache.
        cache_layout: order of dimensions inside a block.
        window: positions that a query looks at, its own included; None where it looks at all
            before it. Blocks that no later query can look at may be anybody's.
        num_reserved_blocks: blocks from 0 on that never belong to a request, such as vLLM's null
            block, which stands for those out of the window.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    num_kv_heads: int
    head_start: int
    head_stop: int
    head_dim: int
    dtype: str
    itemsize: int
    block_size: int
    num_blocks: int
    cache_layout: CacheLayout
    window: int | None = None
    num_reserved_blocks: int = 0

    @property
    def num_heads(self) -> int:
        """KV heads held by this rank."""
        return self.head_stop - self.head_start

    @property
    def cell_bytes(self) -> int:
        """Bytes of one head of one token in one plane; never split by a mapping."""
        return self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one plane of one layer."""
        return self.block_size * self.num_heads * self.cell_bytes

    @property
    def block_bytes_of_all_layers(self) -> int:
        """Bytes of one block in all planes of all layers."""
        return self.block_bytes * self.kind.num_planes * len(self.layers)


GroupGeometries = tuple[CacheGeometry, ...]
"""The cache groups of one rank, in the order of its lists of block ids."""


@dataclass(frozen=True, slots=True)
class Region:
    """One registered, contiguous memory range."""

    address: int
    size_bytes: int
    memory: MemoryKind
    device_id: int


@dataclass(frozen=True, slots=True, eq=False)
class CachePlacement:
    """Where the planes of a rank's cache lie: three int64 arrays of shape [layers, planes].

    Block ``b`` of plane ``p`` of the ``i``-th held layer starts at
    ``regions[region[i, p]].address + offset_bytes[i, p] + b * block_stride_bytes[i, p]``.
    This covers K and V in separate tensors, stacked before the blocks, or interleaved per block.
    """

    region: Int64Array
    offset_bytes: Int64Array
    block_stride_bytes: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class GroupCache:
    """Everything needed to address one cache group of one rank."""

    rank: Rank
    geometry: CacheGeometry
    placement: CachePlacement
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankCache:
    """Everything a peer needs to address one rank's cache: all its groups, at least one.

    The groups have the same regions. They may lie in the same bytes of them and take their blocks
    from one pool, as in vLLM: what keeps them apart is that a block id is in use in one group.
    """

    groups: tuple[GroupCache, ...]

    @property
    def rank(self) -> Rank:
        """Whose cache it is."""
        return self.groups[0].rank

    @property
    def regions(self) -> tuple[Region, ...]:
        """All memory of the rank's cache."""
        return self.groups[0].regions

    @property
    def geometries(self) -> GroupGeometries:
        """Logical shape of each group."""
        return tuple(group.geometry for group in self.groups)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Absolute token positions ``[start, stop)`` of a prompt."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def needed(self, window: int | None, unit_tokens: int) -> "TokenSpan":
        """The part that a query at `stop` or later can look at, from the border of a unit on.

        With a window of w, the first such query looks at positions from `stop - w + 1` on. This
        is what an engine keeps, what its lists of blocks begin with (a unit is a block there),
        and what moves (a unit is that of the mapping).
        """
        if window is None:
            return self
        first = self.stop - window + 1
        return TokenSpan(max(self.start, first - first % unit_tokens), self.stop)
