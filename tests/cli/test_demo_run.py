"""The whole demo with stand-ins for the instances and the router, as real processes."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvcourier.demo import run as run_module
from kvcourier.demo.processes import ProcessFailed
from kvcourier.demo.prompts import PROMPTS
from kvcourier.demo.run import DemoSettings, run_demo

pytestmark = pytest.mark.slow

FAKE = (sys.executable, str(Path(__file__).with_name("fake_kvcourier.py")))
LIMIT_S = 60
AS_COMMAND = f"""
import sys
from kvcourier.demo import run
run.PROGRAM = {FAKE!r}
from kvcourier.cli.app import main
sys.argv[1:] = ["demo", "--model", sys.argv[1]]
main()
"""


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one file per process of the demo; temporary folders go beside it."""
    monkeypatch.setattr(run_module, "PROGRAM", FAKE)
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "pids").mkdir()
    return tmp_path / "pids"


def running(pids: Path) -> list[int]:
    numbers = [int(path.name) for path in pids.iterdir()]
    return [number for number in numbers if Path(f"/proc/{number}").exists()]


def run(model: str) -> tuple[Any, str]:
    output = io.StringIO()
    report = run_demo(DemoSettings(model, num_tokens=4), Console(file=output, width=200))
    return report, output.getvalue()


def test_equal_tokens_are_a_success(pids: Path, tmp_path: Path) -> None:
    report, output = run("good")
    assert report.succeeded
    result = report.as_json()
    assert result["tokens_equal"]
    for mode in ("pull", "push"):
        values = result["modes"][mode]
        assert (values["bytes"], values["pieces"], values["failures"]) == (4096, 3, 0)
        assert len(report.modes[mode].samples) == len(PROMPTS)
        assert values["ttft_ms"] > 0
    assert output.count("= single instance") == 2 * len(PROMPTS)
    assert re.search(r"push 1/8 .* w\d+ w\d+ w\d+ w\d+ = single instance", output)
    assert len(list(pids.iterdir())) == 4
    assert running(pids) == []
    assert list(tmp_path.glob("kvcourier-demo-*")) == []


def test_a_different_token_is_found(pids: Path) -> None:
    report, output = run("differs-push")
    assert not report.succeeded
    assert report.as_json()["tokens_equal"] is False
    assert len(report.modes["push"].mismatches) == len(PROMPTS)
    assert report.modes["pull"].mismatches == []
    assert "token 2: expected" in output
    assert "The logs of all processes are in" in output


def test_a_failing_mode_is_counted_and_the_other_goes_on(pids: Path) -> None:
    report, _ = run("fails-pull")
    assert not report.succeeded
    values = report.as_json()["modes"]
    assert values["pull"]["failures"] == len(PROMPTS) + 1  # and the warm-up
    assert values["pull"]["ttft_ms"] is None
    assert values["push"]["failures"] == 0
    assert "HTTP 503: KV did not come" in report.problems()[0]


def test_a_child_that_dies_ends_the_demo_with_its_log(pids: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"(?s)decode ended with exit code 1.*out of memory"):
        run("decode-dies")
    assert running(pids) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("model", "moment", "num_processes"),
    [("never-ready", b"Starting", 3), ("hangs", b"primary colours are w", 4)],
)
def test_an_interrupt_leaves_nothing_running(
    pids: Path, model: str, moment: bytes, num_processes: int, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-c", AS_COMMAND, model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        deadline = time.monotonic() + LIMIT_S
        seen = b""
        while moment not in seen or len(list(pids.iterdir())) < num_processes:
            assert time.monotonic() < deadline, seen
            if select.select([demo.stdout], [], [], 0.05)[0]:
                piece = os.read(demo.stdout.fileno(), 4096)
                assert piece, demo.stderr.read()
                seen += piece
        demo.send_signal(number)
        _, stderr = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 130
    assert stderr == b"kvcourier: interrupted\n"
    assert running(pids) == []
    assert list(pids.parent.glob("kvcourier-demo-*")) == []


def test_the_command_as_a_whole(pids: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code = AS_COMMAND.replace(
        "sys.argv[1]]", "sys.argv[1], '--num-tokens=5', '--json', sys.argv[2]]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "good", str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(path.read_text())["tokens_equal"] is True
    assert f"All {2 * len(PROMPTS) * 5} tokens equal" in done.stdout
