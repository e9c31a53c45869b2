"""What `kv_integrity` costs: transfers of the same prompts with off, sample and all, in turns.

One prefill instance and a decode instance for each setting, without engines, with kvcourier's whole
stack around them: couriers, side channel, NIXL. A time is from "the prompt's KV is written" (push,
registered for before) or "blocks are reserved" (pull) until "received". Every block is somewhere
else on both sides. The order within a round changes with each, so that a busy machine hits all
settings alike; a ratio is taken within a round. The bytes are compared each time.

    python benchmarks/integrity.py --json integrity.json
    python benchmarks/integrity.py --digests                  # the digest alone, without a transfer
    python benchmarks/integrity.py --digests --device cuda    # the same on a GPU; needs no NIXL
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcourier.config import Integrity, PathPolicy, TransferMode
from kvcourier.ids import EngineId, Rank, RequestId
from kvcourier.layout import (
    BlockRun,
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    MemoryKind,
    RankCache,
    Region,
    Share,
    TokenSpan,
    added,
    cells_of,
    parcels,
)
from kvcourier.transport.copying import digester_for

BLOCK_SIZE, NUM_HEADS, HEAD_DIM = 16, 8, 128
PIECE_BYTES = BLOCK_SIZE * NUM_HEADS * HEAD_DIM * 2
ANSWER_S = 60.0
CHECKED = (Integrity.SAMPLE, Integrity.ALL)


def describe(address: int, num_layers: int, num_blocks: int, memory: MemoryKind) -> GroupCache:
    """A cache [layers, K and V, blocks] from this address on."""
    offsets = np.arange(2 * num_layers, dtype=np.int64).reshape(num_layers, 2)
    geometry = CacheGeometry(
        kind=CacheKind.KEY_VALUE,
        layers=tuple(range(num_layers)),
        num_kv_heads=NUM_HEADS,
        head_start=0,
        head_stop=NUM_HEADS,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
        itemsize=2,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        cache_layout=CacheLayout.NHD,
    )
    size = offsets.size * num_blocks * PIECE_BYTES
    placement = CachePlacement(
        np.zeros_like(offsets),
        offsets * num_blocks * PIECE_BYTES,
        np.full_like(offsets, PIECE_BYTES),
    )
    return GroupCache(Rank(0, 0), geometry, placement, (Region(address, size, memory, 0),))


class Instance:
    """A cache without an engine, and its endpoint."""

    def __init__(self, name: str, options: argparse.Namespace, integrity: Integrity) -> None:
        from kvcourier.config import CourierConfig, EndpointConfig, StagingConfig
        from kvcourier.runtime.endpoint import KvEndpoint
        from kvcourier.transport.nixl import nixl_factory

        shape = (2 * options.layers, options.blocks_held, PIECE_BYTES // 8)
        noise = np.random.default_rng(len(name))
        self.words = noise.integers(0, 1 << 63, shape, np.uint64)
        cache = describe(
            self.words.ctypes.data, options.layers, options.blocks_held, MemoryKind.DRAM
        )
        staging = StagingConfig(path=PathPolicy(options.path))
        config = EndpointConfig(
            EngineId(name),
            "benchmark",
            side_channel_host="127.0.0.1",
            side_channel_port=0,
            courier=CourierConfig(staging=staging),
            integrity=integrity,
        )
        self.endpoint = KvEndpoint(config, [RankCache((cache,))], nixl_factory(config.courier))
        self._news = threading.Event()
        self._reported_at = 0.0
        self._told: dict[tuple[str, str], float] = {}
        self.endpoint.start(self._on_report)

    def _on_report(self) -> None:
        self._reported_at = time.monotonic()
        self._news.set()

    def wait(self, name: str, outcome: str) -> float:
        """Until this is reported of a request; when that was."""
        until = time.monotonic() + ANSWER_S
        while (name, outcome) not in self._told:
            if not self._news.wait(max(0.0, until - time.monotonic())):
                raise TimeoutError(f"{name}: not {outcome} in {ANSWER_S:g} s")
            self._news.clear()
            for report in self.endpoint.poll():
                self._told[report.request_id, report.outcome.value] = self._reported_at
                if report.outcome.value == "receive_failed":
                    raise RuntimeError(f"{report.request_id}: {report.reason}")
        return self._told[name, outcome]

    def wait_registered(self, name: str) -> None:
        """Until the other side has our registration."""
        until = time.monotonic() + ANSWER_S
        while not any(e["what"] == "registered" for e in self.endpoint.story(name) or ()):
            if time.monotonic() > until:
                raise TimeoutError(f"{name}: not registered in {ANSWER_S:g} s")
            time.sleep(0.0005)


def transfer(
    p: Instance, d: Instance, name: str, own: list[int], peer: list[int], mode: TransferMode
) -> float:
    """Move one prompt and compare it; milliseconds."""
    from kvcourier.config import Limits
    from kvcourier.core.params import parse_params

    request_id, span = RequestId(name), TokenSpan(0, len(own) * BLOCK_SIZE)
    info = p.endpoint.instance_info()
    coordinates = {
        "do_remote_prefill": True,
        "remote_engine_id": info["engine_id"],
        "remote_host": info["side_channel_host"],
        "remote_port": info["side_channel_port"],
        "transfer_id": name,
    }
    hold = parse_params({"do_remote_decode": True, "transfer_id": name}, Limits())
    p.endpoint.begin_hold(request_id, hold)  # type: ignore[arg-type]
    if mode is TransferMode.PUSH:
        d.endpoint.expect(request_id, parse_params(coordinates, Limits()))  # type: ignore[arg-type]
        d.endpoint.receive(request_id, [peer], span)
        d.wait_registered(name)
        began = time.monotonic()
        p.endpoint.finish_prefill(request_id, [own], span.stop)
    else:
        answer = p.endpoint.finish_prefill(request_id, [own], span.stop)
        d.endpoint.expect(request_id, parse_params(answer, Limits()))  # type: ignore[arg-type]
        began = time.monotonic()
        d.endpoint.receive(request_id, [peer], span)
    ended = d.wait(name, "received")
    d.wait(name, "released")
    p.wait(name, "released")
    if not np.array_equal(p.words[:, own], d.words[:, peer]):
        raise RuntimeError(f"{name}: the bytes differ")
    return (ended - began) * 1e3


def measure_transfers(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each setting in each round, of both modes."""
    chance = random.Random(options.seed)
    blocks = options.tokens // BLOCK_SIZE
    options.blocks_held = 2 * blocks
    found: dict[str, dict[str, list[float]]] = {}
    with instances(options) as (p, decoders):
        for mode in TransferMode:
            times = found[mode.value] = {each.value: [] for each in Integrity}
            for number in range(-1, options.rounds):
                order = list(Integrity)
                chance.shuffle(order)
                for integrity in order:
                    own, peer = (chance.sample(range(2 * blocks), blocks) for _ in range(2))
                    name = f"{mode.value}-{integrity.value}-{number}"
                    took = transfer(p, decoders[integrity], name, own, peer, mode)
                    # The first connects.
                    if number >= 0:
                        times[integrity.value].append(took)
    return {"transfers_ms": found}


@contextlib.contextmanager
def instances(
    options: argparse.Namespace,
) -> Iterator[tuple[Instance, dict[Integrity, Instance]]]:
    """P, and a D for each setting."""
    with contextlib.ExitStack() as stack:

        def opened(name: str, integrity: Integrity) -> Instance:
            instance = Instance(name, options, integrity)
            stack.callback(instance.endpoint.close)
            return instance

        yield opened("p", Integrity.OFF), {each: opened(f"d-{each}", each) for each in Integrity}


def measure_digests(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds that one digest takes, from finding the cells to its value."""
    blocks = options.tokens // BLOCK_SIZE
    words = 2 * options.layers * 2 * blocks * PIECE_BYTES // 8
    on_gpu = options.device == "cuda"
    memory = MemoryKind.VRAM if on_gpu else MemoryKind.DRAM
    if on_gpu:
        import torch

        kept = torch.randint(-(1 << 62), 1 << 62, (words,), device="cuda")
        torch.cuda.synchronize()
        address = kept.data_ptr()
    else:
        kept = np.random.default_rng(1).integers(0, 1 << 63, words, np.uint64)
        address = kept.ctypes.data
    cache = describe(address, options.layers, 2 * blocks, memory)
    digester = digester_for(memory, 0, cache.regions)
    digester.warm_up({cache.geometry.cell_bytes})
    order = np.array(random.Random(options.seed).sample(range(2 * blocks), blocks), np.int64)
    share = Share(cache.geometry.layers, 0, NUM_HEADS, TokenSpan(0, blocks * BLOCK_SIZE))

    def take(integrity: Integrity, seed: int) -> tuple[float, int]:
        began = time.perf_counter()
        cells = cells_of(cache, BlockRun(order, 0), share, integrity, seed)
        loaded = digester.load(cells)
        sizes = [(each.side.num_pieces, each.side.piece_bytes) for each in cells]
        sums = [digester.start(loaded, part) for part in parcels(sizes, digester.part_bytes)]
        added([finished(each.value) for each in sums])
        return (time.perf_counter() - began) * 1e3, sum(each.side.num_bytes for each in cells)

    times: dict[str, list[float]] = {each.value: [] for each in CHECKED}
    sizes: dict[str, int] = {}
    for number in range(-1, options.rounds):
        for integrity in CHECKED:
            took, sizes[integrity.value] = take(integrity, number + 2)
            if number >= 0:
                times[integrity.value].append(took)
    digester.close()
    return {"digests_ms": times, "digest_bytes": sizes, "device": options.device}


def finished(value: Callable[[], int | None]) -> int:
    """A sum, when it is there."""
    while (found := value()) is None:
        pass
    return found


def spread(values: Sequence[float]) -> str:
    """Median, and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:8.2f} ({low:.2f} to {high:.2f})"


def show(result: dict[str, Any], num_bytes: int) -> None:
    """Print the tables: medians, and the middle half of all rounds."""
    print(f"{num_bytes / 1e6:.1f} MB a prompt; median (middle half) of the rounds")
    for mode, times in result.get("transfers_ms", {}).items():
        for name, values in times.items():
            ratios = [value / off for value, off in zip(values, times["off"], strict=True)]
            more = [value - off for value, off in zip(values, times["off"], strict=True)]
            print(
                f"{mode:5} {name:7} {spread(values)} ms   of off {spread(ratios)}   "
                f"more {spread(more)} ms"
            )
    for name, values in result.get("digests_ms", {}).items():
        size = result["digest_bytes"][name]
        rate = size / statistics.median(values) / 1e6
        print(f"{name:7} {size / 1e6:8.1f} MB  {spread(values)} ms  {rate:.1f} GB/s")


def main() -> int:
    """Run; prints tables and writes the numbers to a file if asked."""
    parser = argparse.ArgumentParser(prog="integrity.py", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--path", default="auto", choices=[each.value for each in PathPolicy])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--digests", action="store_true", help="Measure digests alone.")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.device == "cuda" and not options.digests:
        parser.error("--device cuda: expected --digests, for transfers between GPUs need two")
    result = measure_digests(options) if options.digests else measure_transfers(options)
    show(result, options.tokens // BLOCK_SIZE * PIECE_BYTES * 2 * options.layers)
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({"settings": settings, **result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
