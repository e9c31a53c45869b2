"""One worker's part: the rank's courier, and what it has to tell vLLM.

Decides which report means which of vLLM's results. Refuses to know requests beyond their ids:
the scheduler's calls come to the courier by themselves (`runtime.engine_link`).

vLLM frees or uses a request's blocks as soon as it is named in `finished_recving`, so a request
is named there when its blocks are released, never while a write may still be in flight.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)

from kvcourier.config import Granularity
from kvcourier.core.events import PrefillAdvanced, PrefillRolledBack
from kvcourier.core.handshake import Facts, RankOffer, facts_of
from kvcourier.core.histories import Miss
from kvcourier.ids import Rank, RequestId, owner_of
from kvcourier.runtime.courier import Courier
from kvcourier.runtime.engine_link import EngineToken, new_token
from kvcourier.runtime.layer_pace import LEAST_BYTES, LayerPace
from kvcourier.runtime.rank import open_rank
from kvcourier.runtime.reports import Outcome, Report, Side
from kvcourier.runtime.step_clock import step_clock
from kvcourier.tracing.otel import open_tracing
from kvcourier.transport.nixl import nixl_factory
from kvcourier.vllm_connector.block_tables import BlockTable
from kvcourier.vllm_connector.caches import WorkerCache, all_ranks, layer_number
from kvcourier.vllm_connector.progress import Progress, StepNews
from kvcourier.vllm_connector.settings import ConnectorSettings
from kvcourier.vllm_connector.stats import CourierStats, StatsRecorder
from kvcourier.vllm_connector.traces import Traced, WorkerTraces
from kvcourier.vllm_connector.turns import miss_key
from kvcourier.vllm_connector.versions import TransferResults

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerOffer(KVConnectorHandshakeMetadata):
    """What a worker tells its scheduler: its rank's offer, how vLLM names the blocks of its cache
    groups, and how to call its courier."""

    offer: RankOffer
    tables: tuple[BlockTable, ...]
    facts: Facts
    host: str
    port: int
    token: EngineToken


@dataclass(frozen=True)
class WorkerNews(KVConnectorWorkerMetadata):
    """What a worker tells its scheduler with a step's results.

    Attributes:
        held: requests that wait for nothing but blocks.
    """

    held: frozenset[RequestId]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerNews":
        """What two workers tell: P finishes a prompt on all its ranks at once."""
        assert isinstance(other, WorkerNews), "the workers are all ours"
        return WorkerNews(self.held | other.held)


class WorkerSide:
    """Owns a rank's courier."""

    def __init__(self, settings: ConnectorSettings, found: WorkerCache, cache_format: str) -> None:
        self._tables = found.tables
        self._reports: deque[Report] = deque()
        self._held: set[RequestId] = set()
        self._failed: set[RequestId] = set()
        self._failed_blocks: set[int] = set()
        self._stats = StatsRecorder(str(found.cache.rank))
        self._cache_bytes = sum(region.size_bytes for region in found.cache.regions)
        self._is_first = found.cache.rank == Rank(0, 0)
        self._log_stories = settings.log_stories
        self._by_layer = settings.granularity is Granularity.LAYER
        self._progress: tuple[Progress, ...] = ()
        self._layers_seen = False
        memory = found.cache.regions[0].memory
        self._pace = LayerPace(found.cache.geometries, LEAST_BYTES[memory])
        self._clock = step_clock(memory)
        tracing = open_tracing("kvcourier-vllm")
        self._traces = None if tracing is None else WorkerTraces(tracing, self._story)
        token = new_token()
        config = replace(settings.endpoint, cache_format=cache_format)
        geometries = all_ranks(found.cache.geometries, settings.tp_size)
        self._courier: Courier
        self._courier, offer = open_rank(
            config,
            settings.incarnation,
            found.cache,
            geometries,
            nixl_factory(config.courier),
            server_port=config.side_channel_port,
            observer=self._stats,
            on_report=self._on_report,
            on_death=lambda: None,
            engine_token=token,
        )
        self.offer = WorkerOffer(
            offer,
            found.tables,
            facts_of(config.model, geometries, cache_format),
            config.side_channel_host,
            offer.side_channel_port,
            token,
        )
        self._courier.start()

    # Steps.

    def begin_step(self, news: StepNews, traced: tuple[Traced, ...] = ()) -> None:
        """A step's kernels are about to be launched."""
        if self._traces is not None and traced:
            self._traces.follow(traced)
        for request_id in news.rolled_back:
            self._courier.submit(PrefillRolledBack(request_id))
        self._progress = news.progress
        self._layers_seen = False
        self._pace.begin()

    def end_layer(self, layer_name: str) -> None:
        """The kernels that write one layer's KV of this step were launched."""
        last = [each for each in self._progress if each.is_last]
        if not last or not self._by_layer:
            return
        self._layers_seen = True
        layers = self._pace.after(layer_number(layer_name), [each.num_tokens for each in last])
        if layers:
            self._tell(last, layers)

    def end_step(self) -> None:
        """All kernels of this step were launched."""
        told, self._progress = self._progress, ()
        if not told:
            return
        self._tell(told, None)
        if self._by_layer and not self._layers_seen and any(each.is_last for each in told):
            self._by_layer = False
            _log.warning(
                "vLLM calls no hook per layer in this configuration (full CUDA graphs?): KV is "
                "sent per chunk; set granularity to chunk to silence this"
            )

    def _tell(self, progress: Sequence[Progress], layers: tuple[int, ...] | None) -> None:
        """Tell of what somebody waits for; of all else the end of the prompt tells."""
        awaited = [each for each in progress if self._courier.endpoint.is_awaited(each.request_id)]
        if not awaited:
            return
        written = self._clock.mark()
        for each in awaited:
            event = PrefillAdvanced(each.request_id, each.block_ids, each.num_tokens, layers)
            self._courier.submit(event, written)

    # Results.

    def take_results(self) -> Any:
        """What has ended since the last time, as vLLM's `KVConnectorTransferResults`.

        Raises:
            KVCourierError: the courier has died; vLLM's engine must not go on without it.
        """
        self._courier.raise_if_dead()
        results = TransferResults()
        while self._reports:
            report = self._reports.popleft()
            if report.reason:
                _log.warning("%s: %s: %s", report.request_id, report.outcome, report.reason)
            self._count(report)
            if report.outcome is Outcome.RECEIVE_FAILED:
                self._failed.add(owner_of(report.request_id))
            elif report.outcome is Outcome.HELD:
                self._held.add(report.request_id)
            elif report.outcome is Outcome.RELEASED:
                self._release(report, results)
        return results

    def take_news(self) -> WorkerNews | None:
        """What was in the last `take_results` that vLLM has no place for; None if nothing was."""
        held, self._held = frozenset(self._held), set()
        return WorkerNews(held) if held else None

    def take_failed_blocks(self) -> set[int]:
        """Blocks of the failed receives of the last `take_results`."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def take_stats(self) -> CourierStats | None:
        """What happened since the last time, and how things stand; None if there is nothing.

        Nothing is lent any more once `take_results` has given all back, so what vLLM asks for
        after that is not out of date for want of a further step.
        """
        gauges = self._courier.gauges()
        sizes = {
            "operations_in_flight": gauges["operations_in_flight"],
            "quarantined_bytes": gauges["quarantined_bytes"],
            "quarantined_perc": gauges["quarantined_bytes"] / self._cache_bytes,
        }
        return self._stats.take(self._courier.endpoint.counts, sizes)

    def close(self) -> None:
        """Stop the courier and give NIXL back."""
        self._courier.close()
        if self._traces is not None:
            self._traces.close()

    def _story(self, key: str) -> list[dict[str, Any]]:
        return self._courier.story(key)

    def _on_report(self, report: Report) -> None:
        """On the courier's thread, so that the story does not change while it is read."""
        self._reports.append(report)
        if self._traces is not None:
            self._traces.on_report(report)
        if self._log_stories and report.outcome is Outcome.RELEASED:
            for entry in self._courier.endpoint.story(report.request_id) or ():
                _log.info("%s %.6f %s %s", report.request_id, entry.at, entry.what, entry.details)

    def _count(self, report: Report) -> None:
        """What happened to histories; one rank of an instance counts for all."""
        owner = owner_of(report.request_id)
        if not self._is_first or report.request_id == owner:
            return
        if report.outcome is Outcome.RECEIVED:
            self._stats.count("num_histories_fetched")
        elif report.outcome is Outcome.SENT:
            self._stats.count("num_histories_collected")
        elif report.outcome is Outcome.RECEIVE_FAILED:
            miss = Miss.FAILED if report.cause is None else Miss(report.cause.value)
            self._stats.count(miss_key(miss))

    def _release(self, report: Report, results: Any) -> None:
        request_id = owner_of(report.request_id)
        if report.side is Side.HOLD:
            results.finished_sending.add(request_id)
            return
        results.finished_recving.add(request_id)
        if request_id in self._failed:
            self._failed.discard(request_id)
            results.failed_recving.add(request_id)
            for table, blocks in zip(self._tables, report.block_ids, strict=True):
                self._failed_blocks |= table.vllm_ids(blocks)
