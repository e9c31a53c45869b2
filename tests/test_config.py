"""Settings: units, ranges, and where the side channel listens."""

import dataclasses
import math

import pytest

from kvcourier.config import (
    DEFAULT_SIDE_CHANNEL_PORT,
    SIDE_CHANNEL_HOST_VARIABLE,
    SIDE_CHANNEL_PORT_VARIABLE,
    CourierConfig,
    EndpointConfig,
    Limits,
    Timing,
    TransferMode,
    side_channel_address,
    timing_of,
)
from kvcourier.errors import ConfigError
from kvcourier.ids import EngineId

DURATIONS = [field.name for field in dataclasses.fields(Timing)]


def test_the_defaults_are_vllms_where_vllm_has_them():
    timing = Timing()
    assert timing.kv_lease_duration == 30.0
    assert SIDE_CHANNEL_HOST_VARIABLE == "VLLM_NIXL_SIDE_CHANNEL_HOST"
    assert SIDE_CHANNEL_PORT_VARIABLE == "VLLM_NIXL_SIDE_CHANNEL_PORT"
    assert DEFAULT_SIDE_CHANNEL_PORT == 5600


def test_an_endpoint_takes_part_in_both_modes_unless_told_otherwise():
    config = EndpointConfig(EngineId("e"), "m")
    assert config.modes == frozenset(TransferMode)
    assert (config.timing, config.limits, config.courier) == (Timing(), Limits(), CourierConfig())
    assert (config.side_channel_host, config.side_channel_port) == ("localhost", 5600)


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.inf, -math.inf, math.nan])
def test_a_duration_is_a_number_of_seconds_above_zero(name, value):
    with pytest.raises(ConfigError, match=f"^{name}: expected seconds above 0, found"):
        Timing(**{name: value})


@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_may_be_short_or_whole(name):
    short = {"kv_lease_duration": 3, "heartbeat_s": 1, "peer_silence_s": 3, "beat_s": 1}
    assert getattr(
        Timing(**(short | {name: 1.0 if name in ("heartbeat_s", "beat_s") else 60})), name
    )


def test_a_lease_outlasts_two_lost_heartbeats():
    assert Timing(kv_lease_duration=30.0, heartbeat_s=10.0)
    with pytest.raises(ConfigError, match=r"heartbeat_s: expected at most a third .*\(30 s\)"):
        Timing(kv_lease_duration=30.0, heartbeat_s=10.1)
    with pytest.raises(ConfigError, match="heartbeat_s"):
        Timing(kv_lease_duration=10.0)


def test_what_operators_choose_brings_along_what_follows_from_it():
    assert timing_of(30.0, 60.0, 3.0) == Timing()
    short = timing_of(3.0, 20.0, 0.1)
    assert (short.heartbeat_s, short.beat_s) == (1.0, 0.05)
    assert timing_of(30.0, 60.0, 5.0).beat_s == Timing().beat_s
    for index, name in enumerate(
        ("kv_lease_duration", "push_registration_timeout", "peer_silence_s")
    ):
        values = [30.0, 60.0, 0.3]
        values[index] = 0.0
        with pytest.raises(ConfigError, match=f"^{name}: "):
            timing_of(*values)


def test_limits_bound_everything_and_are_above_zero():
    for field in dataclasses.fields(Limits):
        assert getattr(Limits(), field.name) > 0


# The side channel's address.


def environment(host: str | None = None, port: str | None = None) -> dict[str, str]:
    values = {SIDE_CHANNEL_HOST_VARIABLE: host, SIDE_CHANNEL_PORT_VARIABLE: port}
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("host", "port", "dp_rank", "variables", "expected"),
    [
        (None, None, 0, {}, ("localhost", 5600)),
        (None, None, 3, {}, ("localhost", 5603)),
        (None, None, 0, environment("10.0.0.1", "7000"), ("10.0.0.1", 7000)),
        (None, None, 2, environment("10.0.0.1", "7000"), ("10.0.0.1", 7002)),
        ("h", 8000, 2, environment("10.0.0.1", "7000"), ("h", 8000)),
        ("h", None, 0, environment("10.0.0.1", "7000"), ("h", 7000)),
        (None, 0, 5, environment(port="7000"), ("localhost", 0)),
        (None, 65535, 0, {}, ("localhost", 65535)),
        ("", None, 0, environment(host=""), ("localhost", 5600)),
        (None, 8000, 0, environment(port="not looked at"), ("localhost", 8000)),
    ],
)
def test_explicit_then_environment_then_default(host, port, dp_rank, variables, expected):
    assert side_channel_address(host, port, dp_rank, variables) == expected


@pytest.mark.parametrize("text", ["", " ", "http", "-1", "1.5", "0x10", "5600 ", "1e3"])
def test_a_port_in_the_environment_that_is_no_number(text):
    with pytest.raises(ConfigError, match=f"^{SIDE_CHANNEL_PORT_VARIABLE}: expected a port"):
        side_channel_address(None, None, 0, environment(port=text))


@pytest.mark.parametrize(
    ("port", "dp_rank", "variables"),
    [
        (-1, 0, {}),
        (65536, 0, {}),
        (None, 0, environment(port="65536")),
        (None, 1, environment(port="65535")),
        (None, -5601, {}),
    ],
)
def test_a_port_that_is_none(port, dp_rank, variables):
    with pytest.raises(ConfigError, match="side channel port: expected 0 to 65535"):
        side_channel_address(None, port, dp_rank, variables)


def test_the_process_environment_is_looked_at(monkeypatch):
    monkeypatch.setenv(SIDE_CHANNEL_HOST_VARIABLE, "10.9.8.7")
    monkeypatch.setenv(SIDE_CHANNEL_PORT_VARIABLE, "6100")
    assert side_channel_address(None, None, 1) == ("10.9.8.7", 6101)
