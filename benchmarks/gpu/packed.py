"""A fragmented prompt on its way from one GPU to another: direct, packed, and as a plain copy.

Two processes a variant, each with a cache on its own GPU and kvcourier's whole stack around it:
couriers, side channel, NIXL. Every block of the prompt is somewhere else on both sides. All
variants run at the same time and take turns, so that what the machine does meanwhile hits all
alike. A time is from "the prompt's KV is written" on P to "received" on D, on the one clock that
processes of a host share; the bytes are compared each time.

    python3 benchmarks/gpu/packed.py                 # two GPUs: 16k tokens of Qwen3-0.6B
    python3 benchmarks/gpu/packed.py --device cpu --tokens 1024
"""

import argparse
import contextlib
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvcourier.config import (
    MIB,
    CourierConfig,
    EndpointConfig,
    Limits,
    PathPolicy,
    StagingConfig,
)
from kvcourier.core.params import parse_params
from kvcourier.ids import EngineId, Rank, RequestId
from kvcourier.layout import (
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    MemoryKind,
    RankCache,
    Region,
    TokenSpan,
)
from kvcourier.runtime.endpoint import KvEndpoint
from kvcourier.runtime.reports import Outcome
from kvcourier.transport.nixl import nixl_factory

DEFAULT_OUT = Path(__file__).with_name("results") / "packed.json"
BLOCK_SIZE, NUM_HEADS, HEAD_DIM, NUM_LAYERS = 16, 8, 128, 28
PIECE_BYTES = BLOCK_SIZE * NUM_HEADS * HEAD_DIM * 2
ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of moving; a pair of processes."""

    name: str
    path: PathPolicy
    num_threads: int


VARIANTS = (
    Variant("direct_1thread", PathPolicy.DIRECT, 1),
    Variant("direct_4threads", PathPolicy.DIRECT, 4),
    Variant("packed", PathPolicy.PACKED, 4),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What both sides of a variant have in common."""

    device: str
    num_blocks: int
    staging_mib: int
    slot_mib: int


class Side:
    """One instance: a cache without an engine, and its endpoint. Lives in its own process."""

    def __init__(self, setup: Setup, variant: Variant, name: str, gpu: int) -> None:
        import torch

        self._torch = torch
        on_gpu = setup.device == "cuda"
        self._device = torch.device("cuda", gpu) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self._device)
        shape = (NUM_LAYERS, 2, setup.num_blocks, PIECE_BYTES // 8)
        generator = torch.Generator(self._device).manual_seed(gpu)
        self._cache = torch.randint(
            -(1 << 62), 1 << 62, shape, generator=generator, device=self._device
        )
        self._sum_weights = torch.arange(
            1, PIECE_BYTES // 8 + 1, device=self._device, dtype=torch.int64
        )
        staging = StagingConfig(
            path=variant.path,
            send_bytes=setup.staging_mib * MIB if name == "p" else 0,
            receive_bytes=setup.staging_mib * MIB if name == "d" else 0,
            slot_bytes=setup.slot_mib * MIB,
        )
        config = EndpointConfig(
            EngineId(name),
            "benchmark",
            side_channel_host="127.0.0.1",
            side_channel_port=0,
            courier=CourierConfig(
                num_threads=variant.num_threads,
                poll_stream_s=0.0 if on_gpu else CourierConfig().poll_stream_s,
                staging=staging,
            ),
        )
        self._endpoint = KvEndpoint(
            config, [self._describe(on_gpu, gpu)], nixl_factory(config.courier)
        )
        self._reported_at = 0.0
        self._endpoint.start(self._on_report)

    def _on_report(self) -> None:
        self._reported_at = time.monotonic()

    def _describe(self, on_gpu: bool, gpu: int) -> RankCache:
        plane = self._cache.stride(1) * 8
        offsets = np.arange(2 * NUM_LAYERS, dtype=np.int64).reshape(NUM_LAYERS, 2) * plane
        geometry = CacheGeometry(
            kind=CacheKind.KEY_VALUE,
            layers=tuple(range(NUM_LAYERS)),
            num_kv_heads=NUM_HEADS,
            head_start=0,
            head_stop=NUM_HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
            itemsize=2,
            block_size=BLOCK_SIZE,
            num_blocks=self._cache.shape[2],
            cache_layout=CacheLayout.NHD,
        )
        region = Region(
            self._cache.data_ptr(),
            self._cache.numel() * 8,
            MemoryKind.VRAM if on_gpu else MemoryKind.DRAM,
            gpu if on_gpu else 0,
        )
        strides = np.full((NUM_LAYERS, 2), PIECE_BYTES, np.int64)
        placement = CachePlacement(np.zeros((NUM_LAYERS, 2), np.int64), offsets, strides)
        return RankCache((GroupCache(Rank(0, 0), geometry, placement, (region,)),))

    def coordinates(self) -> dict[str, Any]:
        """What a router would tell D of us."""
        info = self._endpoint.instance_info()
        return {
            "do_remote_prefill": True,
            "remote_engine_id": info["engine_id"],
            "remote_host": info["side_channel_host"],
            "remote_port": info["side_channel_port"],
        }

    def hold(self, name: str) -> None:
        """Accept a prompt that somebody wants."""
        params = {"do_remote_decode": True, "transfer_id": name}
        self._endpoint.begin_hold(RequestId(name), parse_params(params, Limits()))  # type: ignore[arg-type]

    def receive(self, name: str, coordinates: dict[str, Any], blocks: Sequence[int]) -> None:
        """Reserve blocks and register them; returns when P has the registration."""
        params = parse_params({**coordinates, "transfer_id": name}, Limits())
        self._endpoint.expect(RequestId(name), params)  # type: ignore[arg-type]
        span = TokenSpan(0, len(blocks) * BLOCK_SIZE)
        self._endpoint.receive(RequestId(name), [blocks], span)
        self._until(lambda: self._has(name, "registered"))

    def finish(self, name: str, blocks: Sequence[int]) -> float:
        """The prompt is computed: when that was."""
        began = time.monotonic()
        self._endpoint.finish_prefill(RequestId(name), [blocks], len(blocks) * BLOCK_SIZE)
        return began

    def wait(self, name: str, outcome: str) -> float:
        """Until an outcome is reported: when that was."""
        found: list[float] = []

        def seen() -> bool:
            for report in self._endpoint.poll():
                assert report.outcome is not Outcome.RECEIVE_FAILED, report
                if report.request_id == name and report.outcome == outcome:
                    found.append(self._reported_at)
            return bool(found)

        self._until(seen)
        return found[0]

    def sums(self, blocks: Sequence[int]) -> list[int]:
        """A checksum of each block over all layers."""
        picked = self._cache[:, :, self._torch.tensor(blocks, device=self._device)]
        return (picked * self._sum_weights).sum(dim=(0, 1, 3)).tolist()  # type: ignore[no-any-return]

    def post_ms(self, name: str) -> dict[str, float]:
        """How long posting took and how many pieces it were."""
        story = self._endpoint.story(name) or []
        posted = next(entry for entry in story if entry["what"] == "posted")
        return {"post_ms": posted["post_s"] * 1e3, "pieces": posted["pieces"]}

    def posting_seconds(self) -> float:
        """All seconds so far in which the courier was busy posting."""
        return float(
            self._endpoint.registry.get_sample_value(
                "kvcourier_post_seconds_sum", {"operation": "WRITE"}
            )
            or 0.0
        )

    def close(self) -> None:
        """Stop everything."""
        self._endpoint.close()

    def _has(self, name: str, what: str) -> bool:
        return any(entry["what"] == what for entry in self._endpoint.story(name) or ())

    def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("nothing happened")
            time.sleep(0.0005)


def serve(pipe: Connection, *arguments: Any) -> None:
    """A side's process: does what it is told until the pipe closes."""
    side = Side(*arguments)
    pipe.send(("ready", None))
    with contextlib.suppress(EOFError):
        while True:
            method, given = pipe.recv()
            try:
                pipe.send(("done", getattr(side, method)(*given)))
            except Exception as error:
                pipe.send(("failed", repr(error)))
    side.close()


class Remote:
    """A side in another process."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        """Until it serves."""
        self._answer()

    def __call__(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError("a process does not answer")
        status, value = self._pipe.recv()
        if status == "failed":
            raise RuntimeError(value)
        return value

    def stop(self) -> None:
        """Let it end; bounded."""
        self._pipe.close()
        self.process.join(10)
        self.process.kill()


@contextlib.contextmanager
def pairs(setup: Setup) -> Iterator[dict[str, tuple[Remote, Remote]]]:
    """The processes of all variants."""
    running: dict[str, tuple[Remote, Remote]] = {}
    try:
        for variant in VARIANTS:
            running[variant.name] = (
                Remote(setup, variant, "p", 0),
                Remote(setup, variant, "d", 1),
            )
        for sides in running.values():
            for side in sides:
                side.ready()
        yield running
    finally:
        for sides in running.values():
            for side in sides:
                side.stop()


def transfer(p: Remote, d: Remote, name: str, own: list[int], peer: list[int]) -> dict[str, float]:
    """Move one prompt and compare it."""
    p("hold", name)
    d("receive", name, p("coordinates"), peer)
    busy_before = p("posting_seconds")
    began = p("finish", name, own)
    ended = d("wait", name, "received")
    p("wait", name, "released")
    figures = {"ms": (ended - began) * 1e3, **p("post_ms", name)}
    figures["busy_ms"] = (p("posting_seconds") - busy_before) * 1e3
    if p("sums", own) != d("sums", peer):
        raise RuntimeError(f"{name}: the bytes differ")
    return figures


def peer_copy_ms(device: str, num_bytes: int) -> float:
    """A plain copy of so many consecutive bytes from one device to the other."""
    import torch

    on_gpu = device == "cuda"
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0" if on_gpu else "cpu")
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1" if on_gpu else "cpu")
    target.copy_(source)
    if on_gpu:
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
    began = time.perf_counter()
    target.copy_(source)
    if on_gpu:
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
    return (time.perf_counter() - began) * 1e3


def main() -> int:
    """Run; prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(prog="packed.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--staging-mib", type=int, default=512)
    parser.add_argument("--slot-mib", type=int, default=128)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="FILE")
    given = parser.parse_args()
    blocks = given.tokens // BLOCK_SIZE
    setup = Setup(given.device, 2 * blocks, given.staging_mib, given.slot_mib)
    num_bytes = blocks * PIECE_BYTES * 2 * NUM_LAYERS
    chance = random.Random(given.seed)
    found: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in VARIANTS}
    copies = []
    with pairs(setup) as running:
        for number in range(given.rounds + 1):
            copies.append(peer_copy_ms(given.device, num_bytes))
            for name, (p, d) in running.items():
                own, peer = (chance.sample(range(2 * blocks), blocks) for _ in range(2))
                figures = transfer(p, d, f"{name}-{number}", own, peer)
                print(f"round {number} {name}: {figures}", flush=True)
                # The first connects, compiles and measures.
                if number:
                    found[name].append(figures)

    def median(name: str, key: str) -> float:
        return round(statistics.median(each[key] for each in found[name]), 3)

    result = {
        "direct_1thread_ms": median("direct_1thread", "ms"),
        "direct_4threads_ms": median("direct_4threads", "ms"),
        "packed_ms": median("packed", "ms"),
        "packed_post_ms": median("packed", "busy_ms"),
        "peer_copy_ms": round(statistics.median(copies), 3),
        "bytes": num_bytes,
        "pieces": blocks * 2 * NUM_LAYERS,
        "rounds": given.rounds,
        "device": given.device,
        "staging_mib": given.staging_mib,
        "slot_mib": given.slot_mib,
        "all_ms": {name: [round(each["ms"], 3) for each in rows] for name, rows in found.items()},
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    ratio = result["direct_1thread_ms"] / result["packed_ms"]
    print(f"packed is {ratio:.1f} times as fast as direct with one thread")
    return 0


if __name__ == "__main__":
    sys.exit(main())
