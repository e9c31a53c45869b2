"""How long the core takes for one event: two endpoints joined in memory, nothing is moved.

Each round is one request's whole life, by push (registered early, written when prefill ends) and
by pull (READ after prefill), both in every round in alternating order. Every event that either
endpoint handles is timed on its own, `Endpoint.handle` only: the clock is read right before and
after, and what carries commands across is left out. Times are of this machine, busy or not; the
aim is 50 us an event.

    python benchmarks/core_events.py --json core_events.json
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from collections import defaultdict, deque
from pathlib import Path

from kvcourier.config import Limits, Timing, TransferMode
from kvcourier.core.commands import (
    Command,
    Connect,
    PostRead,
    PostWrite,
    SendMessage,
    SendNotification,
    Tell,
)
from kvcourier.core.endpoint import Endpoint
from kvcourier.core.events import (
    BlocksReserved,
    Event,
    HoldBegun,
    MessageReceived,
    PeerConnected,
    PrefillFinished,
    TransferCompleted,
    TransferPosted,
    WantBegun,
)
from kvcourier.core.outcomes import Outcome
from kvcourier.core.params import HolderAddress, PullIntent, PushIntent, WantIntent
from kvcourier.ids import (
    BlockId,
    EngineId,
    HoldId,
    Incarnation,
    InstanceAddress,
    PeerRank,
    Rank,
    RequestId,
    TransferId,
    TransferKey,
)
from kvcourier.layout import CacheGeometry, CacheKind, CacheLayout, ModelCache, TokenSpan
from kvcourier.layout.shards import instance_geometries

TARGET_US = 50.0
RANK = Rank(0, 0)
P, D = "p", "d"
Samples = dict[str, list[float]]


class Pair:
    """A prefill and a decode endpoint of one rank each, and the wire between them."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometries = {RANK: (geometry,)}
        self.addresses = {
            side: InstanceAddress(EngineId(f"engine-{side}"), "127.0.0.1", 5600 + number)
            for number, side in enumerate((P, D))
        }
        self.endpoints = {
            side: Endpoint(self._me(side), address, self._geometries, Timing(), Limits())
            for side, address in self.addresses.items()
        }
        self._todo: deque[tuple[str, Event]] = deque()
        self.outcomes: list[tuple[str, Outcome]] = []
        self.samples: Samples = defaultdict(list)

    def _me(self, side: str) -> PeerRank:
        return PeerRank(self.addresses[side].engine_id, Incarnation(f"life-{side}"), RANK)

    def step(self, side: str, event: Event) -> None:
        """Let an endpoint take an event, and both all that follows from it."""
        self._todo.append((side, event))
        while self._todo:
            side, event = self._todo.popleft()
            endpoint, name = self.endpoints[side], _name(event)
            now = time.monotonic()
            started = time.perf_counter_ns()
            commands = endpoint.handle(event, now)
            self.samples[name].append((time.perf_counter_ns() - started) / 1e3)
            for command in commands:
                self._do(side, command)

    def _do(self, side: str, command: Command) -> None:
        other = D if side == P else P
        match command:
            case SendMessage(_, message) | SendNotification(_, _, message):
                self._todo.append((other, MessageReceived(message)))
            case Connect(address, _):
                connected = PeerConnected(
                    address, self._me(other).incarnation, frozenset(TransferMode), self._geometries
                )
                self._todo.append((side, connected))
            case PostWrite() | PostRead():
                done = command.operation_id
                self._todo.append((side, TransferPosted(done, 1, 1, 0.0, "benchmark")))
                self._todo.append((side, TransferCompleted(done)))
                if isinstance(command, PostWrite):
                    self._todo.append((other, MessageReceived(command.notice)))
            case Tell(report):
                self.outcomes.append((side, report.outcome))


def _name(event: Event) -> str:
    """What the table calls an event: its type, and for a message the message's."""
    if isinstance(event, MessageReceived):
        return f"{type(event).__name__}({type(event.message).__name__})"
    return type(event).__name__


class Lives:
    """Whole lives of requests, each checked to have ended well."""

    def __init__(self, pair: Pair, num_blocks: int, block_size: int) -> None:
        self._pair = pair
        self._blocks = (tuple(BlockId(block) for block in range(num_blocks)),)
        self._num_tokens = num_blocks * block_size
        self._serial = itertools.count(1)
        address = pair.addresses[P]
        self._num_waiting = 0
        self._holder = HolderAddress(address.engine_id, address.host, address.port, 1, 1)

    def push(self) -> None:
        """D registers while P computes, P writes."""
        key = self._new_key()
        intent = PushIntent(self._holder, None, key.transfer_id)
        self._hold(key)
        self._want(key, intent)
        self._finish(key)
        self._check()

    def leave_waiting(self, number: int) -> None:
        """Begin requests by push and leave them: both sides wait for their prefill to end."""
        for _ in range(number):
            key = self._new_key()
            self._hold(key)
            self._want(key, PushIntent(self._holder, None, key.transfer_id))
        self._num_waiting += number

    def pull(self) -> None:
        """P computes, D READs."""
        key = self._new_key()
        self._hold(key)
        self._finish(key)
        intent = PullIntent(
            holder=self._holder,
            holder_request_id=_held(key),
            block_ids=self._blocks,
            num_tokens=self._num_tokens,
            hold_id=HoldId(key.transfer_id),
            incarnation=Incarnation(f"life-{P}"),
            transfer_id=key.transfer_id,
        )
        self._want(key, intent)
        self._check()

    def _new_key(self) -> TransferKey:
        return TransferKey(TransferId(f"transfer-{next(self._serial)}"), 0)

    def _hold(self, key: TransferKey) -> None:
        self._pair.step(P, HoldBegun(_held(key), HoldId(key.transfer_id), key))

    def _finish(self, key: TransferKey) -> None:
        self._pair.step(P, PrefillFinished(_held(key), self._blocks, self._num_tokens))

    def _want(self, key: TransferKey, intent: WantIntent) -> None:
        request_id = RequestId(f"d-{key.transfer_id}")
        self._pair.step(D, WantBegun(request_id, intent))
        span = TokenSpan(0, self._num_tokens)
        self._pair.step(D, BlocksReserved(request_id, self._blocks, span))

    def _check(self) -> None:
        """A life that fails early would look fast."""
        expected = {
            (P, Outcome.SENT),
            (P, Outcome.RELEASED),
            (D, Outcome.RECEIVED),
            (D, Outcome.RELEASED),
        }
        found, self._pair.outcomes = self._pair.outcomes, []
        if len(found) != len(expected) or set(found) != expected:
            raise SystemExit(f"a transfer did not end well: {found}")
        gauges = {side: each.gauges() for side, each in self._pair.endpoints.items()}
        if not gauges[P]["holds"] == gauges[D]["wants"] == self._num_waiting:
            raise SystemExit(f"{self._num_waiting} should be waiting, found {gauges}")


def _held(key: TransferKey) -> RequestId:
    return RequestId(f"p-{key.transfer_id}")


def main() -> None:
    """Measure, print a table, and write the numbers to a file if asked."""
    options = _options()
    pairs = {mode: Pair(_geometry(options)) for mode in ("push", "pull")}
    lives = {mode: Lives(pair, options.blocks, options.block_size) for mode, pair in pairs.items()}
    runs = {mode: getattr(life, mode) for mode, life in lives.items()}
    for life in lives.values():
        life.leave_waiting(options.waiting)
    for run in runs.values():
        for _ in range(options.warm_up):
            run()
    for pair in pairs.values():
        pair.samples.clear()
    gc.collect()
    for turn in range(options.requests):
        for mode in sorted(runs, reverse=bool(turn % 2)):
            runs[mode]()
    results = {mode: _summaries(pair.samples) for mode, pair in pairs.items()}
    for mode, table in results.items():
        _print(mode, table, options.requests)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(
            json.dumps({"settings": settings, "target_us": TARGET_US, "results": results}, indent=2)
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="lives per mode, at least 30")
    parser.add_argument("--warm-up", type=int, default=200, help="lives before that, not timed")
    parser.add_argument(
        "--waiting", type=int, default=0, help="other requests that wait all the while"
    )
    parser.add_argument("--blocks", type=int, default=100, help="blocks of each request")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    if options.requests < 30:
        parser.error(f"--requests: expected at least 30, found {options.requests}")
    return options


def _geometry(options: argparse.Namespace) -> CacheGeometry:
    model = ModelCache(
        kind=CacheKind.KEY_VALUE,
        num_layers=28,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        itemsize=2,
        block_size=options.block_size,
        num_blocks=options.blocks,
        cache_layout=CacheLayout.NHD,
    )
    return instance_geometries(model, 1)[RANK]


def _summaries(samples: Samples) -> dict[str, dict[str, float]]:
    """Per event, and of all together under `all`; microseconds but for the rate and count."""
    every = [value for values in samples.values() for value in values]
    table = {name: _summary(values) for name, values in sorted(samples.items())}
    return table | {"all": _summary(every) | {"events_per_s": len(every) / sum(every) * 1e6}}


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "events": len(ordered),
        "mean_us": statistics.fmean(ordered),
        "median_us": statistics.median(ordered),
        "p99_us": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "max_us": ordered[-1],
    }


def _print(mode: str, table: dict[str, dict[str, float]], num_requests: int) -> None:
    print(f"\n{mode}: {num_requests} requests, microseconds an event")
    print(f"{'event':32} {'events':>8} {'mean':>8} {'median':>8} {'p99':>8} {'max':>9}")
    for name, row in table.items():
        print(
            f"{name:32} {row['events']:8d} {row['mean_us']:8.1f} {row['median_us']:8.1f} "
            f"{row['p99_us']:8.1f} {row['max_us']:9.1f}"
        )
    every = table["all"]
    verdict = "within" if every["mean_us"] <= TARGET_US else "ABOVE"
    print(
        f"{every['events_per_s']:,.0f} events a second; mean {every['mean_us']:.1f} us, "
        f"{verdict} the target of {TARGET_US:g} us"
    )


if __name__ == "__main__":
    main()
