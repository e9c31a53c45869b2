"""An endpoint pair in one process that moves real bytes between two engines' caches.

It reads and writes memory only through the `RankCache`s that the engines publish, cell by cell, so
it also checks those. Outcomes can be held back, failed and released one by one. `owned` follows
the rule of the contract: blocks belong to the endpoint from the hand-over until RELEASED.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcourier.core.params import HoldIntent, PullIntent, WantIntent
from kvcourier.ids import RequestId
from kvcourier.layout.geometry import CacheLayout, RankCache, TokenSpan
from kvcourier.runtime.reports import Outcome, Report

Bytes = npt.NDArray[np.uint8]


class CacheMemory:
    """Cells [block, token, head, byte] of every layer and plane, as numpy views of real memory."""

    def __init__(self, rank_caches: Sequence[RankCache]) -> None:
        self.block_size = rank_caches[0].geometries[0].block_size
        self._views: dict[tuple[int, int, int], list[Bytes]] = {}
        for cache in (rank.groups[0] for rank in rank_caches):
            geometry, placement = cache.geometry, cache.placement
            for row, layer in enumerate(geometry.layers):
                for plane in range(2):
                    region = cache.regions[placement.region[row, plane]]
                    memory = np.ctypeslib.as_array(
                        (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
                    )
                    is_nhd = geometry.cache_layout is CacheLayout.NHD
                    inner = (geometry.block_size, geometry.num_heads)
                    dims = (*(inner if is_nhd else inner[::-1]), geometry.cell_bytes)
                    start = int(placement.offset_bytes[row, plane])
                    assert placement.block_stride_bytes[row, plane] == np.prod(dims)
                    cells = memory[start : start + geometry.num_blocks * int(np.prod(dims))]
                    cells = cells.reshape(geometry.num_blocks, *dims)
                    if not is_nhd:
                        cells = cells.swapaxes(1, 2)
                    for head in range(geometry.num_heads):
                        key = (layer, plane, geometry.head_start + head)
                        self._views.setdefault(key, []).append(cells[:, :, head])

    @property
    def keys(self) -> set[tuple[int, int, int]]:
        return set(self._views)

    def copy_to(
        self,
        target: "CacheMemory",
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        span: TokenSpan,
    ) -> None:
        """Copy positions `span`; source blocks start at position 0, target ones at span.start."""
        assert self.keys == target.keys
        for key, sources in self._views.items():
            for replica in target._views[key]:
                for position in range(span.start, span.stop):
                    there = position - span.start
                    replica[
                        target_blocks[there // target.block_size], there % target.block_size
                    ] = sources[-1][
                        source_blocks[position // self.block_size], position % self.block_size
                    ]


@dataclass
class Hold:
    endpoint: "FakeEndpoint"
    request_id: RequestId
    blocks: list[int] | None = None
    num_tokens: int = 0
    continuation: str | None = None
    is_over: bool = False


@dataclass
class Want:
    endpoint: "FakeEndpoint"
    request_id: RequestId
    intent: WantIntent
    blocks: list[int] | None = None
    span: TokenSpan = field(default_factory=lambda: TokenSpan(0, 0))
    is_over: bool = False


class FakeWire:
    """Joins endpoints. `is_paused`: matched transfers wait for `flush` or `fail`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holds: dict[str, Hold] = {}
        self.wants: dict[str, Want] = {}
        self.is_paused = False
        self.num_moved_tokens = 0

    def flush(self) -> None:
        with self.lock:
            for key, want in list(self.wants.items()):
                hold = self.holds.get(key)
                if hold is None or hold.is_over or hold.blocks is None:
                    continue
                if want.is_over or want.blocks is None:
                    continue
                hold.endpoint.memory.copy_to(
                    want.endpoint.memory, hold.blocks, want.blocks, want.span
                )
                self.num_moved_tokens += len(want.span)
                self.end_want(key, Outcome.RECEIVED, continuation=hold.continuation)
                self.end_hold(key, Outcome.SENT)

    def fail(self, key: str, reason: str, *, release: bool = True) -> None:
        with self.lock:
            self.end_want(key, Outcome.RECEIVE_FAILED, reason, release=release)

    def end_want(
        self,
        key: str,
        outcome: Outcome | None,
        reason: str = "",
        *,
        release: bool = True,
        continuation: str | None = None,
    ) -> None:
        want = self.wants[key]
        want.is_over = True
        want.endpoint.report(want.request_id, outcome, reason, continuation)
        if release and want.blocks is not None:
            want.endpoint.release(want.request_id)

    def end_hold(self, key: str, outcome: Outcome | None) -> None:
        hold = self.holds[key]
        hold.is_over = True
        if hold.blocks is not None:
            hold.endpoint.report(hold.request_id, outcome)
            hold.endpoint.release(hold.request_id)


class FakeEndpoint:
    """One side; see `kvcourier.runtime.interface.Endpoint` for the contract."""

    def __init__(self, wire: FakeWire, rank_caches: Sequence[RankCache] | None = None) -> None:
        self._wire = wire
        self._reports: list[Report] = []
        self._on_report: Callable[[], None] = lambda: None
        self.memory: CacheMemory
        self.owned: dict[RequestId, list[int]] = {}
        self.calls: list[tuple[str, RequestId]] = []
        self.ready: list[Callable[[], bool]] = []
        self.advances: list[tuple[RequestId, int, tuple[int, ...] | None]] = []
        self.called = threading.Condition(wire.lock)
        self.is_closed = False
        self.failure: Exception | None = None
        if rank_caches is not None:
            self.memory = CacheMemory(rank_caches)

    def start(self, on_report: Callable[[], None]) -> None:
        self._on_report = on_report

    def close(self) -> None:
        self.is_closed = True

    def instance_info(self) -> dict[str, Any]:
        return {}

    def story(self, key: str) -> list[dict[str, Any]] | None:
        return None

    def begin_hold(self, request_id: RequestId, intent: HoldIntent) -> None:
        with self._wire.lock:
            self._note("begin_hold", request_id)
            self._wire.holds[self._key(request_id)] = Hold(self, request_id)

    def is_awaited(self, request_id: RequestId) -> bool:
        with self._wire.lock:
            return self._key(request_id) in self._wire.wants

    def advance_prefill(
        self,
        request_id: RequestId,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        layers: Sequence[int] | None = None,
        *,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        with self._wire.lock:
            assert request_id not in self.owned
            (blocks,) = block_ids
            assert len(blocks) == -(-num_tokens // self.memory.block_size)
            self.advances.append((request_id, num_tokens, layers and tuple(layers)))
            self._note("advance_prefill", request_id)
            if ready is not None:
                self.ready.append(ready)

    def roll_back(self, request_id: RequestId) -> None:
        with self._wire.lock:
            self._note("roll_back", request_id)

    def finish_prefill(
        self,
        request_id: RequestId,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        continuation: str | None = None,
    ) -> dict[str, Any]:
        with self._wire.lock:
            self._note("finish_prefill", request_id)
            hold = self._wire.holds[self._key(request_id)]
            (blocks,) = block_ids
            assert len(blocks) == -(-num_tokens // self.memory.block_size)
            hold.blocks, hold.num_tokens = list(blocks), num_tokens
            hold.continuation = continuation
            self.owned[request_id] = list(blocks)
            want = self._wire.wants.get(self._key(request_id))
            if want is not None and want.is_over:
                self._wire.end_hold(self._key(request_id), Outcome.SENT)
            elif not self._wire.is_paused:
                self._wire.flush()
            return {
                "do_remote_prefill": True,
                "remote_request_id": request_id,
                "remote_block_ids": [list(blocks)],
                "remote_num_tokens": num_tokens,
            }

    def expect(self, request_id: RequestId, intent: WantIntent) -> None:
        with self._wire.lock:
            self._note("expect", request_id)
            self._wire.wants[self._key(request_id)] = Want(self, request_id, intent)

    def receive(
        self, request_id: RequestId, block_ids: Sequence[Sequence[int]], span: TokenSpan
    ) -> None:
        with self._wire.lock:
            if self.failure is not None:
                raise self.failure
            self._note("receive", request_id)
            want = self._wire.wants[self._key(request_id)]
            (blocks,) = block_ids
            assert span.start % self.memory.block_size == 0
            assert len(blocks) * self.memory.block_size >= len(span) > 0
            if isinstance(want.intent, PullIntent):
                hold = self._wire.holds[self._key(request_id)]
                assert hold.blocks == list(want.intent.block_ids[0])
            want.blocks, want.span = list(blocks), span
            self.owned[request_id] = list(blocks)
            if not self._wire.is_paused:
                self._wire.flush()

    def recall(self, request_id: RequestId) -> None:
        with self._wire.lock:
            self._note("recall", request_id)
            want = self._wire.wants[self._key(request_id)]
            if not want.is_over and want.blocks is not None:
                want.blocks = None
                del self.owned[request_id]
                self.report(request_id, Outcome.RECALLED)

    def decline(self, request_id: RequestId) -> None:
        with self._wire.lock:
            self._note("decline", request_id)
            key = self._key(request_id)
            self._wire.wants[key].is_over = True
            if key in self._wire.holds and not self._wire.holds[key].is_over:
                self._wire.end_hold(key, Outcome.SENT)

    def abort(
        self, request_id: RequestId, block_ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        with self._wire.lock:
            self._note("abort", request_id)
            key = self._key(request_id)
            hold, want = self._wire.holds.get(key), self._wire.wants.get(key)
            if block_ids is not None:
                (blocks,) = block_ids
                self.owned[request_id] = list(blocks)
                if not self._wire.is_paused:
                    self.release(request_id)
            if hold is not None and hold.endpoint is self and not hold.is_over:
                self._wire.end_hold(key, None)
                if want is not None and not want.is_over:
                    self._wire.end_want(key, Outcome.RECEIVE_FAILED, "aborted by P")
            if want is not None and want.endpoint is self and not want.is_over:
                if want.blocks is None and hold is not None and not hold.is_over:
                    # Before it has blocks, an abort is a good-bye as well.
                    self._wire.end_hold(key, Outcome.SENT)
                # While the wire is paused, something may still be writing.
                self._wire.end_want(key, None, release=not self._wire.is_paused)

    def poll(self) -> list[Report]:
        with self._wire.lock:
            if self.failure is not None:
                raise self.failure
            reports, self._reports = self._reports, []
            return reports

    def report(
        self,
        request_id: RequestId,
        outcome: Outcome | None,
        reason: str = "",
        continuation: str | None = None,
    ) -> None:
        with self._wire.lock:
            if outcome is not None:
                told = Report(request_id, outcome, reason, continuation=continuation)
                self._reports.append(told)
                self._on_report()

    def release(self, request_id: RequestId) -> None:
        with self._wire.lock:
            if self.owned.pop(request_id, None) is not None:
                self.report(request_id, Outcome.RELEASED)

    def wait_for(self, call: str, request_id: str, timeout: float = 30.0) -> None:
        """Until the engine has made this call."""
        with self.called:
            assert self.called.wait_for(lambda: (call, request_id) in self.calls, timeout), (
                f"no {call}({request_id}) in {self.calls}"
            )

    def _note(self, call: str, request_id: RequestId) -> None:
        self.calls.append((call, request_id))
        self.called.notify_all()

    @staticmethod
    def _key(request_id: RequestId) -> str:
        """Request ids of tests are `p/<name>` and `d/<name>`; the name joins them."""
        return request_id.partition("/")[2]
