"""Settings, specs of instances, and what an instance tells of itself."""

from typing import Any

import pytest

from kvcourier.config import TransferMode
from kvcourier.errors import ConfigError
from kvcourier.ids import EngineId
from kvcourier.router.config import (
    Coordinates,
    InstanceSpec,
    RouterConfig,
    RouterLimits,
    Timeouts,
    parse_instance_spec,
)
from kvcourier.router.instances import parse_instance_info

URL = "http://127.0.0.1:8100"
ONE = (InstanceSpec(URL),)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (URL, InstanceSpec(URL)),
        (f"{URL}/", InstanceSpec(URL)),
        (
            f"{URL},engine_id=p",
            InstanceSpec(URL, Coordinates(EngineId("p"), "127.0.0.1", 5600)),
        ),
        (
            "http://h:1,engine_id=p,kv_host=kv,kv_port=5601,tp_size=2,pp_size=3",
            InstanceSpec("http://h:1", Coordinates(EngineId("p"), "kv", 5601, 2, 3)),
        ),
        (
            "http://h:1, engine_id=p, dp_rank=2",
            InstanceSpec("http://h:1", Coordinates(EngineId("p"), "h", 5602), dp_rank=2),
        ),
        ("http://[::1]:80", InstanceSpec("http://[::1]:80")),
        ("http://h:1,dp_rank=0", InstanceSpec("http://h:1", dp_rank=0)),
    ],
)
def test_specs(text: str, spec: InstanceSpec) -> None:
    assert parse_instance_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "http://host:port"),
        ("127.0.0.1:8100", "http://host:port"),
        ("ftp://h:1", "http://host:port"),
        ("http://h:99999", "http://host:port"),
        ("http://h:1?a=b", "http://host:port"),
        (f"{URL},tp_size=2", "engine_id"),
        (f"{URL},kv_host=h", "engine_id"),
        (f"{URL},engine_id=", "KEY=VALUE"),
        (f"{URL},engine=p", "engine_id, kv_host, kv_port"),
        (f"{URL},engine_id=p,kv_port=0", "1 to 65535"),
        (f"{URL},engine_id=p,kv_port=x", "1 to 65535"),
        (f"{URL},engine_id=p,tp_size=99999999", "1 to 1024"),
        (f"{URL},engine_id=p,engine_id=q", "twice"),
    ],
)
def test_bad_specs_say_what_is_expected(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_instance_spec(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prefill": ()}, "prefill: expected at least one"),
        ({"decode": ()}, "decode: expected at least one"),
        ({"decode": ONE * 2}, "each instance once"),
        ({"mode": "shove"}, "pull, push"),
        ({"policy": "best"}, "round_robin"),
        ({"decode_policy": "best"}, "decode_policy: expected one of round_robin"),
        ({"retries": -1}, "0 to 16"),
    ],
)
def test_bad_settings_say_what_is_allowed(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**({"prefill": ONE, "decode": ONE} | settings))
    assert says in str(caught.value)


def test_numbers_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="total_s"):
        Timeouts(total_s=0)
    with pytest.raises(ConfigError, match="prefill_s"):
        Timeouts(prefill_s=float("nan"))
    with pytest.raises(ConfigError, match="max_body_bytes"):
        RouterLimits(max_body_bytes=0)


INFO: dict[str, Any] = {
    "engine_id": "p",
    "incarnation": "i",
    "side_channel_host": "h",
    "side_channel_port": 5600,
    "tp_size": 2,
    "pp_size": 1,
    "block_size": 16,
    "modes": ["push", "teleport"],
    "model": "m",
}


def test_what_an_instance_tells() -> None:
    info = parse_instance_info(INFO | {"of_a_later_release": 1})
    assert info.coordinates == Coordinates(EngineId("p"), "h", 5600, 2, 1)
    assert info.modes == {TransferMode.PUSH}


@pytest.mark.parametrize("key", INFO)
@pytest.mark.parametrize("value", [None, "", 0, {}, True])
def test_an_unusable_answer_is_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        parse_instance_info(INFO | {key: value})


def test_a_refusal_does_not_repeat_a_long_answer() -> None:
    with pytest.raises(ValueError, match="incarnation") as caught:
        parse_instance_info(INFO | {"incarnation": [0] * 10_000})
    assert len(str(caught.value)) < 200


def test_an_instance_must_tell_an_object() -> None:
    with pytest.raises(ValueError, match="object"):
        parse_instance_info(["p"])
