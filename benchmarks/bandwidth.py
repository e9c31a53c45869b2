"""Bandwidth, posting cost and notification latency of NIXL between two processes, in CPU memory.

Decides what is measured and how: interleaved rounds, medians, spread, bytes checked before any
number counts. Refuses to know anything of KV caches; pieces are just pieces.

    python benchmarks/bandwidth.py --json bandwidth.json
    UCX_TLS=tcp python benchmarks/bandwidth.py --sections bandwidth progress

Sections: `bandwidth` (one big piece; scattered pieces; the same pieces in consecutive order, which
NIXL merges), `notifications` (round trip of a small one), `progress` (does an operation end while
its target polls nothing?).
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcourier.ids import AgentName
from kvcourier.layout.geometry import Int64Array, MemoryKind, Region
from kvcourier.transport.interface import (
    Descriptors,
    Operation,
    Selection,
    Side,
    TransferState,
)
from kvcourier.transport.nixl import NixlTransport

_KIB, _MIB = 1 << 10, 1 << 20
_TARGET = AgentName("target")
_LIMIT_S = 60.0
_SEEDS = {"initiator": 1, "target": 2, "order": 3}


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time: `num_pieces` of `piece_bytes`, in some order, posted in some form."""

    operation: Operation
    order: str
    form: str
    piece_bytes: int
    num_pieces: int

    @property
    def label(self) -> str:
        size = f"{self.num_pieces:6d} x {self.piece_bytes // _KIB:6d} KiB"
        return f"{self.operation:5s} {size} {self.order:11s} {self.form:11s}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds until `post` returned, and until the operation was seen to have ended."""

    post_s: float
    total_s: float


@dataclass(slots=True)
class Bench:
    """The initiator's end: its transport and memory, and the pipe to the target process."""

    transport: NixlTransport
    memory: npt.NDArray[np.uint8]
    target_address: int
    pipe: Connection

    def set_target_pause(self, pause_s: float | None) -> None:
        """Let the target poll every `pause_s` seconds (0: hot), or never (None)."""
        self.pipe.send(pause_s)
        self.pipe.recv()

    def sides(self, case: Case) -> tuple[Side, Side]:
        """Local and remote side of a case, prepared where its form asks for it."""
        count, rng = case.num_pieces, np.random.default_rng(_SEEDS["order"])
        orders = [rng.permutation(count), rng.permutation(count)]
        if case.order == "consecutive":
            orders = [np.arange(count), np.arange(count)]
        sides: list[Side] = []
        owners = [(self.memory.ctypes.data, None), (self.target_address, _TARGET)]
        for (base, agent), order in zip(owners, orders, strict=True):
            if case.form == "descriptors":
                sides.append(Descriptors(_table(base, order, case.piece_bytes), MemoryKind.DRAM))
                continue
            every = Descriptors(_table(base, np.arange(count), case.piece_bytes), MemoryKind.DRAM)
            list_id = self.transport.prepare(every, agent)
            sides.append(Selection(list_id, order.astype(np.int32)))
        return sides[0], sides[1]

    def move(self, operation: Operation, sides: tuple[Side, Side]) -> Sample:
        """Post once and poll until the end; exits the program if that does not come."""
        start = time.perf_counter()
        handle = self.transport.post(operation, _TARGET, local=sides[0], remote=sides[1])
        posted = time.perf_counter()
        while (status := self.transport.poll(handle)).state is TransferState.IN_FLIGHT:
            if time.perf_counter() - posted > _LIMIT_S:
                sys.exit(f"{operation} did not end within {_LIMIT_S:g} s")
        ended = time.perf_counter()
        self.transport.release(handle)
        if status.state is TransferState.FAILED:
            sys.exit(f"{operation} failed: {status.reason}")
        return Sample(posted - start, ended - start)

    def check(self, sides: tuple[Side, Side], size: int) -> None:
        """WRITE our pattern, READ it back into cleared memory, compare."""
        pattern = self.memory[:size].copy()
        self.move(Operation.WRITE, sides)
        self.memory[:size] = 0
        self.move(Operation.READ, sides)
        if not np.array_equal(self.memory[:size], pattern):
            sys.exit("bytes written and read back differ from what was sent")


def _table(base: int, order: npt.NDArray[np.int64], piece_bytes: int) -> Int64Array:
    table = np.zeros((len(order), 3), dtype=np.int64)
    table[:, 0] = base + order * piece_bytes
    table[:, 1] = piece_bytes
    return table


def _run_target(pipe: Connection, size: int, num_threads: int) -> None:
    memory = np.random.default_rng(_SEEDS["target"]).integers(0, 256, size, dtype=np.uint8)
    transport = NixlTransport(_TARGET, num_threads=num_threads)
    transport.register([Region(int(memory.ctypes.data), size, MemoryKind.DRAM, 0)])
    pipe.send((transport.agent_metadata(), int(memory.ctypes.data)))
    transport.connect(pipe.recv())
    pipe.send("ready")
    pause_s: float | None = 0.0005
    while True:
        if pause_s is None or pipe.poll(pause_s):
            try:
                pause_s = pipe.recv()
            except EOFError:
                break
            pipe.send("set")
        if pause_s is not None:
            for notification in transport.notifications():
                transport.notify(notification.sender, notification.payload)
    transport.close()


@contextmanager
def _bench(size: int, num_threads: int) -> Iterator[Bench]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_target, args=(theirs, size, num_threads), daemon=True)
    process.start()
    theirs.close()
    transport = NixlTransport("initiator", num_threads=num_threads)
    memory = np.random.default_rng(_SEEDS["initiator"]).integers(0, 256, size, dtype=np.uint8)
    transport.register([Region(int(memory.ctypes.data), size, MemoryKind.DRAM, 0)])
    if not ours.poll(_LIMIT_S):
        sys.exit("the target process did not start")
    metadata, address = ours.recv()
    transport.connect(metadata)
    ours.send(transport.agent_metadata())
    ours.recv()
    try:
        yield Bench(transport, memory, address, ours)
    finally:
        ours.close()
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
        transport.close()


def measure_bandwidth(bench: Bench, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every case once per round, so that drift of the machine hits all alike."""
    bench.set_target_pause(arguments.target_pause_ms / 1e3)
    big, total = arguments.big_mib * _MIB, arguments.scattered_mib * _MIB
    cases = [Case(op, "one", "descriptors", big, 1) for op in Operation]
    cases += [
        Case(op, order, form, kib * _KIB, total // (kib * _KIB))
        for kib, op, order, form in itertools.product(
            arguments.piece_kib,
            Operation,
            ("scattered", "consecutive"),
            ("descriptors", "selections"),
        )
    ]
    sides = {case: bench.sides(case) for case in cases}
    for case in cases:
        bench.check(sides[case], case.piece_bytes * case.num_pieces)
    samples: dict[Case, list[Sample]] = {case: [] for case in cases}
    for number in range(arguments.rounds):
        print(f"bandwidth: round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
        for case in cases:
            samples[case].append(bench.move(case.operation, sides[case]))
    return [_summary(case, taken) for case, taken in samples.items()]


def _summary(case: Case, samples: list[Sample]) -> dict[str, Any]:
    post_s = statistics.median(s.post_s for s in samples)
    totals = sorted(s.total_s for s in samples)
    total_s = statistics.median(totals)
    size = case.piece_bytes * case.num_pieces
    return {
        **asdict(case),
        "label": case.label,
        "bytes": size,
        "post_ms": post_s * 1e3,
        "total_ms": total_s * 1e3,
        "gb_per_s": size / total_s / 1e9,
        "post_us_per_piece": post_s * 1e6 / case.num_pieces,
        "total_us_per_piece": total_s * 1e6 / case.num_pieces,
        "spread": (totals[-1] - totals[0]) / total_s,
    }


def ratios(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much longer scattered pieces take than the same pieces in consecutive order."""
    key = ("operation", "form", "piece_bytes")
    merged = {tuple(c[k] for k in key): c for c in cases if c["order"] == "consecutive"}
    return [
        {k: case[k] for k in key}
        | {
            "scattered_over_merged": case["total_ms"]
            / merged[tuple(case[k] for k in key)]["total_ms"]
        }
        for case in cases
        if case["order"] == "scattered"
    ]


def measure_notifications(bench: Bench, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Round trip of a small notification, both sides polling with the same pause."""
    results = []
    for pause_s in (0.0, 0.0005):
        bench.set_target_pause(pause_s)
        trips = sorted(_round_trip(bench, pause_s) for _ in range(arguments.round_trips))
        results.append(
            {
                "pause_ms": pause_s * 1e3,
                "median_us": statistics.median(trips) * 1e6,
                "p95_us": trips[int(len(trips) * 0.95)] * 1e6,
            }
        )
    return results


def _round_trip(bench: Bench, pause_s: float) -> float:
    start = time.perf_counter()
    bench.transport.notify(_TARGET, b"x" * 64)
    while not bench.transport.notifications():
        if time.perf_counter() - start > _LIMIT_S:
            sys.exit("no answer to a notification")
        if pause_s:
            time.sleep(pause_s)
    return time.perf_counter() - start


def measure_progress(bench: Bench, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Whether an operation ends while its target polls nothing, and how soon after it does."""
    results = []
    count = arguments.scattered_mib * _MIB // (32 * _KIB)
    for operation in (*Operation, *Operation):  # twice: the first may find the wire unsettled
        for case in (
            Case(operation, "one", "descriptors", arguments.scattered_mib * _MIB, 1),
            Case(operation, "scattered", "descriptors", 32 * _KIB, count),
        ):
            bench.set_target_pause(None)
            local, remote = bench.sides(case)
            start = time.perf_counter()
            handle = bench.transport.post(operation, _TARGET, local=local, remote=remote)
            alone_s = _ended_within(bench, handle, start, arguments.patience_s)
            bench.set_target_pause(0.0005)
            woken_s = _ended_within(bench, handle, time.perf_counter(), _LIMIT_S)
            bench.transport.release(handle)
            results.append(
                {"label": case.label, "ended_alone": alone_s is not None}
                | {"alone_ms": alone_s and alone_s * 1e3}
                | {"after_target_polls_ms": None if alone_s or woken_s is None else woken_s * 1e3}
            )
    return results


def _ended_within(bench: Bench, handle: Any, start: float, limit_s: float) -> float | None:
    while bench.transport.poll(handle).state is TransferState.IN_FLIGHT:
        if time.perf_counter() - start > limit_s:
            return None
    return time.perf_counter() - start


def _print_report(report: dict[str, Any]) -> None:
    for case in report.get("bandwidth", []):
        print(
            f"{case['label']} post {case['post_ms']:8.2f} ms  total {case['total_ms']:8.2f} ms  "
            f"{case['gb_per_s']:6.2f} GB/s  {case['total_us_per_piece']:9.2f} us/piece "
            f"({case['post_us_per_piece']:.2f} in post)  spread {case['spread']:.0%}"
        )
    for ratio in report.get("ratios", []):
        print(
            f"{ratio['operation']:5s} {ratio['piece_bytes'] // _KIB:3d} KiB {ratio['form']:11s} "
            f"scattered takes {ratio['scattered_over_merged']:.1f}x as long as merged"
        )
    for trip in report.get("notifications", []):
        print(
            f"notification round trip, both polling every {trip['pause_ms']:g} ms: "
            f"median {trip['median_us']:.0f} us, p95 {trip['p95_us']:.0f} us"
        )
    for row in report.get("progress", []):
        if row["ended_alone"]:
            end = f"ends alone in {row['alone_ms']:.1f} ms"
        else:
            end = f"waits; ends {row['after_target_polls_ms']:.1f} ms after the target polls again"
        print(f"{row['label']} target not polling: {end}")


_SECTIONS = {
    "bandwidth": measure_bandwidth,
    "notifications": measure_notifications,
    "progress": measure_progress,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=_SECTIONS, default=list(_SECTIONS))
    parser.add_argument("--rounds", type=int, default=7, help="times each case is measured")
    parser.add_argument("--big-mib", type=int, default=256, help="size of the one big piece")
    parser.add_argument("--scattered-mib", type=int, default=32, help="bytes of a scattered case")
    parser.add_argument("--piece-kib", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--round-trips", type=int, default=200, help="notifications to time")
    parser.add_argument("--patience-s", type=float, default=1.0, help="wait for a silent target")
    parser.add_argument(
        "--target-pause-ms",
        type=float,
        default=0.5,
        help="pause between the target's polls in `bandwidth`; 0 polls hot",
    )
    parser.add_argument("--num-threads", type=int, default=0, help="UCX threads on both sides")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.big_mib, arguments.scattered_mib, *arguments.piece_kib) < 1:
        parser.error("rounds and sizes: expected numbers of 1 or more")
    return arguments


def main() -> None:
    arguments = _arguments()
    size = max(arguments.big_mib, arguments.scattered_mib) * _MIB
    settings = {k: v for k, v in vars(arguments).items() if k != "json"}
    report: dict[str, Any] = {"settings": settings, "ucx_tls": os.environ.get("UCX_TLS", "")}
    with _bench(size, arguments.num_threads) as bench:
        for section in arguments.sections:
            print(f"{section}: started", file=sys.stderr, flush=True)
            report[section] = _SECTIONS[section](bench, arguments)
    if "bandwidth" in report:
        report["ratios"] = ratios(report["bandwidth"])
    _print_report(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
