"""The class vLLM loads, on both nodes and for both modes.

Decides which hook goes to which side. Refuses to know anything else. Push or pull follows from
each request's `kv_transfer_params`, so there is no second class to mix it up with (vllm#50620).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvcourier.layout import CacheKind, MemoryKind, RankCache
from kvcourier.tracing.otel import is_wanted
from kvcourier.vllm_connector.caches import largest_request, read_cache
from kvcourier.vllm_connector.progress import StepNews
from kvcourier.vllm_connector.scheduler_side import SchedulerSide
from kvcourier.vllm_connector.settings import ConnectorSettings, read_settings
from kvcourier.vllm_connector.stats import CourierPromMetrics, CourierStats, SizeTeller
from kvcourier.vllm_connector.traces import Parents, Traced
from kvcourier.vllm_connector.versions import (
    REPORTS_FAILED_REQUESTS,
    HybridSupport,
    attention_backends,
    required_layout,
    warn_if_untested,
)
from kvcourier.vllm_connector.worker_side import WorkerNews, WorkerOffer, WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger(__name__)


@dataclass
class CourierMetadata(KVConnectorMetadata):
    """What a step means for the prompts that we hold, and whose children new requests are, where
    anybody traces. All other calls reach the couriers by their own link, without waiting for a
    step."""

    news: StepNews
    traced: tuple[Traced, ...] = ()


def _log_like_vllm() -> None:
    """Send our lines where vLLM's go, at its level: it configures no logger but its own."""
    ours, theirs = logging.getLogger("kvcourier"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


class CourierConnector(KVConnectorBase_V1, HybridSupport):
    """Moves KV between vLLM instances by pull and push.

    Raises:
        ConfigError: vLLM's configuration asks for something not supported yet.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        warn_if_untested()
        self._settings: ConnectorSettings = read_settings(vllm_config)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._sizes = SizeTeller("scheduler")
        self._parents = Parents(self._settings.endpoint.limits) if is_wanted() else None
        if role is KVConnectorRole.SCHEDULER:
            groups = kv_cache_config.kv_cache_groups
            self._scheduler = SchedulerSide(
                self._settings, kv_cache_config.num_blocks, largest_request(groups, vllm_config)
            )

    # Both sides.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Ask for heads outside tokens."""
        model = vllm_config.model_config
        return None if model is None else required_layout(model.use_mla)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """The caches' memory must stay where it was registered."""
        return False

    def shutdown(self) -> None:
        """Give sockets, threads and registered memory back."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        """See SchedulerSide.on_new_request."""
        self._scheduling.on_new_request(request)
        if self._parents is not None:
            self._parents.read(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See SchedulerSide.num_external_tokens."""
        count = self._scheduling.num_external_tokens(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See SchedulerSide.on_allocated."""
        self._scheduling.on_allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See ProgressTracker."""
        traced = () if self._parents is None else self._parents.take()
        return CourierMetadata(self._scheduling.step_news(scheduler_output), traced)

    def update_connector_output(self, connector_output: Any) -> None:
        """See SchedulerSide.on_results: vLLM's scheduler goes through the same two sets next."""
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            self._scheduling.on_held(news.held)
        self._scheduling.on_results(
            connector_output.finished_recving, connector_output.finished_sending
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """What releases of vLLM ask that keep one cache group for us."""
        return self._scheduling.on_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerSide.on_finished."""
        return self._scheduling.on_finished(request, block_ids)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """See SchedulerSide.connect_workers; keyed by the tensor-parallel rank."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): offer for rank, offer in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """See SchedulerSide.connect_workers."""
        self._scheduling.connect_workers(metadata)

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler's hook was called on a worker"
        return self._scheduler

    # Worker side.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Register the rank's memory and start its courier.

        Raises:
            ConfigError: a kind of cache that is not supported yet.
        """
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        found = read_cache(
            kv_caches,
            self._kv_cache_config.kv_cache_groups,
            total_kv_heads=self._vllm_config.model_config.get_total_num_kv_heads(),
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=self._settings.tp_size,
        )
        backends = attention_backends(self._vllm_config)
        setting = self._vllm_config.cache_config.cache_dtype
        element_type = found.cache.geometries[0].dtype if setting == "auto" else setting
        cache_format = "/".join([*backends, element_type])
        cache_format += _order_within_blocks(found.cache)
        self._worker = WorkerSide(self._settings, found, cache_format)
        for geometry in found.cache.geometries:
            _log.info("registered %s", geometry)

    def get_handshake_metadata(self) -> WorkerOffer | None:
        """What the scheduler tells peers of this rank."""
        return self._working.offer

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See WorkerSide.take_results."""
        return self._working.take_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What releases of vLLM ask that have no `get_transfer_results`."""
        results = self._working.take_results()
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed receives, where vLLM does not ask for the requests."""
        return set() if REPORTS_FAILED_REQUESTS else self._working.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """See WorkerSide.take_news; vLLM takes it along with the results."""
        return self._worker.take_news() if self._worker is not None else None

    def get_kv_connector_stats(self) -> Any:
        """What happened since the last time, and how things stand."""
        if self._worker is not None:
            return self._worker.take_stats()
        scheduler = self._scheduling
        data = scheduler.take_counts() | self._sizes.tell({"holds": scheduler.num_held})
        return CourierStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Statistics as they came over the wire."""
        return CourierStats(data=data) if data is not None else CourierStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """vLLM's own `vllm:nixl_*` metrics, filled by us."""
        return CourierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: couriers start by themselves."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs when all its KV is there."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: what was preempted for it is void before its kernels run."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, CourierMetadata):
            self._worker.begin_step(connector_metadata.news, connector_metadata.traced)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer's KV of this step is written, or will be by kernels that were launched."""
        self._working.end_layer(layer_name)

    def wait_for_save(self) -> None:
        """A step's KV is written, or will be; nothing to wait for, blocks are kept until sent."""
        self._working.end_step()

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a worker's hook was called before its caches exist"
        return self._worker


def _order_within_blocks(cache: RankCache) -> str:
    """Sizes that must be equal on both sides where a backend orders the inside of a block by rules
    of its own, so that only whole blocks mean the same: on the CPU, and where K and V are planes.
    """
    on_cpu = cache.regions[0].memory is MemoryKind.DRAM
    sizes = sorted(
        {
            f"{geometry.block_size}"
            if geometry.kind is not CacheKind.KEY_VALUE
            else f"{geometry.block_size} x {geometry.num_heads} heads"
            for geometry in cache.geometries
            if on_cpu or geometry.kind is CacheKind.KEY_VALUE
        }
    )
    return f"/blocks of {', '.join(sizes)}" if sizes else ""
