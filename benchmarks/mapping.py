"""How long it takes to map one long request: plan and bind, with a cold and a cached plan.

Both variants run in every round, in alternating order, so that a busy machine hits them alike.
`kept` is `cached` with all results kept, on its own afterwards, so that each round's descriptors
need memory that is new to the process: the first requests of a process pay that, later ones do
not. The default is 1,000 blocks of a model of 28 layers, K and V.

    python benchmarks/mapping.py --json mapping.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvcourier.ids import Rank
from kvcourier.layout import (
    BlockRun,
    BoundPieces,
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    MemoryKind,
    ModelCache,
    Region,
    TokenSpan,
    bind,
    plan_mapping,
    route,
    shard_geometry,
)

RANK = Rank(0, 0)
Variant = Callable[[], BoundPieces]


def main() -> None:
    """Measure, print a table, and write the numbers to a file if asked."""
    options = _options()
    results: dict[str, dict[str, object]] = {}
    print(f"{options.blocks} blocks, {options.layers} layers; median ms (min to max) of rounds")
    for order in ("scattered", "contiguous"):
        cold, cached = _variants(options, scattered=order == "scattered")
        pieces = len(cached())
        kept: list[BoundPieces] = []

        def keep(make: Variant = cached, results: list[BoundPieces] = kept) -> BoundPieces:
            results.append(make())
            return results[-1]

        times = _interleave({"cold": cold, "cached": cached}, options.rounds)
        times |= _interleave({"kept": keep}, options.rounds)
        summaries = {name: _summary(values) for name, values in times.items()}
        ratio = summaries["cold"]["median_ms"] / summaries["cached"]["median_ms"]
        results[order] = {"pieces": pieces, "cold_over_cached": ratio, **summaries}
        shown = "  ".join(_show(name, summary) for name, summary in summaries.items())
        print(f"{order:10}  {pieces:6} pieces  {shown}  cold/cached {ratio:.2f}")
    if options.json:
        options.json.write_text(json.dumps(vars(options) | {"results": results}, default=str))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1000, help="blocks of the request")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--source-block-size", type=int, default=16)
    parser.add_argument("--target-block-size", type=int, default=16)
    parser.add_argument("--source-layout", choices=[*CacheLayout], default="NHD")
    parser.add_argument("--target-layout", choices=[*CacheLayout], default="NHD")
    parser.add_argument("--rounds", type=int, default=50, help="at least 30")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    if options.rounds < 30:
        parser.error(f"--rounds: expected at least 30, found {options.rounds}")
    return options


def _variants(options: argparse.Namespace, *, scattered: bool) -> tuple[Variant, Variant]:
    tokens = options.blocks * options.source_block_size
    source = _geometry(options, options.source_block_size, options.source_layout, tokens)
    target = _geometry(options, options.target_block_size, options.target_layout, tokens)
    (only_route,) = route({RANK: (source,)}, {RANK: (target,)})
    source_cache, target_cache = _cache(source, 1 << 40), _cache(target, 1 << 44)
    random = np.random.default_rng(options.seed)

    def blocks(geometry: CacheGeometry) -> BlockRun:
        ids = random.permutation(geometry.num_blocks) if scattered else np.arange(tokens)
        return BlockRun(ids[: -(-tokens // geometry.block_size)].astype(np.int64), 0)

    cached_plan = plan_mapping(source, target, only_route)
    rest = (source_cache, target_cache, blocks(source), blocks(target), TokenSpan(0, tokens))
    return (
        lambda: bind(plan_mapping(source, target, only_route), *rest),
        lambda: bind(cached_plan, *rest),
    )


def _geometry(
    options: argparse.Namespace, block_size: int, layout: str, tokens: int
) -> CacheGeometry:
    model = ModelCache(
        kind=CacheKind.KEY_VALUE,
        num_layers=options.layers,
        num_kv_heads=options.heads,
        head_dim=options.head_dim,
        dtype="bfloat16",
        itemsize=2,
        block_size=block_size,
        num_blocks=2 * -(-tokens // block_size),
        cache_layout=CacheLayout(layout),
    )
    return shard_geometry(model, 1, 0, range(options.layers))


def _cache(geometry: CacheGeometry, address: int) -> GroupCache:
    """K and V as [2, blocks], a region per layer; addresses are numbers, nothing is allocated."""
    rows, planes = np.indices((len(geometry.layers), 2), dtype=np.int64)
    plane_bytes = geometry.num_blocks * geometry.block_bytes
    size = 2 * plane_bytes
    return GroupCache(
        RANK,
        geometry,
        CachePlacement(rows, planes * plane_bytes, np.full_like(rows, geometry.block_bytes)),
        tuple(
            Region(address + row * size, size, MemoryKind.DRAM, 0)
            for row in range(len(geometry.layers))
        ),
    )


def _interleave(variants: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every round, each variant once a round, first in every other one."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        names = list(variants) if turn % 2 else list(reversed(variants))
        for name in names:
            start = time.perf_counter()
            variants[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def _summary(values: list[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(values), "min_ms": min(values), "max_ms": max(values)}


def _show(name: str, summary: dict[str, float]) -> str:
    median, low, high = summary.values()
    return f"{name} {median:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
