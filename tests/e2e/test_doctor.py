"""`kvcourier doctor` as its user runs it, against real processes, well and with planted faults."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from zmq.auth import create_certificates

from e2e.cluster import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Cluster,
    Server,
    instance_flags,
    running_cluster,
    running_servers,
)
from ports import free_port

ASK_S = 240.0
TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class Visit:
    """What a doctor said, and how it ended."""

    exit_code: int
    findings: list[dict[str, str]]

    def troubles(self) -> list[dict[str, str]]:
        """Warnings and errors."""
        return [each for each in self.findings if each["severity"] in ("warning", "error")]

    def of(self, check: str, severity: str) -> list[str]:
        """Evidence of one check."""
        return [
            each["evidence"]
            for each in self.findings
            if (each["check"], each["severity"]) == (check, severity)
        ]


def visit(*flags: str, environment: Mapping[str, str] | None = None) -> Visit:
    """Run the command, with JSON on its standard output."""
    ended = run_doctor([*flags, "--json", "-"], environment)
    assert ended.returncode in (0, 1, 3), ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    assert told["exit_code"] == ended.returncode
    return Visit(ended.returncode, told["findings"])


def run_doctor(
    flags: Sequence[str], environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """The process, ended."""
    return subprocess.run(
        [sys.executable, "-m", "kvcourier", "doctor", *flags],
        capture_output=True,
        text=True,
        timeout=ASK_S,
        env=os.environ | dict(environment or {}),
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A healthy pair and its router, of which nobody else has had failures counted."""
    with running_cluster(tmp_path_factory.mktemp("doctor")) as shared:
        yield shared


@pytest.fixture(scope="module")
def sick(pair: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A decode instance with another model name and element type, that pushes only, whose clock is
    ahead."""
    with running_servers(tmp_path_factory.mktemp("sick")) as start:
        server = start(
            "sick",
            "serve",
            *instance_flags("sick", "decode"),
            "--served-model-name=other",
            "--dtype=bfloat16",
            "--kv-modes=push",
            module="e2e.skewed_instance",
            environment={"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        )
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def hasty(pair: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A prefill instance with a short lease, a scattered cache, and pull only."""
    with running_servers(tmp_path_factory.mktemp("hasty")) as start:
        server = start(
            "hasty",
            "serve",
            *instance_flags("hasty", "prefill"),
            "--kv-lease-duration=2",
            "--fragment=1",
            "--path=direct",
            "--kv-modes=pull",
        )
        server.wait_ready()
        yield server


@dataclass(frozen=True)
class Locked:
    """An instance that wants keys, and the flags with which a doctor has them."""

    url: str
    api_key: str
    channel_keys: tuple[str, ...]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    """An instance with API keys and side-channel keys; it knows the doctor's."""
    folder = tmp_path_factory.mktemp("locked")
    keys = folder / "keys"
    keys.mkdir()
    secrets = {}
    for name in ("locked", "doctor"):
        public, secrets[name] = create_certificates(folder, name)
        Path(public).rename(keys / f"{name}.key")
    (folder / "api").write_text("a-key\n")
    with running_servers(folder) as start:
        server = start(
            "locked",
            "serve",
            *instance_flags("locked", "prefill"),
            f"--api-key-file={folder / 'api'}",
            f"--side-channel-key={secrets['locked']}",
            f"--side-channel-peer-keys={keys}",
        )
        server.wait_ready()
        yield Locked(
            server.url,
            f"--api-key-file={folder / 'api'}",
            (
                "--engine-id=doctor",
                f"--side-channel-key={secrets['doctor']}",
                f"--side-channel-peer-keys={keys}",
            ),
        )


def urls(prefill: Server, decode: Server) -> tuple[str, str]:
    """Flags that name a pair."""
    return f"--prefill={prefill.url}", f"--decode={decode.url}"


def test_a_healthy_pair_has_no_trouble(pair: Cluster) -> None:
    seen = visit(
        *(*urls(pair.prefill, pair.decode), f"--router={pair.router.url}"),
        *("--client-timeout=600", "--rate=1", "--mode=pull", "--mode=push"),
    )
    assert seen.troubles() == []
    assert seen.exit_code == 0
    for check in ("handshake", "side-channel", "router-knows", "nixl", "fetch", "measured"):
        assert seen.of(check, "ok"), check
    told = seen.of("fetch", "ok")
    assert sum("brought the same" in each for each in told) == 2
    assert any("UCX goes" in each for each in told)
    # Both modes, through a router of its own and through ours.
    assert len(seen.of("answers", "ok")) == 4
    assert all("bytes moved" in each for each in seen.of("answers", "ok"))
    pair.wait_idle()
    assert not any(pair.prefill.failures().values()) and not any(pair.decode.failures().values())


def test_without_prompts_nothing_is_computed(pair: Cluster) -> None:
    before = pair.prefill.metric("kvcourier:prompt_tokens_total")
    ended = run_doctor([f"--router={pair.router.url}", "--no-prompts"])
    assert ended.returncode == 0, ended.stdout
    assert "0 errors, 0 warnings" in ended.stdout and "handshake: P and D fit\n" in ended.stdout
    assert pair.prefill.metric("kvcourier:prompt_tokens_total") == before


def test_a_wrong_port(pair: Cluster) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    seen = visit(f"--prefill={url}", f"--decode={pair.decode.url}", "--no-prompts")
    assert seen.exit_code == 1
    (evidence,) = seen.of("http", "error")
    assert "nothing listens there" in evidence


def test_a_wrong_side_channel_port(pair: Cluster) -> None:
    port = free_port()
    spec = f"{pair.prefill.url},engine_id=p,kv_host=127.0.0.1,kv_port={port}"
    seen = visit(f"--prefill={spec}", f"--decode={pair.decode.url}", "--no-prompts")
    (evidence,) = seen.of("side-channel", "error")
    assert str(port) in evidence and "refused" in evidence


def test_another_instances_side_channel_port(pair: Cluster) -> None:
    port = pair.decode.info()["side_channel_port"]
    spec = f"{pair.prefill.url},engine_id=p,kv_host=127.0.0.1,kv_port={port}"
    seen = visit(f"--prefill={spec}", f"--decode={pair.decode.url}", "--no-prompts")
    assert "answers the engine id d, expected p" in seen.of("side-channel", "error")[0]


def test_another_model_and_element_type_and_a_skewed_clock(pair: Cluster, sick: Server) -> None:
    seen = visit(*urls(pair.prefill, sick))
    assert seen.exit_code == 1
    told = seen.of("handshake", "error")
    assert "model: P has 'tiny', D has 'other'" in told
    assert "dtype: P has 'float32', D has 'bfloat16'" in told
    (skew,) = seen.of("clock", "warning")
    assert "ahead of the one here" in skew and "only durations cross the wire" in skew
    assert any("no model in common" in each for each in seen.of("answers", "note"))
    pair.wait_idle()


def test_modes_that_do_not_meet_a_lease_that_is_too_short_and_a_scattered_cache(
    hasty: Server, sick: Server, pair: Cluster
) -> None:
    for number in range(4):
        prompt = [(31 * number + 7 * place) % 251 for place in range(1600)]
        hasty.ask(prompt, num_tokens=1, kv_transfer_params={"do_remote_decode": True})
    seen = visit(*urls(hasty, sick), "--no-prompts")
    assert any("P takes part in pull, D in push" in each for each in seen.of("modes", "error"))
    assert "renews every 5 s a lease that P ends after 2 s" in seen.of("lease", "error")[0]
    assert "its cache is fragmented" in seen.of("runs", "warning")[0]
    # Nobody has collected these prompts.
    hasty.wait_idle()
    seen = visit(*urls(hasty, pair.decode), "--no-prompts")
    assert "leases expired: 4" in seen.of("failures", "warning")[0]


def test_a_transport_that_is_not_there(pair: Cluster) -> None:
    seen = visit(*urls(pair.prefill, pair.decode), environment={"UCX_TLS": "rc"})
    assert seen.exit_code == 1
    (evidence,) = seen.of("nixl", "error")
    assert "'rc' is not available" in evidence
    assert len(seen.of("fetch", "note")) == 2
    # What is wrong here is not wrong with the pair.
    assert len(seen.of("answers", "ok")) == 2


def test_a_rate_that_saturates(pair: Cluster) -> None:
    seen = visit(*urls(pair.prefill, pair.decode), "--tokens=8000", "--rate=100000", "--no-prompts")
    assert "are more than it can move" in seen.of("posting", "error")[0]


def test_a_full_decode_instance(pair: Cluster) -> None:
    held = {"do_remote_decode": True, "transfer_id": "for nobody"}
    prompt = [index % 251 for index in range(int(0.97 * NUM_BLOCKS) * BLOCK_SIZE)]
    pair.decode.ask(prompt, num_tokens=1, kv_transfer_params=held)
    seen = visit(*urls(pair.prefill, pair.decode))
    # Unless its lease has ended meanwhile.
    httpx.delete(f"{pair.decode.url}/kvcourier/transfers/for nobody")
    assert "it is full: 97 % of its cache in use" in seen.of("full", "warning")[0]
    assert any("is full" in each for each in seen.of("answers", "note"))
    assert seen.exit_code == 3
    pair.wait_idle()


def test_keys_that_are_missing_are_named_one_by_one(locked: Locked) -> None:
    prefill = f"--prefill={locked.url}"
    assert "API key" in visit(prefill, "--no-prompts").of("http", "error")[0]
    seen = visit(prefill, locked.api_key, "--no-prompts")
    assert "side-channel keys" in seen.of("side-channel", "error")[0]
    seen = visit(prefill, locked.api_key, *locked.channel_keys)
    assert seen.troubles() == []
    assert any("brought the same" in each for each in seen.of("fetch", "ok"))


def test_a_flag_that_cannot_be_used() -> None:
    assert run_doctor([]).returncode == 2
    assert run_doctor(["--prefill", "nowhere"]).returncode == 2
