"""What `kvcourier vllm-config` prints is what a shell, vLLM and the router read."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcourier.cli.app import app
from kvcourier.cli.vllm_config import CONNECTOR, CONNECTOR_MODULE
from kvcourier.ids import EngineId
from kvcourier.router.config import Coordinates, InstanceSpec, parse_instance_spec

MODEL = "a model's name"


def invoke(*flags: str, role: str = "prefill") -> Any:
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    return runner.invoke(app, ["vllm-config", "--role", role, "--model", MODEL, *flags])


def printed(*flags: str, role: str = "prefill") -> str:
    result = invoke(*flags, role=role)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def transfer_config(*flags: str, role: str = "prefill") -> dict[str, Any]:
    config = json.loads(printed("--json", *flags, role=role))
    assert isinstance(config, dict)
    return config


def as_run(text: str, tmp_path: Path) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments that a shell gives to `vllm` when it runs the text."""
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\nenv -0\nprintf -- "--ARGUMENTS\\0"\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", text],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    variables, _, arguments = done.stdout.partition("--ARGUMENTS\0")
    pairs = (item.split("=", 1) for item in variables.split("\0") if item)
    return {name: value for name, value in pairs}, arguments.split("\0")[:-1]


def router_spec(text: str) -> tuple[str, InstanceSpec]:
    line = text.splitlines()[-1]
    assert line.startswith("# kvcourier route ")
    flag, spec = shlex.split(line.removeprefix("# kvcourier route "))
    return flag, parse_instance_spec(spec)


@pytest.mark.parametrize(
    ("role", "kv_role", "port", "side_channel_port"),
    [("prefill", "kv_producer", "8100", "5600"), ("decode", "kv_consumer", "8200", "5700")],
)
def test_a_shell_starts_vllm_as_meant(
    tmp_path: Path, role: str, kv_role: str, port: str, side_channel_port: str
) -> None:
    variables, arguments = as_run(printed(role=role), tmp_path)
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == side_channel_port
    *before, config = arguments
    assert before == [
        *("serve", MODEL, "--host", "127.0.0.1", "--port", port),
        "--kv-transfer-config",
    ]
    assert json.loads(config) == {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": kv_role,
        "engine_id": f"kvcourier-{role}",
        "kv_connector_extra_config": {},
    }


def test_every_flag_arrives(tmp_path: Path) -> None:
    text = printed(
        *("--engine-id", "p$1", "--host", "p.example", "--port", "9000"),
        *("--side-channel-host", "10.0.0.7", "--side-channel-port", "6000"),
        *("--tensor-parallel-size", "4", "--kv-load-failure-policy", "recompute"),
        *("--backend", "UCX", "--backend", "LIBFABRIC", "--num-threads", "3"),
        *("--kv-lease-duration", "12.5", "--push-registration-timeout", "7"),
        *("--kv-recompute-threshold", "0", "--", "--max-model-len", "it's 1"),
    )
    variables, arguments = as_run(text, tmp_path)
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "6000"
    assert arguments[2:8] == [
        *("--host", "p.example", "--port", "9000"),
        *("--tensor-parallel-size", "4"),
    ]
    assert arguments[-2:] == ["--max-model-len", "it's 1"]
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert config["engine_id"] == "p$1"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {
        "backends": ["UCX", "LIBFABRIC"],
        "num_threads": 3,
        "kv_lease_duration": 12.5,
        "push_registration_timeout": 7.0,
        "kv_recompute_threshold": 0,
    }
    assert router_spec(text) == (
        "--prefill",
        InstanceSpec("http://p.example:9000", Coordinates("p$1", "10.0.0.7", 6000, 4)),
    )


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        (("--num-threads", "2"), {"num_threads": 2}),
        (("--backend", "UCX"), {}),
        (("--kv-lease-duration", "30"), {}),
        (("--kv-lease-duration", "31"), {"kv_lease_duration": 31.0}),
        (("--push-registration-timeout", "60"), {}),
        (("--kv-recompute-threshold", "64"), {"kv_recompute_threshold": 64}),
        (("--bidirectional-kv-xfer",), {"bidirectional_kv_xfer": True}),
    ],
)
def test_only_what_is_not_a_default_is_named(flags: tuple[str, ...], extra: dict[str, Any]) -> None:
    assert transfer_config(*flags)["kv_connector_extra_config"] == extra


def test_the_router_asks_nothing_of_a_decode_node() -> None:
    text = printed("--host", "d.example", role="decode")
    assert router_spec(text) == ("--decode", InstanceSpec("http://d.example:8200"))


def test_the_router_asks_a_decode_node_that_keeps_turns_for_its_streams() -> None:
    text = printed("--engine-id", "d1", "--bidirectional-kv-xfer", role="decode")
    place = Coordinates(EngineId("d1"), "127.0.0.1", 5700)
    assert router_spec(text) == ("--decode", InstanceSpec("http://127.0.0.1:8200", place))


def test_ipv6_is_bracketed_where_a_url_needs_it(tmp_path: Path) -> None:
    text = printed("--host", "fd00::1")
    variables, arguments = as_run(text, tmp_path)
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "fd00::1"
    assert arguments[3] == "fd00::1"
    coordinates = Coordinates("kvcourier-prefill", "fd00::1", 5600)
    assert router_spec(text)[1] == InstanceSpec("http://[fd00::1]:8100", coordinates)


def test_a_file_gives_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text('[vllm-config]\nengine-id = "p7"\nbackend = ["LIBFABRIC"]\n')
    config = transfer_config("--config", str(path))
    assert config["engine_id"] == "p7"
    assert config["kv_connector_extra_config"] == {"backends": ["LIBFABRIC"]}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--host", "0.0.0.0"), "--host: expected the one address .* found '0.0.0.0'"),
        (("--side-channel-host", "::"), "--side-channel-host: expected the one address"),
        (("--engine-id", "a,tp_size=2"), "--engine-id: expected .* found 'a,tp_size=2'"),
        (("--engine-id", ""), "--engine-id: expected .* found ''"),
        (("--kv-lease-duration", "0"), "--kv-lease-duration: expected seconds above 0, found 0"),
        (("--push-registration-timeout", "nan"), "--push-registration-timeout: expected seconds"),
    ],
)
def test_what_cannot_be_told_to_others_is_refused(flags: tuple[str, ...], expected: str) -> None:
    result = invoke(*flags)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(expected, result.stderr), result.stderr


def test_the_help_has_an_example_for_both_roles() -> None:
    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["vllm-config", "--help"]).stdout
    for role in ("prefill", "decode"):
        assert f"kvcourier vllm-config --role {role} --model" in text
    assert "--config" in text


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_both"), ("decode", "kv_consumer")])
def test_who_fetches_earlier_turns_receives_as_well(role: str, kv_role: str) -> None:
    flags = ("--role", role, "--bidirectional-kv-xfer")
    assert transfer_config(*flags)["kv_role"] == kv_role
