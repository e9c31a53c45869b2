"""How long the runs of blocks are that prompts get under churn, and what allocating costs.

Two pools serve the same requests: `runs` is the engine's, which hands out whole runs
(`kvcourier.engine.free_runs`); `singles` hands out one block after another, the one that was freed
last first. The cache is full throughout: whenever a prompt does not fit, a request that is chosen
at random ends. While they live, requests grow by single blocks. `cached` publishes each block, as
a prefix cache does, so that it is evicted by last use; `plain` does not.

Both pools take every round, in alternating order, so that a busy machine hits them alike.

    python benchmarks/allocation.py --json allocation.json
"""

import argparse
import json
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvcourier.engine.blocks import BlockKey, BlockPool
from kvcourier.engine.free_runs import runs_of
from kvcourier.ids import BlockId


class Pool(Protocol):
    """What the churn needs of a pool."""

    def allocate(self, shared: Sequence[BlockId], num_new: int) -> list[BlockId] | None: ...

    def release(self, blocks: Sequence[BlockId]) -> None: ...

    def publish(self, block: BlockId, key: BlockKey) -> None: ...


class Singles:
    """Free blocks in one line: the last freed first, published ones by last use after them."""

    def __init__(self, num_blocks: int) -> None:
        self._free = OrderedDict.fromkeys(map(BlockId, range(num_blocks)))
        self._key_of: dict[BlockId, BlockKey] = {}
        self._block_of: dict[BlockKey, BlockId] = {}
        self._references = [0] * num_blocks

    def allocate(self, shared: Sequence[BlockId], num_new: int) -> list[BlockId] | None:
        if num_new > len(self._free):
            return None
        fresh = []
        for _ in range(num_new):
            block, _ = self._free.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            self._references[block] = 1
            fresh.append(block)
        return fresh

    def release(self, blocks: Sequence[BlockId]) -> None:
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: BlockId, key: BlockKey) -> None:
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key


POOLS: dict[str, Callable[[int], Pool]] = {"singles": Singles, "runs": BlockPool}


@dataclass(frozen=True, slots=True)
class Churned:
    """Blocks per run over all prompts, and microseconds per request for taking and giving back."""

    run_length: float
    request_us: float


def churn(pool: Pool, options: argparse.Namespace, seed: int, *, cached: bool) -> Churned:
    """Serve `--requests` requests on a full cache; the first half only fills and stirs it."""
    source = random.Random(seed)
    running: list[list[BlockId]] = []
    spent = 0.0
    num_blocks = num_runs = 0
    for number in range(2 * options.requests):
        wanted = min(options.blocks // 4, max(4, round(source.lognormvariate(4.5, 1.0))))
        started = time.perf_counter()
        while (blocks := pool.allocate((), wanted)) is None:
            pool.release(running.pop(source.randrange(len(running))))
        for grown in source.sample(running, min(len(running), options.grow)):
            grown += pool.allocate((), 1) or ()
        elapsed = time.perf_counter() - started
        if number >= options.requests:
            spent += elapsed
            num_blocks += wanted
            num_runs += len(list(runs_of(blocks)))
        if cached:
            for at, block in enumerate(blocks):
                pool.publish(block, BlockKey(b"%d/%d" % (number, at)))
        running.append(blocks)
    return Churned(num_blocks / num_runs, spent / options.requests * 1e6)


def main() -> None:
    """Measure, print a line for each kind of cache, and write the numbers to a file if asked."""
    options = _options()
    results: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{options.blocks} blocks; medians of {options.rounds} rounds (min to max)")
    for kind in ("cached", "plain"):
        found: dict[str, list[Churned]] = {name: [] for name in POOLS}
        for turn in range(options.rounds):
            for name in list(POOLS)[:: 1 if turn % 2 else -1]:
                pool = POOLS[name](options.blocks)
                found[name].append(churn(pool, options, turn, cached=kind == "cached"))
        results[kind] = {}
        for what, unit in (("run_length", "blocks a run"), ("request_us", "us a request")):
            each = {name: [getattr(one, what) for one in found[name]] for name in POOLS}
            medians = {name: statistics.median(values) for name, values in each.items()}
            shown = "  ".join(
                f"{name} {medians[name]:.1f} ({min(values):.1f} to {max(values):.1f})"
                for name, values in each.items()
            )
            ratio = medians["runs"] / medians["singles"]
            print(f"{kind:6}  {unit:12}  {shown}  runs/singles {ratio:.2f}")
            results[kind][what] = {**medians, "ratio": ratio}
    if options.json:
        options.json.write_text(json.dumps(vars(options) | {"results": results}, default=str))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8192, help="blocks of the cache")
    parser.add_argument("--requests", type=int, default=500, help="measured in a round")
    parser.add_argument("--grow", type=int, default=8, help="single blocks taken per request")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
