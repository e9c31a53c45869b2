"""Digests of a cache: on the host, by the GPU kernel, and what is refused.

The oracle reads cell by cell, at `PackedSide.addresses`, and adds up plain numbers. Every digester
runs the same examples; the kernel also runs without a GPU, in triton's interpreter, where triton is
installed.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcourier.config import Integrity
from kvcourier.errors import MappingError
from kvcourier.layout import (
    BlockRun,
    CacheGeometry,
    Cells,
    GroupCache,
    MemoryKind,
    Parcel,
    Region,
    Share,
    TokenSpan,
    added,
    cells_of,
    parcels,
)
from kvcourier.transport.copying import Digester, digester_for
from kvcourier.transport.copying.host_digests import HostDigester
from layout_builders import PlacementStyle, make_cache
from transport.interpreter import run_interpreted
from transport.test_copying import GpuMemory, HostMemory, examples

SPAN = TokenSpan(37, 122)
SEED = 987654321
MakeDigester = Callable[[Sequence[Region]], Digester]


def geometries() -> list[CacheGeometry]:
    """Cells of 2,304 bytes down to 3, in all orders, with all heads or some."""
    return [each.source for each in examples()]


def name_of(geometry: CacheGeometry) -> str:
    return (
        f"{geometry.cache_layout} blocks of {geometry.block_size}, {geometry.num_heads} heads of "
        f"{geometry.cell_bytes} bytes"
    )


def filled(geometry: CacheGeometry) -> tuple[GroupCache, list[Any]]:
    cache, buffers = make_cache(geometry, PlacementStyle.MIXED)
    noise = np.random.default_rng(geometry.cell_bytes)
    for buffer in buffers:
        buffer[:] = noise.integers(0, 256, buffer.nbytes, np.uint8)
    return cache, buffers


def share_of(geometry: CacheGeometry) -> Share:
    """All layers but the first, and not all heads where there are several."""
    layers = geometry.layers[1:] or geometry.layers
    return Share(layers, geometry.num_heads // 3, geometry.num_heads, SPAN)


def cells_in(cache: GroupCache, integrity: Integrity) -> tuple[Cells, ...]:
    size = cache.geometry.block_size
    count = -(-SPAN.stop // size)
    blocks = np.random.default_rng(7).permutation(cache.geometry.num_blocks)[:count]
    run = BlockRun(blocks.astype(np.int64), 0)
    return cells_of(cache, run, share_of(cache.geometry), integrity, SEED)


def plainly(cells: Cells, part: Parcel) -> int:
    """The oracle, for a cache on the host."""
    weights = cells.weights(part.start, part.stop).tolist()
    words = cells.word_weights.tolist()
    total = 0
    addresses = cells.side.addresses(part.start, part.stop).tolist()
    for weight, address in zip(weights, addresses, strict=True):
        content = ctypes.string_at(address, cells.side.piece_bytes)
        value = 1
        for number, word_weight in enumerate(words):
            word = int.from_bytes(content[8 * number : 8 * number + 8], "little")
            value += word_weight * (word ^ (word >> 32))
        total += weight * value
    return total % (1 << 64)


def finished(digester: Digester, loaded: Any, part: Parcel) -> int:
    summed = digester.start(loaded, part)
    while (value := summed.value()) is None:
        pass
    return value


def assert_sums_alike(geometry: CacheGeometry, make: MakeDigester, memory: Any) -> None:
    host = filled(geometry)
    cache, there = memory.place(host)
    digester = make(cache.regions)
    for integrity in (Integrity.ALL, Integrity.SAMPLE):
        expected, cells = cells_in(host[0], integrity), cells_in(cache, integrity)
        loaded = digester.load(cells)
        sizes = [(each.side.num_pieces, each.side.piece_bytes) for each in cells]
        for part_bytes in (1 << 20, 3 * geometry.cell_bytes * geometry.num_heads + 1):
            found = []
            for part in parcels(sizes, part_bytes):
                found.append(finished(digester, loaded, part))
                assert found[-1] == plainly(expected[part.segment], part), (part, integrity)
            whole = [Parcel(number, 0, count) for number, (count, _) in enumerate(sizes)]
            assert added(found) == added([finished(digester, loaded, part) for part in whole])
    digester.close()
    assert there


@pytest.mark.parametrize("geometry", geometries(), ids=name_of)
def test_the_host_sums_up_every_example(geometry: CacheGeometry) -> None:
    assert_sums_alike(geometry, HostDigester, HostMemory())


def test_what_lies_outside_the_cache_is_not_read() -> None:
    cache, _ = filled(geometries()[0])
    (cells,) = cells_in(cache, Integrity.ALL)
    digester = digester_for(MemoryKind.DRAM, 0, cache.regions)
    far = replace(cells, side=replace(cells.side, row_address=cells.side.row_address - (1 << 30)))
    with pytest.raises(MappingError, match="regions"):
        digester.load([far])
    with pytest.raises(MappingError, match="expected DRAM on device 1"):
        digester_for(MemoryKind.DRAM, 1, cache.regions).load([cells])
    loaded = digester.load([cells])
    for part in (Parcel(1, 0, 1), Parcel(0, 0, cells.side.num_pieces + 1), Parcel(0, 3, 3)):
        with pytest.raises(MappingError, match="parcel"):
            digester.start(loaded, part)


def interpret() -> None:
    """Run the kernel over every example in triton's interpreter, on the host's memory."""
    import torch

    from kvcourier.transport.copying import digest_kernel
    from kvcourier.transport.copying.cuda import cut_of, table_of
    from kvcourier.transport.copying.cuda_digests import keys_of

    class Interpreted(HostDigester):
        def load(self, cells: Sequence[Cells]) -> Any:
            return cells

        def start(self, loaded: Any, part: Parcel) -> Any:
            cells: Cells = loaded[part.segment]
            num_words = len(cells.word_weights)
            count = digest_kernel.num_programs(part.stop - part.start, num_words)
            sums = torch.empty(count, dtype=torch.int64)
            digest_kernel.start(
                torch.from_numpy(table_of(cells.side)),
                torch.from_numpy(keys_of(cells)),
                sums,
                range(part.start, part.stop),
                cells.side.shape,
                cell_bytes=cells.side.piece_bytes,
                num_words=num_words,
                part_bytes=cut_of(cells.side).word_bytes,
            )

            class Sum:
                def value(self) -> int:
                    return int(sums.sum()) % (1 << 64)

            return Sum()

    for geometry in geometries():
        assert_sums_alike(geometry, Interpreted, HostMemory())
    print("interpreted", len(geometries()))


@pytest.mark.slow
def test_the_kernel_sums_up_every_example_when_interpreted() -> None:
    said = run_interpreted("transport.test_digests", timeout_s=300)
    assert f"interpreted {len(geometries())}" in said


@pytest.mark.slow
@pytest.mark.parametrize("geometry", geometries(), ids=name_of)
def test_a_gpu_sums_up_every_example(geometry: CacheGeometry, num_gpus: int) -> None:
    # The last device, while the current one stays the first.
    device = num_gpus - 1

    def make(regions: Sequence[Region]) -> Digester:
        return digester_for(MemoryKind.VRAM, device, regions)

    assert_sums_alike(geometry, make, GpuMemory(device))
