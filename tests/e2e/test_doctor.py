"""`kvcourier doctor` as its user runs it, against real processes, well and with planted faults."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from e2e.cluster import Cluster
from ports import free_port

ASK_S = 120.0


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


def visit(*flags: str, environment: dict[str, str] | None = None) -> Visit:
    """Run the command, with JSON on its standard output."""
    ended = run_doctor([*flags, "--json", "-"], environment)
    assert ended.returncode in (0, 1, 3), ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    assert told["exit_code"] == ended.returncode
    return Visit(ended.returncode, told["findings"])


def run_doctor(
    flags: Sequence[str], environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """The process, ended."""
    return subprocess.run(
        [sys.executable, "-m", "kvcourier", "doctor", *flags],
        capture_output=True,
        text=True,
        timeout=ASK_S,
        env=environment,
    )


def test_a_healthy_pair_has_no_trouble(cluster: Cluster) -> None:
    seen = visit(f"--prefill={cluster.prefill.url}", f"--decode={cluster.decode.url}")
    assert seen.troubles() == []
    assert seen.exit_code == 0
    assert seen.of("handshake", "ok") and seen.of("side-channel", "ok")
    cluster.wait_idle()


def test_text_is_for_people(cluster: Cluster) -> None:
    ended = run_doctor([f"--prefill={cluster.prefill.url}", f"--decode={cluster.decode.url}"])
    assert ended.returncode == 0, ended.stdout
    assert "0 errors, 0 warnings" in ended.stdout and "OK " in ended.stdout


def test_a_wrong_port(cluster: Cluster) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    seen = visit(f"--prefill={url}", f"--decode={cluster.decode.url}")
    assert seen.exit_code == 1
    (evidence,) = seen.of("http", "error")
    assert "nothing listens there" in evidence


def test_a_wrong_side_channel_port(cluster: Cluster) -> None:
    port = free_port()
    spec = f"{cluster.prefill.url},engine_id=p,kv_host=127.0.0.1,kv_port={port}"
    seen = visit(f"--prefill={spec}", f"--decode={cluster.decode.url}")
    (evidence,) = seen.of("side-channel", "error")
    assert str(port) in evidence and "refused" in evidence


def test_a_flag_that_cannot_be_used() -> None:
    assert run_doctor([]).returncode == 2
    assert run_doctor(["--prefill", "nowhere"]).returncode == 2
