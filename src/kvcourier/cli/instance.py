"""An embedded instance, put together: model, cache, transfer, engine, server.

Decides the order in which the parts start and stop, and which flag ends up in which part's
settings. Refuses to know how any part works. This is the only place that knows them all.
"""

import contextlib
import gc
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kvcourier.allow_list import AllowList
from kvcourier.api_keys import ApiKeys
from kvcourier.cli.serve import Dtype, Granularity, LoadFailurePolicy, Role
from kvcourier.config import (
    MIB,
    CourierConfig,
    EndpointConfig,
    Integrity,
    PathPolicy,
    Posting,
    StagingConfig,
    TransferMode,
    side_channel_address,
    timing_of,
)
from kvcourier.errors import ConfigError
from kvcourier.http_server import bind, serve_until_stopped
from kvcourier.ids import EngineId
from kvcourier.layout.geometry import CacheLayout
from kvcourier.runtime.channel_keys import read_keys
from kvcourier.tracing.otel import tracing_of

if TYPE_CHECKING:
    from kvcourier.engine.config import EngineConfig
    from kvcourier.engine.kv_cache import KVCache
    from kvcourier.runtime.endpoint import KvEndpoint


SERVICE = "kvcourier-instance"
"""How its spans call it, where the environment (OTEL_SERVICE_NAME) does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """What the flags of `kvcourier serve` say; each is explained there."""

    model: str
    served_model_name: str | None
    dtype: Dtype
    device: str
    cpu_threads: int
    host: str
    port: int
    role: Role
    block_size: int
    num_blocks: int | None
    kv_cache_gb: float | None
    max_model_len: int | None
    max_batch_tokens: int
    max_num_seqs: int
    prefix_caching: bool
    tp_size: int
    pp_size: int
    kv_layout: CacheLayout
    engine_id: str | None
    kv_modes: frozenset[TransferMode]
    side_channel_host: str | None
    side_channel_port: int | None
    api_keys: ApiKeys | None
    side_channel_key: Path | None
    side_channel_peer_keys: Path | None
    dp_rank: int
    allowed_peers: AllowList | None
    nixl_backends: tuple[str, ...]
    nixl_threads: int
    path: PathPolicy
    staging_mib: int
    staging_slot_mib: int
    granularity: Granularity
    first_token_seeding: bool
    kv_lease_duration: float
    push_registration_timeout: float
    peer_silence_s: float
    kv_integrity: Integrity
    kv_load_failure_policy: LoadFailurePolicy
    kv_recompute_threshold: int | None
    bidirectional_kv_xfer: bool
    decoder_kv_blocks_ttl: float
    posting: Posting
    fragment: float
    otlp_traces_endpoint: str | None = None

    @property
    def api_name(self) -> str:
        """The model's name in the API, and towards peers."""
        return self.served_model_name or self.model


def run_instance(settings: InstanceSettings) -> None:
    """Start an instance, serve until a signal, stop it. Blocks; main thread only.

    Raises:
        ConfigError: a setting cannot be used.
        KeyboardInterrupt: stopped by SIGINT.
    """
    endpoint_config = make_endpoint_config(settings)
    listener = bind(settings.host, settings.port)
    # torch and transformers take seconds to import: not before the cheap checks have passed.
    from kvcourier.engine.config import make_cache
    from kvcourier.engine.engine import Engine
    from kvcourier.engine.models import load_model
    from kvcourier.engine.server.app import create_app

    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        engine_config = make_engine_config(settings)
        model = load_model(engine_config.model, engine_config.dtype, engine_config.device)
        cache = make_cache(model, engine_config)
        registry = CollectorRegistry()
        endpoint = None
        if settings.kv_modes:
            endpoint = make_endpoint(endpoint_config, cache, registry, settings.posting)
        # The engine starts and closes the endpoint: blocks in flight outlive requests.
        engine = stack.enter_context(
            contextlib.closing(Engine(model, engine_config, endpoint, cache=cache))
        )
        engine.start()
        tracing = stack.enter_context(tracing_of(SERVICE, settings.otlp_traces_endpoint))
        app = create_app(
            engine,
            model.tokenizer,
            endpoint=endpoint,
            role=settings.role.value,
            limits=endpoint_config.limits,
            served_model_name=settings.api_name,
            registry=registry,
            api_keys=settings.api_keys,
            tracing=tracing,
        )
        # What there is by now stays. A collection that looks at all of it takes a fifth of a
        # second, in the midst of requests and once more at the end.
        gc.collect()
        gc.freeze()
        serve_until_stopped(app, listener)


def make_endpoint_config(settings: InstanceSettings) -> EndpointConfig:
    """The transfer side of the settings. Raises ConfigError."""
    host, port = side_channel_address(
        settings.side_channel_host, settings.side_channel_port, settings.dp_rank
    )
    engine_id = EngineId(settings.engine_id or uuid.uuid4().hex)
    keys = read_keys(settings.side_channel_key, settings.side_channel_peer_keys, engine_id)
    if keys is not None and not settings.engine_id:
        raise ConfigError("--engine-id: expected one, as peers find an instance's key by its name")
    return EndpointConfig(
        engine_id=engine_id,
        model=settings.api_name,
        modes=settings.kv_modes,
        side_channel_host=host,
        side_channel_port=port,
        allowed_peers=settings.allowed_peers,
        keys=keys,
        integrity=settings.kv_integrity,
        timing=timing_of(
            settings.kv_lease_duration,
            settings.push_registration_timeout,
            settings.peer_silence_s,
        ),
        courier=CourierConfig(
            backends=settings.nixl_backends,
            num_threads=settings.nixl_threads,
            poll_stream_s=CourierConfig().poll_stream_s if settings.device == "cpu" else 0.0,
            staging=StagingConfig(
                path=settings.path,
                send_bytes=settings.staging_mib * MIB,
                receive_bytes=settings.staging_mib * MIB,
                slot_bytes=settings.staging_slot_mib * MIB,
            ),
        ),
    )


def make_engine_config(settings: InstanceSettings) -> "EngineConfig":
    """The computing side of the settings. Raises ConfigError."""
    from kvcourier.engine.config import EngineConfig

    default = EngineConfig()
    return EngineConfig(
        model=settings.model,
        dtype=settings.dtype.value,
        device=settings.device,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        kv_cache_gb=settings.kv_cache_gb or default.kv_cache_gb,
        max_model_len=settings.max_model_len,
        max_batch_tokens=settings.max_batch_tokens,
        max_num_seqs=settings.max_num_seqs,
        tp_size=settings.tp_size,
        pp_size=settings.pp_size,
        cache_layout=settings.kv_layout.value,
        enable_prefix_caching=settings.prefix_caching,
        kv_load_failure_policy=settings.kv_load_failure_policy.value,
        kv_recompute_threshold=settings.kv_recompute_threshold,
        bidirectional_kv_xfer=settings.bidirectional_kv_xfer,
        decoder_kv_blocks_ttl=settings.decoder_kv_blocks_ttl,
        granularity=settings.granularity.value,
        first_token_seeding=settings.first_token_seeding,
        num_cpu_threads=settings.cpu_threads,
        fragment=settings.fragment,
    )


def make_endpoint(
    config: EndpointConfig,
    cache: "KVCache",
    registry: CollectorRegistry,
    posting: Posting = Posting.THREAD,
) -> "KvEndpoint":
    """What moves the cache's KV over NIXL, not started; its metrics go into `registry`."""
    from kvcourier.runtime.endpoint import KvEndpoint
    from kvcourier.transport.nixl import nixl_factory

    return KvEndpoint(
        config,
        cache.rank_caches(),
        nixl_factory(config.courier),
        registry=registry,
        posting=posting,
    )
