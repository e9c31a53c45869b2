"""From vLLM's configuration to kvcourier's.

Decides which keys of `kv_connector_extra_config` are read and what is refused at start-up because
it is not supported. Refuses to know tensors and requests.
"""

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvcourier.allow_list import AllowList, parse_allow_list
from kvcourier.config import (
    MIB,
    SIDE_CHANNEL_PORT_VARIABLE,
    CourierConfig,
    EndpointConfig,
    Granularity,
    Integrity,
    StagingConfig,
    Timing,
    side_channel_address,
    timing_of,
)
from kvcourier.errors import ConfigError
from kvcourier.ids import EngineId, Incarnation

if TYPE_CHECKING:
    from vllm.config import VllmConfig

E = TypeVar("E", bound=enum.StrEnum)

_log = logging.getLogger(__name__)
_TIMING = Timing()
_COURIER = CourierConfig()
DEFAULT_NUM_THREADS = 4
"""UCX threads, as in vLLM's own connectors; with one, posting scattered blocks takes twice as
long."""
DEFAULT_GRANULARITY = Granularity.LAYER
"""Only large parts are sent before the others, see `layer_pace`."""

POLL_STREAM_ON_GPU_S = 0.0001
"""Without a pause the courier would take the interpreter from the thread that launches steps, for
all of a transfer."""

GPU_STAGING = StagingConfig(send_bytes=512 * MIB, receive_bytes=512 * MIB, slot_bytes=128 * MIB)
CPU_STAGING = StagingConfig()
"""Slots of 128 MiB take 0.4 ms on NVLink; four of them keep it busy."""

DEFAULT_HISTORY_THRESHOLD = 64
DEFAULT_HISTORY_TTL_S = 480.0
"""vLLM's own."""

_KNOWN_KEYS = frozenset(
    {
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "backends",
        "num_threads",
        "enable_prog_thread",
        "kv_lease_duration",
        "push_registration_timeout",
        "peer_silence_s",
        "kv_integrity",
        "kv_recompute_threshold",
        "transfer_path",
        "staging_mib",
        "staging_slot_mib",
        "granularity",
        "allowed_peers",
        "side_channel_key",
        "side_channel_peer_keys",
        "log_stories",
        "tell_stories",
        "tell_histories",
    }
)


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """How the KV of conversations' earlier turns is kept and fetched.

    Attributes:
        ttl_s: how long it is kept, at most.
        threshold: if fewer tokens than this are missing of a history, they are computed.
        tells: who knows its transfer id is told on the side channel where a history is kept.
    """

    ttl_s: float = DEFAULT_HISTORY_TTL_S
    threshold: int = DEFAULT_HISTORY_THRESHOLD
    tells: bool = True


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Everything both sides of the connector need.

    Attributes:
        endpoint: kvcourier's own configuration.
        incarnation: this life of this instance, the same in its scheduler and all its workers.
        tp_size: tensor-parallel size.
        recompute_threshold: tokens; a remainder of at most so many is computed, not fetched.
        turns: what is kept and fetched of conversations' earlier turns; None: nothing.
        may_receive: vLLM keeps blocks back until no step can write them (kv_consumer, kv_both).
        granularity: in which parts KV is sent while its prompt is computed.
        log_stories: every finished transfer's story goes into the log.
    """

    endpoint: EndpointConfig
    incarnation: Incarnation
    tp_size: int
    recompute_threshold: int
    may_receive: bool
    granularity: Granularity = DEFAULT_GRANULARITY
    log_stories: bool = False
    turns: TurnSettings | None = None


def read_settings(vllm_config: "VllmConfig") -> ConnectorSettings:
    """Check vLLM's configuration and take what we need.

    Raises:
        ConfigError: something in it is not supported, or a key has an unusable value.
    """
    # Needs ZMQ, which the commands that only know our defaults do without.
    from kvcourier.runtime.channel_keys import read_keys

    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.engine_id is None:
        raise ConfigError("kv_transfer_config: expected one with an engine_id, found none")
    _refuse_unsupported(vllm_config)
    extra: Mapping[str, Any] = transfer.kv_connector_extra_config or {}
    keys = read_keys(
        _path(extra, "side_channel_key"),
        _path(extra, "side_channel_peer_keys"),
        EngineId(transfer.engine_id),
    )
    for key in sorted(extra.keys() - _KNOWN_KEYS):
        _log.warning(
            "kv_connector_extra_config.%s is not a key of CourierConnector and has no effect; "
            "it reads: %s",
            key,
            ", ".join(sorted(_KNOWN_KEYS)),
        )
    parallel = vllm_config.parallel_config
    host, port = side_channel_address(None, None, parallel.data_parallel_index)
    if port == 0:
        raise ConfigError(
            f"{SIDE_CHANNEL_PORT_VARIABLE}: expected a port that peers can be told, found 0"
        )
    timing = timing_of(
        *(
            _number(extra, key, getattr(_TIMING, key))
            for key in ("kv_lease_duration", "push_registration_timeout", "peer_silence_s")
        )
    )
    on_gpu = vllm_config.device_config.device_type != "cpu"
    backends = extra.get("backends", list(_COURIER.backends))
    if not isinstance(backends, list) or not backends or not all(map(_is_text, backends)):
        raise ConfigError(
            f"kv_connector_extra_config.backends: expected a list of names, found {backends!r}"
        )
    return ConnectorSettings(
        endpoint=EndpointConfig(
            engine_id=EngineId(transfer.engine_id),
            model=vllm_config.model_config.model,
            side_channel_host=host,
            side_channel_port=port,
            allowed_peers=_allowed_peers(extra),
            keys=keys,
            tells_stories=_flag(extra, "tell_stories", keys is not None),
            integrity=_choice(extra, "kv_integrity", Integrity.OFF),
            timing=timing,
            courier=CourierConfig(
                backends=tuple(backends),
                num_threads=int(_number(extra, "num_threads", DEFAULT_NUM_THREADS)),
                enable_prog_thread=extra.get("enable_prog_thread") is True,
                poll_stream_s=POLL_STREAM_ON_GPU_S if on_gpu else _COURIER.poll_stream_s,
                staging=_staging(extra, transfer, GPU_STAGING if on_gpu else CPU_STAGING),
            ),
        ),
        incarnation=Incarnation(f"{vllm_config.instance_id}-{parallel.data_parallel_index}"),
        tp_size=parallel.tensor_parallel_size,
        recompute_threshold=int(_number(extra, "kv_recompute_threshold", 0)),
        may_receive=bool(transfer.is_kv_consumer),
        granularity=_choice(extra, "granularity", DEFAULT_GRANULARITY),
        log_stories=extra.get("log_stories") is True,
        turns=_turns(extra, transfer),
    )


def _turns(extra: Mapping[str, Any], transfer: Any) -> TurnSettings | None:
    """What is kept and fetched of earlier turns.

    Makes vLLM compute what could not be fetched where it would fail the request: it has one policy
    for all that is loaded, and reads it after its connector is made. An instance that only decodes
    loads prompts and no histories; there the policy stays as it is.
    """
    if extra.get("bidirectional_kv_xfer") is not True:
        return None
    if not transfer.is_kv_consumer:
        raise ConfigError(
            "kv_connector_extra_config.bidirectional_kv_xfer: expected kv_role kv_both on an "
            "instance that computes prompts, as it receives the KV of earlier turns; found "
            f"{transfer.kv_role}"
        )
    if transfer.is_kv_producer and transfer.kv_load_failure_policy == "fail":
        _log.info(
            "kv_load_failure_policy is recompute, as a history that does not come must not fail "
            "its request; an instance that only decodes keeps its own with kv_role kv_consumer"
        )
        transfer.kv_load_failure_policy = "recompute"
    ttl_s = _number(extra, "decoder_kv_blocks_ttl", DEFAULT_HISTORY_TTL_S)
    if not 0 < ttl_s < float("inf"):
        raise ConfigError(
            f"kv_connector_extra_config.decoder_kv_blocks_ttl: expected seconds above 0, found "
            f"{ttl_s:g}"
        )
    threshold = _number(extra, "kv_recompute_threshold", DEFAULT_HISTORY_THRESHOLD)
    return TurnSettings(ttl_s, max(1, int(threshold)), _flag(extra, "tell_histories", True))


def _refuse_unsupported(vllm_config: "VllmConfig") -> None:
    parallel = vllm_config.parallel_config
    sizes = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "decode_context_parallel_size": getattr(parallel, "decode_context_parallel_size", 1),
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1),
    }
    for name, size in sizes.items():
        if size > 1:
            raise ConfigError(f"{name}: CourierConnector supports 1 so far, found {size}")
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError("speculative_config: CourierConnector does not support it so far")


def _staging(extra: Mapping[str, Any], transfer: Any, default: StagingConfig) -> StagingConfig:
    """Staging memory for the directions that this role has."""
    size = _mib(extra, "staging_mib", default.send_bytes)
    keeps = extra.get("bidirectional_kv_xfer") is True
    return StagingConfig(
        path=_choice(extra, "transfer_path", default.path),
        send_bytes=size if transfer.is_kv_producer or keeps else 0,
        receive_bytes=size if transfer.is_kv_consumer else 0,
        slot_bytes=_mib(extra, "staging_slot_mib", default.slot_bytes),
    )


def _allowed_peers(extra: Mapping[str, Any]) -> AllowList | None:
    """The allow-list, if there is one; an empty one allows nobody."""
    setting, entries = "kv_connector_extra_config.allowed_peers", extra.get("allowed_peers")
    if entries is None:
        return None
    if not isinstance(entries, list) or not all(map(_is_text, entries)):
        raise ConfigError(f"{setting}: expected a list of texts, found {entries!r}")
    return parse_allow_list(entries, setting)


def _path(extra: Mapping[str, Any], key: str) -> Path | None:
    value = extra.get(key)
    if value is not None and not _is_text(value):
        raise ConfigError(f"kv_connector_extra_config.{key}: expected a path, found {value!r}")
    return None if value is None else Path(value)


def _flag(extra: Mapping[str, Any], key: str, default: bool) -> bool:
    value = extra.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(
            f"kv_connector_extra_config.{key}: expected true or false, found {value!r}"
        )
    return value


def _choice(extra: Mapping[str, Any], key: str, default: E) -> E:
    """One of the values of the default's type."""
    kind, value = type(default), extra.get(key, default.value)
    if value not in {each.value for each in kind}:
        choices = ", ".join(kind)
        raise ConfigError(
            f"kv_connector_extra_config.{key}: expected one of {choices}, found {value!r}"
        )
    return kind(value)


def _mib(extra: Mapping[str, Any], key: str, default: int) -> int:
    """A size that is given in MiB, in bytes."""
    return int(_number(extra, key, default / MIB)) * MIB


def _number(extra: Mapping[str, Any], key: str, default: float) -> float:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"kv_connector_extra_config.{key}: expected a number, found {value!r}")
    return float(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
