"""What of vLLM's configuration the connector refuses, and what it says has no effect."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvcourier.config import Integrity
from kvcourier.errors import ConfigError
from kvcourier.vllm_connector.settings import _KNOWN_KEYS, TurnSettings, read_settings

THEIRS_ONLY = (
    "enforce_handshake_compat",
    "engine_ttl",
    "enable_cross_layers_blocks",
)
"""Keys of vLLM's own connectors that ours does not read."""


def vllm_config(extra: dict[str, Any] | None = None, **parallel: int) -> SimpleNamespace:
    sizes = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "data_parallel_index": 0}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id="p0",
            kv_connector_extra_config=extra or {},
            is_kv_producer=True,
            is_kv_consumer=False,
        ),
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(model="m"),
        speculative_config=None,
        instance_id="i",
    )


def test_without_settings_vllms_names_have_their_defaults():
    settings = read_settings(vllm_config())
    assert settings.endpoint.courier.backends == ("UCX",)
    assert settings.endpoint.courier.num_threads == 4
    assert settings.endpoint.timing.kv_lease_duration == 30
    assert settings.endpoint.timing.push_registration_timeout == 60
    assert settings.recompute_threshold == 0


def test_kv_integrity_is_off_unless_it_is_set():
    assert read_settings(vllm_config()).endpoint.integrity is Integrity.OFF
    for integrity in Integrity:
        chosen = read_settings(vllm_config({"kv_integrity": integrity.value}))
        assert chosen.endpoint.integrity is integrity
    with pytest.raises(ConfigError, match=r"kv_integrity: expected one of off, sample, all, found"):
        read_settings(vllm_config({"kv_integrity": "most"}))


@pytest.mark.parametrize(
    "name",
    [
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_parallelism_that_is_not_supported_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"^{name}: .* supports 1 so far, found 2"):
        read_settings(vllm_config(**{name: 2}))


def test_speculative_decoding_is_refused_by_name():
    config = vllm_config()
    config.speculative_config = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"^speculative_config: "):
        read_settings(config)


@pytest.mark.parametrize("key", THEIRS_ONLY)
def test_a_key_that_has_no_effect_is_named_in_a_warning(key, caplog):
    with caplog.at_level(logging.WARNING, logger="kvcourier"):
        read_settings(vllm_config({key: 1}))
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"kv_connector_extra_config.{key} is not a key" in said
    assert all(known in said for known in _KNOWN_KEYS)


@pytest.mark.parametrize("key", ["num_threads", "kv_lease_duration", "kv_recompute_threshold"])
@pytest.mark.parametrize("value", ["30", None, True, [1]])
def test_a_number_that_is_none_stops_the_start_by_name(key, value):
    with pytest.raises(ConfigError, match=rf"^kv_connector_extra_config\.{key}: expected a num"):
        read_settings(vllm_config({key: value}))


def test_the_side_channel_needs_a_port_that_peers_can_be_told(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    with pytest.raises(ConfigError, match=r"^VLLM_NIXL_SIDE_CHANNEL_PORT: expected a port"):
        read_settings(vllm_config())


def test_each_data_parallel_rank_has_a_port_of_its_own(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.7")
    endpoint = read_settings(vllm_config(data_parallel_index=3)).endpoint
    assert (endpoint.side_channel_host, endpoint.side_channel_port) == ("10.0.0.7", 5603)


def turning(role: str, policy: str = "fail", **extra: Any) -> SimpleNamespace:
    config = vllm_config({"bidirectional_kv_xfer": True, **extra})
    config.kv_transfer_config.kv_role = role
    config.kv_transfer_config.is_kv_producer = role in ("kv_producer", "kv_both")
    config.kv_transfer_config.is_kv_consumer = role in ("kv_consumer", "kv_both")
    config.kv_transfer_config.kv_load_failure_policy = policy
    return config


def test_turns_have_vllms_names_and_defaults():
    assert read_settings(vllm_config()).turns is None
    assert read_settings(turning("kv_both")).turns == TurnSettings(480.0, 64)
    told = turning("kv_consumer", decoder_kv_blocks_ttl=20, kv_recompute_threshold=7)
    settings = read_settings(told)
    assert settings.turns == TurnSettings(20.0, 7)
    quiet = read_settings(turning("kv_both", tell_histories=False)).turns
    assert quiet is not None and not quiet.tells
    with pytest.raises(ConfigError, match=r"tell_histories: expected true or false, found 'no'"):
        read_settings(turning("kv_both", tell_histories="no"))
    assert settings.endpoint.courier.staging.send_bytes > 0, "what is kept may be sent packed"


def test_who_computes_prompts_must_be_able_to_receive():
    with pytest.raises(ConfigError, match=r"bidirectional_kv_xfer: expected kv_role kv_both"):
        read_settings(turning("kv_producer"))


@pytest.mark.parametrize(("role", "policy"), [("kv_both", "recompute"), ("kv_consumer", "fail")])
def test_a_lost_history_fails_no_prompt(role, policy):
    config = turning(role)
    read_settings(config)
    assert config.kv_transfer_config.kv_load_failure_policy == policy


def test_the_time_to_keep_is_some():
    with pytest.raises(ConfigError, match="decoder_kv_blocks_ttl: expected seconds above 0"):
        read_settings(turning("kv_both", decoder_kv_blocks_ttl=0))
