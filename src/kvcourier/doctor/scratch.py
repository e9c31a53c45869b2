"""Memory of a doctor's own, shaped like an instance's cache, in which two copies of one prompt's KV
can land and be compared.

Decides where the copies lie, what is there before them, and what counts as equal. Refuses to know
how bytes get there. It is the only memory that a doctor lets anybody write to.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcourier.core.handshake import PeerInstance
from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout.geometry import (
    CacheGeometry,
    CachePlacement,
    GroupCache,
    MemoryKind,
    RankCache,
    Region,
    TokenSpan,
)

Bytes = npt.NDArray[np.uint8]
COPIES = 2
_FILLS = (0xA5, 0x5A)
"""What the two copies are filled with before: what does not arrive in one differs in the other."""

_GUARD = 0xC3
_MAX_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Compared:
    """What two copies have come to.

    Attributes:
        num_bytes: of whole blocks that were compared.
        differing: bytes that are not the same in both.
        untouched: blocks that still hold what was there before, in either copy.
        outside: bytes beyond the copies that somebody has written.
        first: where the first difference is, in words; empty if there is none.
    """

    num_bytes: int
    differing: int
    untouched: int
    outside: int
    first: str = ""


class Scratch:
    """The same ranks, groups, layers, heads and layout as an instance's, with few blocks.

    Args:
        instance: whose shape to take.
        tokens: longest prompt.

    Raises:
        MappingError: it would be larger than a doctor should be.
    """

    def __init__(self, instance: PeerInstance, tokens: int) -> None:
        self._tokens = tokens
        self._memory: dict[Rank, Bytes] = {}
        self._caches: dict[Rank, RankCache] = {}
        for rank, contact in instance.ranks.items():
            self._memory[rank], self._caches[rank] = _mirror(contact.cache, tokens)
        self._lay_out()

    @property
    def caches(self) -> list[RankCache]:
        """The cache of every rank, for an endpoint of its own."""
        return list(self._caches.values())

    @property
    def num_bytes(self) -> int:
        """Of all ranks."""
        return sum(memory.nbytes for memory in self._memory.values())

    @property
    def memory(self) -> Mapping[Rank, Bytes]:
        """The bytes themselves, by rank."""
        return self._memory

    def blocks(self, copy: int, tokens: int) -> list[list[int]]:
        """Ids of the blocks of one copy (0 or 1) of a prompt, a list for each cache group: those
        that move, which with a sliding window are the last ones."""
        first = next(iter(self._caches.values()))
        return [
            _ids(geometry, copy, self._tokens)[: _last(geometry, tokens) - _first(geometry, tokens)]
            for geometry in first.geometries
        ]

    def compare(self, tokens: int) -> Compared:
        """Set both copies side by side; only whole blocks of a prompt of so many tokens count."""
        num_bytes = differing = untouched = 0
        first = ""
        for rank, group, layer, plane in self._planes():
            geometry = group.geometry
            whole = max(0, tokens // geometry.block_size - _first(geometry, tokens))
            left, right = (
                plane[_ids(geometry, copy, self._tokens)[:whole]] for copy in range(COPIES)
            )
            wrong = left != right
            num_bytes += left.size
            differing += int(wrong.sum())
            untouched += sum(
                int((copy == fill).all(axis=1).sum())
                for copy, fill in zip((left, right), _FILLS, strict=True)
            )
            if wrong.any() and not first:
                block, byte = np.argwhere(wrong)[0]
                first = f"rank {rank}, layer {layer}, block {block} of the prompt, byte {byte}"
        return Compared(num_bytes, differing, untouched, self._outside(), first)

    def _outside(self) -> int:
        """Bytes of the guards that are not as they were."""
        spoilt = 0
        for _, group, _, plane in self._planes():
            inside = {
                block
                for copy in range(COPIES)
                for block in _ids(group.geometry, copy, self._tokens)
            }
            guards = [block for block in range(len(plane)) if block not in inside]
            spoilt += int((plane[guards] != _GUARD).sum())
        return spoilt

    def _lay_out(self) -> None:
        for memory in self._memory.values():
            memory.fill(_GUARD)
        for _, group, _, plane in self._planes():
            for copy, fill in enumerate(_FILLS):
                plane[_ids(group.geometry, copy, self._tokens)] = fill

    def _planes(self) -> Iterator[tuple[Rank, GroupCache, int, Bytes]]:
        """(rank, group, layer, bytes of shape [blocks, bytes of a block]) of every plane."""
        for rank, cache in self._caches.items():
            for group in cache.groups:
                geometry, placement = group.geometry, group.placement
                for row, layer in enumerate(geometry.layers):
                    for column in range(geometry.kind.num_planes):
                        start = int(placement.offset_bytes[row, column])
                        size = geometry.num_blocks * geometry.block_bytes
                        plane = self._memory[rank][start : start + size]
                        shape = (geometry.num_blocks, geometry.block_bytes)
                        yield rank, group, layer, plane.reshape(shape)


def _first(geometry: CacheGeometry, tokens: int) -> int:
    """The first block of a prompt that moves: where its sliding window begins."""
    needed = TokenSpan(0, tokens).needed(geometry.window, geometry.block_size)
    return needed.start // geometry.block_size


def _last(geometry: CacheGeometry, tokens: int) -> int:
    """One past a prompt's last block."""
    return math.ceil(tokens / geometry.block_size)


def _ids(geometry: CacheGeometry, copy: int, tokens: int) -> list[int]:
    """A copy's blocks: with a guard before, between and after them, and none that is reserved."""
    num = _last(geometry, tokens)
    start = geometry.num_reserved_blocks + 1 + copy * (num + 1)
    return list(range(start, start + num))


def _mirror(cache: RankCache, tokens: int) -> tuple[Bytes, RankCache]:
    """Memory and a cache in it, of the shape of a peer's."""
    small = [
        dataclasses.replace(geometry, num_blocks=_ids(geometry, COPIES - 1, tokens)[-1] + 2)
        for geometry in cache.geometries
    ]
    sizes = [geometry.block_bytes_of_all_layers * geometry.num_blocks for geometry in small]
    if sum(sizes) > _MAX_BYTES:
        raise MappingError(
            f"scratch memory: at most {_MAX_BYTES} bytes, {sum(sizes)} needed for {tokens} tokens"
        )
    memory = np.zeros(sum(sizes), np.uint8)
    region = Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM, 0)
    groups, start = [], 0
    for geometry, size in zip(small, sizes, strict=True):
        groups.append(GroupCache(cache.rank, geometry, _placement(geometry, start), (region,)))
        start += size
    return memory, RankCache(tuple(groups))


def _placement(geometry: CacheGeometry, start: int) -> CachePlacement:
    """Plane after plane, block after block."""
    shape = (len(geometry.layers), geometry.kind.num_planes)
    plane_bytes = geometry.num_blocks * geometry.block_bytes
    offsets = start + plane_bytes * np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape)
    return CachePlacement(
        np.zeros(shape, np.int64), offsets, np.full(shape, geometry.block_bytes, np.int64)
    )
