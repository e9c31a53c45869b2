"""The commands: usage errors, exit codes, Ctrl-C, and one run on real instances."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcourier.bench.choices import ROWS, Choices
from kvcourier.cli.app import app
from kvcourier.demo.processes import Child, Children

FAKE = Path(__file__).with_name("fake_openai.py")
LIMIT_S = 300
"""Eleven pairs are ready after half a minute, and on a busy machine after minutes."""
TINY = "random-llama:layers=2,hidden=64,heads=4,kv_heads=2,head_dim=16"

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})


@contextlib.contextmanager
def fake_server(tmp_path: Path, behaviour: str) -> Iterator[tuple[Child, str]]:
    logs = tmp_path / "logs"
    logs.mkdir()
    with Children(logs) as children:
        child = children.start("fake", [sys.executable, str(FAKE), behaviour])
        yield child, children.wait_ready(child)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvcourier", "bench", *arguments]


@pytest.mark.parametrize("name", ["sweep", "compare", "ablate"])
def test_each_command_explains_itself_with_an_example(runner: CliRunner, name: str) -> None:
    result = runner.invoke(app, ["bench", name, "--help"])
    assert result.exit_code == 0
    assert re.search(rf"^ +kvcourier bench {name}", result.output, re.M)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sweep", "--target", "here"], "--target: expected http://host:port, found 'here'"),
        (["sweep", "--modes", "pull,shove"], "--modes: expected a mode of .*'shove'"),
        (["sweep", "--modes", ","], "--modes: expected some of pull.*found ','"),
        (["sweep", "--qps", "fast"], "--qps: expected numbers .*'fast'"),
        (["sweep", "--qps", "0"], "cell: expected numbers above 0"),
        (["sweep", "--timeout", "nan"], "--timeout: expected seconds above 0"),
        (["sweep", "--vocab-size", "9"], "vocabulary: expected more than 16 ids, found 9"),
        (["sweep", "--json", "/nowhere/at/all.json"], "the folder /nowhere/at does not exist"),
        (["compare", "old.toml"], "A: expected .* FILE.toml, or pair; found 'old.toml'"),
        (["compare", "pair", "pair#shove"], "B: expected a mode"),
        (["compare", "http://h:1", "--a-flags", "--x"], "http://h:1 is not started here"),
        (["compare", "--b-flags", "'"], "--b-flags: No closing quotation"),
        (["ablate", "--turns", "0"], "--turns"),
        (["ablate", "--fragment", "2"], "--fragment"),
        (["ablate", "--input-tokens", "many"], "--input-tokens: expected numbers .*'many'"),
        (["ablate", "--devices", "cuda:0"], "--devices: .* P,D; found 'cuda:0'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_used_is_refused_before_anything_starts(
    runner: CliRunner, arguments: list[str], expected: str
) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(expected, result.stderr, re.S), result.stderr


def test_nobody_there_is_one_sentence(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = runner.invoke(app, ["bench", "sweep", "--target", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "Nothing answers at http://127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []  # no process, so no logs to keep


def test_a_file_sets_flags_of_a_command_in_the_group(runner: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[serve]\nport = 1\n[bench.sweep]\nmodes = ["pull", "shove"]\n')
    result = runner.invoke(app, ["bench", "sweep", "--config", str(path)])
    assert "found 'shove'" in result.stderr
    path.write_text("[bench.sweep]\nmode = 1\n")
    result = runner.invoke(app, ["bench", "sweep", "--config", str(path)])
    assert "[bench.sweep] mode is no setting; did you mean 'modes'?" in result.stderr
    path.write_text("[bench.sweeps]\n")
    result = runner.invoke(app, ["bench", "sweep", "--config", str(path)])
    assert "found 'bench.sweeps'" in result.stderr


@pytest.mark.slow
def test_a_server_that_is_no_router_can_be_measured_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with fake_server(tmp_path, "good") as (_, url):
        flags = ("--target", f"{url}#default", "--input-tokens=8", "--qps=200", "--requests=5")
        done = subprocess.run(
            command("sweep", *flags, "--seed=3", "--output-tokens=4", "--json", str(out)),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        refused = subprocess.run(
            command("sweep", "--target", url), capture_output=True, text=True, timeout=LIMIT_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["name"], row["n"], row["failures"]) == ("default", 5, 0)
    assert row["ttft_ms"] > 0
    assert row["after_prefill_ms"] is None
    assert refused.returncode == 2
    assert "expected a kvcourier router for mode pull" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_under_load_is_130_and_one_line(tmp_path: Path, number: int) -> None:
    with fake_server(tmp_path, "hangs") as (child, url):
        flags = ("--target", f"{url}#single", "--warm-up=0", "--qps=50", "--requests=20")
        bench = subprocess.Popen(
            command("sweep", *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        with bench:
            while "asked" not in child.log.read_text():
                assert bench.poll() is None, bench.communicate()
            bench.send_signal(number)
            _, stderr = bench.communicate(timeout=LIMIT_S)
    assert (bench.returncode, stderr) == (130, "kvcourier: interrupted\n")
    assert list(tmp_path.glob("kvcourier-bench-*")) == []


@pytest.mark.e2e
@pytest.mark.nixl
@pytest.mark.slow
def test_a_pair_is_started_compared_and_stopped(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the extra `bench` is not installed")
    out, page, trace = (tmp_path / name for name in ("out.json", "out.html", "trace.json"))
    files = ("--json", str(out), "--html", str(page), "--trace", str(trace))
    settings = tmp_path / "push.toml"
    settings.write_text(f'[serve]\nmodel = "{TINY}"\nnum-blocks = 64\n[route]\nmode = "push"\n')
    flags = ("--turns=3", "--requests=2", "--qps=20", "--input-tokens=64", "--output-tokens=4")
    done = subprocess.run(
        command("compare", "pair#pull", str(settings), f"--a-flags=--model={TINY}", *flags, *files),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Too few turns to tell anything, whatever was measured.
    assert "TTFT: cannot tell (6 pairs in 3 turns)" in done.stdout
    data = json.loads(out.read_text())
    assert [row["n"] for row in data["rows"]] == [6, 6]
    for row in data["rows"]:
        assert row["prefix_hit_rates"]["P"] == 0
        assert 0 < row["after_prefill_ms"] < row["ttft_ms"]
        assert row["phases_ms"]["prefill"] > 0
    assert "Single requests" in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"prefill", "read in flight", "write in flight", "landed"} <= names
    assert list(tmp_path.glob("kvcourier-bench-*")) == []


@pytest.mark.e2e
@pytest.mark.nixl
@pytest.mark.slow
def test_every_combination_runs_and_moves_as_it_says(tmp_path: Path) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    flags = ("--turns=1", "--requests=1", "--warm-up=0", "--input-tokens=600", "--output-tokens=3")
    files = ("--json", str(out), "--trace", str(trace))
    done = subprocess.run(
        command("ablate", "--model", TINY, *flags, *files),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    names = {"name", *Choices.__slots__, "ttft_ms", "after_prefill_ms", "tpot_ms"}
    for row in rows:
        assert names <= row.keys()
        assert (row["n"], row["failures"], row["not_available"]) == (1, 0, None), row["name"]
    assert len(rows) == len(ROWS)
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    posted = {processes[e["pid"]]: e["args"]["operation"] for e in events if e["name"] == "posted"}
    assert len(posted) == len(ROWS)
    for name, operation in posted.items():
        row = next(each for each in rows if name.startswith(f"{each['name']}, 600 tokens"))
        # A pull that is to go packed is written: only who has the blocks can gather them.
        is_written = row["initiator"] == "WRITE" or (
            row["path"] == "packed" and row["binding"] == "late"
        )
        assert operation == ("WRITE" if is_written else "READ"), name


def running(marker: str) -> list[int]:
    """Processes whose environment holds the text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.e2e
@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_end_of_the_command_leaves_an_instance_behind(tmp_path: Path, number: int) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    flags = ("--model", TINY, "--modes=push", "--qps=1", "--requests=1000", "--input-tokens=64")
    with subprocess.Popen(
        command("sweep", *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as bench:
        assert bench.stdout is not None
        assert b"pairs started: 1" in bench.stdout.readline()
        # The command, what forks the instances, two of them, the router.
        assert len(running(str(tmp_path))) == 5
        bench.send_signal(number)
        bench.communicate(timeout=LIMIT_S)
    assert bench.returncode == (130 if number == signal.SIGINT else -number)
    deadline = time.monotonic() + LIMIT_S
    while running(str(tmp_path)):
        assert time.monotonic() < deadline, running(str(tmp_path))
        time.sleep(0.02)


@pytest.mark.e2e
@pytest.mark.slow
def test_an_instance_that_does_not_start_is_explained(tmp_path: Path) -> None:
    flags = ("pair", "pair", "--a-flags=--no-such-flag", "--model", TINY)
    done = subprocess.run(
        command("compare", *flags),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "No such option: --no-such-flag" in done.stderr
    assert "The logs of all processes are in" in done.stdout
    assert running(str(tmp_path)) == []
