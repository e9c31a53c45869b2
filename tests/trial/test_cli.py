"""`kvcourier trial`: usage errors, and runs against servers and a pair."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcourier.cli.app import app
from kvcourier.demo.processes import Children

FAKE = Path(__file__).parents[1] / "bench" / "fake_openai.py"
LIMIT_S = 300
TINY = "random-llama:layers=2,hidden=64,heads=4,kv_heads=2,head_dim=16,vocab=258"
SIDES = ("http://127.0.0.1:1#pull", "http://127.0.0.1:1#push")

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})


def trial(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvcourier", "trial", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def test_it_explains_itself_with_an_example(runner: CliRunner) -> None:
    result = runner.invoke(app, ["trial", "--help"])
    assert result.exit_code == 0
    assert re.search(r"^ +kvcourier trial http://router:8192#pull", result.output, re.M)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["here", "pair"], "baseline: expected http://host:port, an existing FILE.toml, or pair"),
        (["pair", "pair#shove"], "candidate: expected a mode"),
        ([*SIDES, "--candidate-flags", "--x"], "--candidate-flags: .* is not started here"),
        ([*SIDES, "--qps", "fast"], "--qps: expected numbers"),
        ([*SIDES, "--input-tokens", "0"], "cell: expected numbers above 0"),
        ([*SIDES, "--time-limit", "0"], "--time-limit: expected seconds above 0"),
        ([*SIDES, "--traffic", "nowhere.csv"], "--traffic: cannot read nowhere.csv"),
        ([*SIDES, "--json", "/nowhere/x.json"], "the folder /nowhere does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_used_is_refused_before_anything_starts(
    runner: CliRunner, arguments: list[str], expected: str
) -> None:
    result = runner.invoke(app, ["trial", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(expected, result.stderr, re.S), result.stderr


def test_a_log_that_cannot_be_read_is_one_sentence(runner: CliRunner, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("when,long\n1,2\n")
    result = runner.invoke(app, ["trial", *SIDES, "--traffic", str(log)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected the columns arrival_s" in result.stderr


@pytest.mark.slow
def test_a_log_is_sent_to_two_servers_and_judged(tmp_path: Path) -> None:
    log, out, page = tmp_path / "log.csv", tmp_path / "out.json", tmp_path / "page.html"
    lines = [f"{number / 50},{8 + number % 5},{2 + number % 3}" for number in range(24)]
    log.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))
    logs = tmp_path / "logs"
    logs.mkdir()
    with Children(logs) as children:
        started = [children.start(name, [sys.executable, str(FAKE), "good"]) for name in "ab"]
        urls = [children.wait_ready(each) for each in started]
        done = trial(
            *(f"{url}#default" for url in urls),
            *("--traffic", str(log), "--turns=6", "--requests=4", "--seed=1"),
            *("--json", str(out), "--html", str(page)),
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    rates = [25 * 23 / 23.0 * times for times in (1, 2, 4)]
    assert [row["qps"] for row in found["rows"]] == pytest.approx(
        [rate for rate in rates for _ in range(2)], rel=0.05
    )
    assert all((row["n"], row["failures"]) == (24, 0) for row in found["rows"])
    assert {len(each["points"]) for each in found["decision"]["readings"]} == {3}
    headings = [section["heading"] for section in found["sections"]]
    assert headings[0] == "Does the traffic fit?"
    assert headings[1].startswith("Advice: ")
    assert headings[2:] == ["Not decided", "To switch on", "To switch back"]
    for heading in headings:
        assert heading in done.stdout
        assert heading in page.read_text()
    assert f"Send clients to {urls[1]}." in done.stdout


@pytest.mark.e2e
@pytest.mark.nixl
@pytest.mark.slow
def test_pull_and_push_of_a_pair_started_here(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = trial(
        *("pair#pull", "pair#push", "--model", TINY, "--input-tokens=64", "--qps=20"),
        *("--turns=2", "--requests=2", "--output-tokens=4", "--warm-up=1", "--json", str(out)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    # Two turns are not enough to judge by, and it says so.
    assert found["decision"]["advice"] == "undecided: measure longer"
    assert "fewer than 6 turns" in done.stdout
    # Embedded instances tell when prefill ended, so what push can hide is known in advance.
    assert any("pass after prefill" in each["sentence"] for each in found["fitness"])
    assert "kvcourier route --mode=push" in done.stdout
    assert "kvcourier route --mode=pull" in done.stdout
