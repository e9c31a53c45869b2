"""KV content that names itself: every cell is a function of prompt, layer, plane, head, position.

Comparing bytes then finds any shifted, stale or foreign block. For tests of whole transfers.
"""

import zlib
from collections.abc import Container, Mapping, Sequence

import numpy as np

from kvcourier.ids import Rank
from kvcourier.layout import GroupCache, RankCache, TokenSpan
from layout_builders import CANARY, Buffer, plane_cells

Instance = Mapping[Rank, tuple[GroupCache, list[Buffer]]]


def group_of(
    instance: Mapping[Rank, tuple[RankCache, list[Buffer]]], group: int
) -> dict[Rank, tuple[GroupCache, list[Buffer]]]:
    """One cache group of every rank."""
    return {rank: (cache.groups[group], buffers) for rank, (cache, buffers) in instance.items()}


def write_prompt(
    instance: Instance,
    prompt: str,
    block_ids: Sequence[int],
    span: TokenSpan,
    first_token: int = 0,
    layers: Container[int] | None = None,
) -> None:
    """Compute the prompt's KV of these positions into an instance's blocks, on every rank, for
    these layers only if any are given."""
    for cache, buffers in instance.values():
        for row, plane, view in _planes(cache, buffers, layers):
            for position in range(span.start, span.stop):
                block, slot = _place(cache, block_ids, position, first_token)
                view[block, slot] = _cells(prompt, cache, row, plane, position)


def wrong_cells(
    instance: Instance,
    prompt: str,
    block_ids: Sequence[int],
    span: TokenSpan,
    first_token: int = 0,
    layers: Container[int] | None = None,
) -> list[str]:
    """Every (rank, layer, plane, position) whose bytes are not the prompt's."""
    wrong = []
    for rank, (cache, buffers) in instance.items():
        for row, plane, view in _planes(cache, buffers, layers):
            for position in range(span.start, span.stop):
                block, slot = _place(cache, block_ids, position, first_token)
                if not np.array_equal(
                    view[block, slot], _cells(prompt, cache, row, plane, position)
                ):
                    layer = cache.geometry.layers[row]
                    wrong.append(f"{rank} layer {layer} plane {plane} token {position}")
    return wrong


def touched_blocks(instance: Instance) -> set[int]:
    """Blocks in which anything differs from a fresh cache."""
    touched: set[int] = set()
    for cache, buffers in instance.values():
        for _, _, view in _planes(cache, buffers):
            touched |= set(np.flatnonzero((view != CANARY).any(axis=(1, 2, 3))).tolist())
    return touched


def _planes(cache, buffers, layers=None):
    for row, layer in enumerate(cache.geometry.layers):
        if layers is not None and layer not in layers:
            continue
        for plane in range(cache.geometry.kind.num_planes):
            yield row, plane, plane_cells(cache, buffers, row, plane)


def _place(
    cache: GroupCache, block_ids: Sequence[int], position: int, first_token: int
) -> tuple[int, int]:
    block_size = cache.geometry.block_size
    return block_ids[(position - first_token) // block_size], position % block_size


def _cells(prompt: str, cache: GroupCache, row: int, plane: int, position: int):
    geometry = cache.geometry
    heads = np.arange(geometry.head_start, geometry.head_stop)
    seed = zlib.crc32(f"{prompt}/{geometry.layers[row]}/{plane}/{position}".encode())
    lanes = np.arange(geometry.cell_bytes)
    # Never the canary: a cell that nobody wrote must not pass for one that was.
    values = (seed + 31 * heads[:, None] + 7 * lanes[None, :]) % 251
    return np.where(values == CANARY, 252, values).astype(np.uint8)
