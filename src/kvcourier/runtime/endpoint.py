"""One instance's endpoint: what an engine holds in its hand.

Decides how one call of the engine reaches every rank's courier and how their reports become one.
Refuses to know the engine, and everything the couriers and cores decide.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from kvcourier.config import EndpointConfig, Posting
from kvcourier.core import handshake, inquiry
from kvcourier.core.events import (
    BlocksRecalled,
    BlocksReserved,
    EngineEvent,
    HoldBegun,
    PrefillAdvanced,
    PrefillFinished,
    PrefillRolledBack,
    RequestAborted,
    WantBegun,
    WantDeclined,
    groups_of,
)
from kvcourier.core.outcomes import Outcome, Report
from kvcourier.core.params import (
    HolderAddress,
    HoldIntent,
    PullIntent,
    WantIntent,
    handoff_params,
    history_params,
)
from kvcourier.core.token_proof import TokenProof
from kvcourier.core.workspace import Counted
from kvcourier.errors import ParamsError, RemoteProtocolError
from kvcourier.ids import (
    HoldId,
    Rank,
    RequestId,
    TransferId,
    TransferKey,
    hold_id_of,
)
from kvcourier.layout.geometry import RankCache, TokenSpan
from kvcourier.runtime.about import about
from kvcourier.runtime.courier import Courier
from kvcourier.runtime.metrics import CoreCollector, CourierMetrics, Snapshot
from kvcourier.runtime.rank import TransportFactory, open_rank
from kvcourier.runtime.requests import RequestTable
from kvcourier.runtime.surroundings import MACHINE, Server, Surroundings

_log = logging.getLogger(__name__)
_LONGEST_POST_S = 60.0


class KvEndpoint:
    """Moves KV for one engine; implements `runtime.interface.Endpoint`.

    Args:
        config: identity, side channel, timing and limits.
        caches: the cache of every rank of the instance that lives in this process (all of them).
        transport_factory: makes a rank's transport, given the name of its agent.
        registry: where metrics go; a new one if None.
        posting: INLINE makes `finish_prefill` and `receive` wait until every rank has posted what
            they lead to.
        surroundings: time, sockets and threads.

    Raises:
        MappingError: the ranks are not a full pp x tp set.
    """

    def __init__(
        self,
        config: EndpointConfig,
        caches: Sequence[RankCache],
        transport_factory: TransportFactory,
        *,
        registry: CollectorRegistry | None = None,
        posting: Posting = Posting.THREAD,
        surroundings: Surroundings = MACHINE,
    ) -> None:
        self.config = config
        self.registry = registry or CollectorRegistry()
        self.incarnation = surroundings.new_incarnation()
        self._caches = {cache.rank: cache for cache in caches}
        self._about = about(config)
        self._tp_size, self._pp_size = handshake.topology([cache.rank for cache in caches])
        self._transport_factory = transport_factory
        self._posting = posting
        self._surroundings = surroundings
        self._metrics = CourierMetrics(self.registry)
        self.registry.register(CoreCollector(self.snapshots))
        self._couriers: dict[Rank, Courier] = {}
        self._server: Server | None = None
        self._requests = RequestTable(frozenset(self._caches), self._abandon, self._resume)
        self._reports: deque[Report] = deque()
        self._on_report: Callable[[], None] = lambda: None
        self._num_holds = 0
        self._computing: dict[RequestId, tuple[HoldId, TransferKey | None]] = {}
        self._lock = threading.Lock()
        self._closed = False

    # Life.

    def start(self, on_report: Callable[[], None]) -> None:
        """Open sockets, register memory, start the couriers; see runtime.interface.

        Raises:
            ConfigError: the side channel's port is taken, or the transport cannot be made.
            RegistrationFailed: memory could not be registered.
        """
        self._on_report = on_report
        config = self.config
        try:
            self._server = self._surroundings.open_server(
                config.side_channel_host,
                config.side_channel_port,
                self._answer,
                config.limits.max_message_bytes,
                config.keys,
            )
            geometries = {rank: cache.geometries for rank, cache in self._caches.items()}
            facts = handshake.facts_of(config.model, geometries, config.cache_format)
            offers = [self._open_rank(cache, self._server.port) for cache in self._caches.values()]
        except BaseException:
            self.close()
            raise
        self._offer = handshake.Offer(
            engine_id=config.engine_id,
            incarnation=self.incarnation,
            modes=sorted(config.modes),
            facts=facts,
            tp_size=self._tp_size,
            pp_size=self._pp_size,
            ranks=offers,
            digests=True,
        )
        for courier in self._couriers.values():
            self._surroundings.run(courier)
        self._server.start()

    def close(self) -> None:
        """Stop everything; see runtime.interface."""
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._server.close()
        for courier in self._couriers.values():
            courier.close()

    def instance_info(self) -> dict[str, Any]:
        """What a router must know of this instance; see runtime.interface."""
        host, port = self._side_channel_address()
        first = next(iter(self._caches.values())).geometries[0]
        return {
            "engine_id": self.config.engine_id,
            "incarnation": self.incarnation,
            "side_channel_host": host,
            "side_channel_port": port,
            "tp_size": self._tp_size,
            "pp_size": self._pp_size,
            "block_size": first.block_size,
            "modes": sorted(self.config.modes),
            "model": self.config.model,
        }

    # Holding (P).

    def begin_hold(self, request_id: RequestId, intent: HoldIntent) -> None:
        """A prompt that somebody wants was accepted; see runtime.interface.

        Raises:
            ParamsError: another request has this transfer id (a client-chosen id used twice
                crashed both schedulers in sglang#40125).
        """
        key = intent.key
        if not self._requests.begin(request_id, key):
            raise ParamsError("transfer_id", "an id that no running request has", key)
        with self._lock:
            self._num_holds += 1
            hold_id = hold_id_of(self.incarnation, self._num_holds)
            self._computing[request_id] = (hold_id, key)
        self._submit(HoldBegun(request_id, hold_id, key, intent.rebindable))

    def is_awaited(self, request_id: RequestId) -> bool:
        """Whether somebody has registered for this prompt; see runtime.interface."""
        return any(each.endpoint.is_awaited(request_id) for each in self._couriers.values())

    def advance_prefill(
        self,
        request_id: RequestId,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        layers: Sequence[int] | None = None,
        *,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """Some KV of a prompt is written; see runtime.interface."""
        groups = groups_of(block_ids)
        written = None if layers is None else tuple(layers)
        self._submit(PrefillAdvanced(request_id, groups, num_tokens, written), ready)

    def roll_back(self, request_id: RequestId) -> None:
        """A prompt is computed anew; see runtime.interface."""
        self._submit(PrefillRolledBack(request_id))

    def finish_prefill(
        self,
        request_id: RequestId,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        continuation: str | None = None,
    ) -> dict[str, Any]:
        """All KV of a prompt is written; see runtime.interface."""
        finished = PrefillFinished(request_id, groups_of(block_ids), num_tokens, continuation)
        return self._hand_over(finished)

    def keep_history(
        self,
        name: RequestId,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        keep_s: float,
        proof: TokenProof,
    ) -> dict[str, Any]:
        """Somebody may come for a conversation's KV; see runtime.interface."""
        self.begin_hold(name, HoldIntent(None))
        finished = PrefillFinished(name, groups_of(block_ids), num_tokens, keep_s=keep_s)
        return history_params(self._hand_over(finished), keep_s, proof)

    def _hand_over(self, finished: PrefillFinished) -> dict[str, Any]:
        request_id = finished.request_id
        self._requests.hand_over(request_id)
        self._submit_to_post(finished)
        host, port = self._side_channel_address()
        with self._lock:
            hold_id, key = self._computing.pop(request_id)
        if self._requests.finish(request_id):
            self.abort(request_id)
        holder = HolderAddress(self.config.engine_id, host, port, self._tp_size, self._pp_size)
        return handoff_params(
            holder,
            request_id,
            finished.block_ids,
            finished.num_tokens,
            hold_id,
            self.incarnation,
            self.config.modes,
            key,
            finished.continuation,
        )

    def let_go(self, transfer_id: TransferId) -> bool:
        """Nobody will collect a transfer's KV; see runtime.interface."""
        known, finished = self._requests.let_go(transfer_id)
        for request_id in finished:
            self.abort(request_id)
        return known

    # Wanting (D).

    def expect(self, request_id: RequestId, intent: WantIntent) -> None:
        """A request whose KV somebody holds was accepted; see runtime.interface.

        Raises:
            ParamsError: the holder has another number of cache groups.
        """
        expected = len(next(iter(self._caches.values())).groups)
        if isinstance(intent, PullIntent) and len(intent.block_ids) != expected:
            raise ParamsError(
                "remote_block_ids",
                f"a list for each of {expected} cache groups",
                f"{len(intent.block_ids)} lists",
            )
        self._requests.begin(request_id, None)
        self._submit(WantBegun(request_id, intent))

    def receive(
        self, request_id: RequestId, block_ids: Sequence[Sequence[int]], span: TokenSpan
    ) -> None:
        """Get the KV of `span` into these blocks; see runtime.interface."""
        reserved = BlocksReserved(request_id, groups_of(block_ids), span)
        self._requests.hand_over(request_id, reserved)
        self._submit_to_post(reserved)

    def recall(self, request_id: RequestId) -> None:
        """Its blocks are needed for another request; see runtime.interface."""
        self._submit(BlocksRecalled(request_id))

    def decline(self, request_id: RequestId) -> None:
        """Nothing is needed after all; see runtime.interface."""
        if self._requests.abort(request_id):
            self._submit(WantDeclined(request_id))

    def abort(
        self, request_id: RequestId, block_ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        """The request has ended early; see runtime.interface."""
        if self._requests.abort(request_id, keeps_blocks=block_ids is not None):
            with self._lock:
                self._computing.pop(request_id, None)
            groups = None if block_ids is None else groups_of(block_ids)
            self._submit(RequestAborted(request_id, groups))

    # Looking.

    def poll(self) -> list[Report]:
        """Take all reports so far; see runtime.interface.

        Raises:
            KVCourierError: a courier has died; nothing can be transferred any more.
        """
        for courier in self._couriers.values():
            courier.raise_if_dead()
        taken = []
        while self._reports:
            taken.append(self._reports.popleft())
        return taken

    def story(self, key: str) -> list[dict[str, Any]] | None:
        """What happened to a transfer; see runtime.interface."""
        entries = [each for courier in self._couriers.values() for each in courier.story(key)]
        return sorted(entries, key=lambda entry: entry["at_unix_s"]) or None

    def snapshots(self) -> dict[str, Snapshot]:
        """Counters and gauges of each rank, by the rank's name."""
        return {
            str(rank): (
                {name.value: courier.endpoint.counts.get(name, 0) for name in Counted},
                courier.gauges(),
            )
            for rank, courier in self._couriers.items()
        }

    # Inside.

    def _answer(self, payload: bytes) -> bytes:
        """On the handshake server's thread; raises RemoteProtocolError, and counts it."""
        try:
            return inquiry.answer(payload, self._offer, self._about)
        except RemoteProtocolError:
            self._metrics.dropped("malformed")
            raise

    def _open_rank(self, cache: RankCache, server_port: int) -> handshake.RankOffer:
        rank = cache.rank
        courier, offer = open_rank(
            self.config,
            self.incarnation,
            cache,
            {each.rank: each.geometries for each in self._caches.values()},
            self._transport_factory,
            server_port=server_port,
            observer=self._metrics,
            on_report=lambda report: self._on_rank_report(rank, report),
            on_death=lambda: self._on_report(),
            surroundings=self._surroundings,
        )
        self._couriers[rank] = courier
        return offer

    def _submit(self, event: EngineEvent, ready: Callable[[], bool] | None = None) -> None:
        for courier in self._couriers.values():
            courier.submit(event, ready)

    def _submit_to_post(self, event: EngineEvent) -> None:
        """Submit what may lead to transfers, and wait for these to be posted if that is wanted."""
        self._submit(event)
        if self._posting is Posting.INLINE:
            for handled in [courier.flush() for courier in self._couriers.values()]:
                if not handled.wait(_LONGEST_POST_S):
                    _log.warning("%s: not posted in %g s", event, _LONGEST_POST_S)

    def _abandon(self, request_id: RequestId) -> None:
        """One rank has failed: the others must not wait for what will not come."""
        self._submit(RequestAborted(request_id))

    def _resume(self, reserved: BlocksReserved, ranks: frozenset[Rank]) -> None:
        """Other ranks have received: so do these, in the blocks that they had given back."""
        for rank in ranks:
            self._couriers[rank].submit(reserved)

    def _on_rank_report(self, rank: Rank, report: Report) -> None:
        told = self._requests.report(rank, report)
        for each in told:
            if each.outcome is Outcome.HELD:
                continue
            self._metrics.outcomes.labels(each.outcome).inc()
            if each.outcome in (Outcome.RECEIVE_FAILED, Outcome.SEND_FAILED):
                _log.warning(
                    "%s %s: %s; story: %s",
                    each.request_id,
                    each.outcome,
                    each.reason,
                    self.story(each.request_id),
                )
        if told:
            self._reports.extend(told)
            self._on_report()

    def _side_channel_address(self) -> tuple[str, int]:
        port = self._server.port if self._server is not None else self.config.side_channel_port
        return self.config.side_channel_host, port
