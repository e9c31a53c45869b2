"""Where the tokens of a request lie in the blocks of one side.

Decides the pairing of two lists of blocks: both are asked for the same units, by absolute token
position. Refuses to know layers, planes and addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcourier.errors import MappingError
from kvcourier.layout.geometry import GroupCache, Int64Array, RankCache, TokenSpan


@dataclass(frozen=True, slots=True, eq=False)
class BlockRun:
    """Blocks of one request on one side, in token order.

    Attributes:
        block_ids: int64 array of shape [n]; block i holds the positions from
            `first_token + i * block_size` on.
        first_token: absolute position of the first slot, a multiple of that side's block size.
    """

    block_ids: Int64Array
    first_token: int


def block_run(
    side: str,
    cache: RankCache,
    group: int,
    block_ids: Sequence[Sequence[int]],
    span: TokenSpan,
) -> BlockRun:
    """One group's blocks of a request.

    Args:
        side: what to call this side in an error.
        cache: cache of this side.
        group: index of the group.
        block_ids: a list per group, from the first block on that holds what is needed of `span`.
        span: positions that this side holds, or wants.

    Raises:
        MappingError: there is not one list for each group.
    """
    if len(block_ids) != len(cache.groups):
        raise MappingError(
            f"{side} blocks: expected a list for each of {len(cache.groups)} cache groups on rank "
            f"{cache.rank}, found {len(block_ids)}"
        )
    geometry = cache.groups[group].geometry
    first_token = span.needed(geometry.window, geometry.block_size).start
    return BlockRun(np.array(block_ids[group], np.int64), first_token)


def units_of(span: TokenSpan, unit_tokens: int) -> range:
    """Numbers of the units that cover the span, counted from position 0.

    Raises:
        MappingError: the span is empty, or starts inside a unit.
    """
    if not 0 <= span.start < span.stop:
        raise MappingError(f"span: expected 0 <= start < stop, found {span.start} to {span.stop}")
    if span.start % unit_tokens:
        raise MappingError(
            f"span: expected a start that is a multiple of {unit_tokens} tokens, found {span.start}"
        )
    return range(span.start // unit_tokens, -(-span.stop // unit_tokens))


class UnitPlaces(NamedTuple):
    """Where the units of a span lie on one side.

    Attributes:
        blocks: ids of the blocks that the span touches, one entry per block.
        block_of_unit: block id of each unit.
        unit_in_block: position of each unit in its block; None where a block is one unit.
    """

    blocks: Int64Array
    block_of_unit: Int64Array
    unit_in_block: Int64Array | None

    def offsets(self, block_stride_bytes: int, unit_stride_bytes: int) -> Int64Array:
        """Bytes from the start of a plane to each unit."""
        offsets = self.block_of_unit * block_stride_bytes
        if self.unit_in_block is not None:
            offsets += self.unit_in_block * unit_stride_bytes
        return offsets


def locate(
    side: str, cache: GroupCache, run: BlockRun, units: range, unit_tokens: int
) -> UnitPlaces:
    """Find the blocks that hold these units.

    Args:
        side: what to call this side in an error.
        cache: cache of this side.
        run: the request's blocks in it.
        units: numbers of the units, counted from position 0; not empty.
        unit_tokens: tokens of a unit, a divisor of the block size.

    Raises:
        MappingError: the blocks do not start at a block border or do not cover the units, or an
            id is not one of the cache's.
    """
    block_size = cache.geometry.block_size
    if run.first_token < 0 or run.first_token % block_size:
        raise MappingError(
            f"{side} blocks: expected a first token that is a multiple of the block size "
            f"{block_size}, found {run.first_token}"
        )
    units_per_block = block_size // unit_tokens
    units_before = run.first_token // unit_tokens
    first, stop = units.start - units_before, units.stop - units_before
    first_block, stop_block = first // units_per_block, -(-stop // units_per_block)
    if first < 0 or stop_block > len(run.block_ids):
        raise MappingError(
            f"{side} blocks: positions {units.start * unit_tokens} to "
            f"{units.stop * unit_tokens} are wanted, {len(run.block_ids)} blocks of "
            f"{block_size} tokens hold {run.first_token} to "
            f"{run.first_token + len(run.block_ids) * block_size}"
        )
    blocks = np.asarray(run.block_ids[first_block:stop_block], np.int64)
    low, high = int(blocks.min()), int(blocks.max())
    lowest = cache.geometry.num_reserved_blocks
    if low < lowest or high >= cache.geometry.num_blocks:
        raise MappingError(
            f"{side} blocks: expected ids from {lowest} to {cache.geometry.num_blocks - 1} on rank "
            f"{cache.rank}, found {low if low < lowest else high}"
        )
    if units_per_block == 1:
        return UnitPlaces(blocks, blocks, None)
    block, inner = np.divmod(np.arange(first, stop, dtype=np.int64), units_per_block)
    return UnitPlaces(blocks, blocks[block - first_block], inner)


def require_distinct(blocks: Int64Array) -> None:
    """Raise MappingError if a target block would be written for two positions."""
    ordered = np.sort(blocks)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise MappingError(f"target blocks: block {twice[0]} is there more than once")
