"""How fast scattered blocks get into staging slots and out of them, on the host and on a GPU.

A request of 16,000 tokens lies scattered in a cache of 28 layers, K and V, 8 heads of 128
bfloat16. All of it, or one head of it, is gathered into slots one after the other and scattered
back to where it came from; the pieces are as long as the two sides' geometries make them. GB/s
count each byte once. `call` is how long the caller is held up, median and largest.

    python benchmarks/copying.py --json copying.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcourier.ids import Rank
from kvcourier.layout import (
    BlockRun,
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    MemoryKind,
    ModelCache,
    PackedSide,
    Parcel,
    Region,
    TokenSpan,
    pack_source,
    parcels,
    plan_mapping,
    route,
    shard_geometry,
)
from kvcourier.transport.copying import Copier, LoadedTables, Ticket, copier_for

RANK = Rank(0, 0)
TOKENS = 16_000


class Shape(NamedTuple):
    """What makes pieces of one length: layout and block size of both sides, and heads that move."""

    name: str
    cache_layout: CacheLayout
    block_size: int
    num_heads: int


SHAPES = (
    Shape("256 B", CacheLayout.NHD, 16, 1),
    Shape("4 KiB", CacheLayout.HND, 16, 1),
    Shape("32 KiB", CacheLayout.NHD, 16, 8),
    Shape("64 KiB", CacheLayout.NHD, 32, 8),
)


class Device(NamedTuple):
    """Memory with a cache in it; `owner` keeps it alive."""

    name: str
    region: Region
    owner: Any


def main() -> None:
    """Measure every device and shape, print a table, and write the numbers to a file if asked."""
    options = _options()
    cache_bytes = options.layers * 2 * _geometry(options, SHAPES[2]).block_bytes * 1000
    results = []
    print(f"{TOKENS} tokens, {options.layers} layers; slots of {options.slot_mib} MiB")
    print(
        "device  piece    pieces     GB   gather GB/s  call us (max)    scatter GB/s  call us (max)"
    )
    for make in (_host, _gpu):
        device = make(cache_bytes)
        if device is None:
            continue
        copier = copier_for(device.region.memory, device.region.device_id, [device.region])
        slot = copier.allocate(options.slot_mib << 20)
        for shape in SHAPES:
            side = _side(options, shape, device.region)
            measured = _measure(options, copier, slot, side)
            results.append({"device": device.name, "piece": shape.name, **measured})
            print(_line(results[-1]))
        copier.close()
    if options.json:
        options.json.write_text(json.dumps(vars(options) | {"results": results}, default=str))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--slot-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="on a GPU, ten times as many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, found {options.rounds}")
    return options


def _host(num_bytes: int) -> Device:
    memory = np.ones(num_bytes, np.uint8)
    return Device("host", Region(memory.ctypes.data, num_bytes, MemoryKind.DRAM, 0), memory)


def _gpu(num_bytes: int) -> Device | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    memory = torch.ones(num_bytes, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    return Device("cuda", Region(memory.data_ptr(), num_bytes, MemoryKind.VRAM, 0), memory)


def _geometry(options: argparse.Namespace, shape: Shape) -> CacheGeometry:
    model = ModelCache(
        kind=CacheKind.KEY_VALUE,
        num_layers=options.layers,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        itemsize=2,
        block_size=shape.block_size,
        num_blocks=TOKENS // shape.block_size,
        cache_layout=shape.cache_layout,
    )
    return shard_geometry(model, 1, 0, range(options.layers))


def _side(options: argparse.Namespace, shape: Shape, region: Region) -> PackedSide:
    source = _geometry(options, shape)
    target = replace(source, head_stop=shape.num_heads)
    (only,) = route({RANK: (source,)}, {RANK: (target,)})
    rows, planes = np.indices((options.layers, 2), dtype=np.int64)
    plane_bytes = source.num_blocks * source.block_bytes
    placement = CachePlacement(
        np.zeros_like(rows),
        (2 * rows + planes) * plane_bytes,
        np.full_like(rows, source.block_bytes),
    )
    blocks = np.random.default_rng(options.seed).permutation(source.num_blocks).astype(np.int64)
    return pack_source(
        plan_mapping(source, target, only),
        GroupCache(RANK, source, placement, (region,)),
        BlockRun(blocks, 0),
        TokenSpan(0, TOKENS),
    )


def _measure(
    options: argparse.Namespace, copier: Copier, slot: Region, side: PackedSide
) -> dict[str, object]:
    cut = parcels([(side.num_pieces, side.piece_bytes)], slot.size_bytes)
    start = time.perf_counter()
    tables = copier.load([side])
    measured: dict[str, object] = {
        "pieces": side.num_pieces,
        "gb": side.num_bytes / 1e9,
        "load_us": (time.perf_counter() - start) * 1e6,
    }
    rounds = options.rounds * (1 if slot.memory is MemoryKind.DRAM else 10)
    for name, copy in (("gather", copier.gather), ("scatter", copier.scatter)):
        seconds, calls = [], []
        for _ in range(rounds):
            taken, held_up = _round(copier, copy, tables, cut, slot)
            seconds.append(taken)
            calls += held_up
        measured[f"{name}_gb_s"] = side.num_bytes / 1e9 / statistics.median(seconds)
        measured[f"{name}_call_us"] = statistics.median(calls)
        measured[f"{name}_call_max_us"] = max(calls)
    return measured


def _round(
    copier: Copier,
    copy: Callable[[LoadedTables, Parcel, int], Ticket],
    tables: LoadedTables,
    cut: tuple[Parcel, ...],
    slot: Region,
) -> tuple[float, list[float]]:
    """Seconds for all parcels, and microseconds that each call took."""
    calls = []
    start = time.perf_counter()
    for parcel in cut:
        called = time.perf_counter()
        ticket = copy(tables, parcel, slot.address)
        calls.append((time.perf_counter() - called) * 1e6)
    copier.wait(ticket)
    return time.perf_counter() - start, calls


def _line(row: dict[str, Any]) -> str:
    cells = f"{row['device']:6}  {row['piece']:7}  {row['pieces']:7}  {row['gb']:5.2f}"
    for name, width in (("gather", 12), ("scatter", 14)):
        cells += f"  {row[f'{name}_gb_s']:{width}.2f}  {row[f'{name}_call_us']:6.0f}"
        cells += f" ({row[f'{name}_call_max_us']:.0f})"
    return cells


if __name__ == "__main__":
    main()
