"""Help, exit codes, and how errors are shown."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvcourier.cli import app as app_module
from kvcourier.cli.app import app
from kvcourier.config import TransferMode
from kvcourier.errors import ConfigError, PeerLost
from kvcourier.probe.run import ProbeConfig, ProbeResult, Spread

COMMANDS = ("demo", "serve", "route", "probe", "story", "drain")


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """The app with a command `fail` that raises what the list holds."""
    errors: list[BaseException] = []
    before = list(app.registered_commands)

    @app.command("fail")
    def fail() -> None:
        raise errors[0]

    yield errors
    app.registered_commands[:] = before


def test_without_arguments_the_commands_are_shown(runner: CliRunner) -> None:
    result = runner.invoke(app, [])
    assert result.exit_code == 2
    assert all(re.search(rf"^  {command} ", result.output, re.M) for command in COMMANDS)


def test_the_help_says_what_exit_codes_mean(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for code in (0, app_module.EXIT_FAILED, app_module.EXIT_USAGE, app_module.EXIT_INTERRUPTED):
        assert re.search(rf"^ +{code}  ", result.output, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_with_an_example(runner: CliRunner, command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert re.search(rf"^ +kvcourier {command}", result.output, re.M)
    assert "--config" in result.output


def test_help_needs_neither_torch_nor_nixl() -> None:
    code = (
        "import sys\n"
        "from kvcourier.cli.app import app\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'nixl', 'transformers', 'zmq'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigError("--port: expected a number"), 2, "kvcourier: --port: expected a number\n"),
        (PeerLost("the agent d-0 is gone"), 1, "kvcourier: the agent d-0 is gone\n"),
        (KeyboardInterrupt(), 130, "kvcourier: interrupted\n"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    runner: CliRunner, failing: list[BaseException], error: BaseException, code: int, sentence: str
) -> None:
    failing.append(error)
    result = runner.invoke(app, ["fail"])
    assert result.exit_code == code
    assert result.stderr == sentence
    assert result.stdout == ""


def test_debug_shows_the_traceback(runner: CliRunner, failing: list[BaseException]) -> None:
    failing.append(PeerLost("gone"))
    assert isinstance(runner.invoke(app, ["--debug", "fail"]).exception, PeerLost)


def test_a_bug_is_not_dressed_up(runner: CliRunner, failing: list[BaseException]) -> None:
    failing.append(ZeroDivisionError())
    assert isinstance(runner.invoke(app, ["fail"]).exception, ZeroDivisionError)


def test_sigterm_unwinds_like_ctrl_c(runner: CliRunner) -> None:
    before = list(app.registered_commands)
    unwound: list[str] = []

    @app.command("wait")
    def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            unwound.append("yes")

    try:
        handler = signal.getsignal(signal.SIGTERM)
        result = runner.invoke(app, ["wait"])
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        app.registered_commands[:] = before
    assert (result.exit_code, unwound) == (130, ["yes"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--role", "prefiller"], "prefill.*decode.*both"),
        (["serve", "--dtype", "int4"], "auto.*float32.*bfloat16.*float16"),
        (["serve", "--kv-layout", "nhd "], "NHD.*HND"),
        (["serve", "--port", "70000"], "65535"),
        (["serve", "--block-size", "0"], "1"),
        (["serve", "--block-size", "many"], "integer"),
        (["serve", "--kv-modes", "pull,shove"], "--kv-modes: expected some of pull, push.*'shove'"),
        (["serve", "--kv-modes", "none,pull"], "--kv-modes: expected.*'none'"),
        (["serve", "--kv-modes", ""], "--kv-modes: expected some of pull, push.*found nothing"),
        (["serve", "--num-blocks", "9", "--kv-cache-gb", "1"], "found both"),
        (["serve", "--kv-lease-duration", "-1"], "kv_lease_duration: expected seconds above 0"),
        (["serve", "--kv-lease-duration", "nan"], "kv_lease_duration: expected seconds above 0"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["route"], "prefill: expected at least one"),
        (["route", "--prefill", "here", "--decode", "http://d:1"], "http://host:port.*'here'"),
        (
            ["route", "--prefill", "http://p:1", "--decode", "http://d:1", "--policy", "best"],
            "policy: expected one of round_robin.*'best'",
        ),
        (["route", "--prefill", "http://p:1", "--decode", "http://d:1", "--mode", "x"], "pull"),
        (["demo", "--num-tokens", "0"], "1"),
        (["demo", "--json", "/nowhere/at/all.json"], "the folder /nowhere/at does not exist"),
        (["teleport"], "teleport"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_refused_with_what_is_allowed(
    runner: CliRunner, arguments: list[str], expected: str
) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert re.search(expected, result.stderr, re.S)
    assert "Traceback" not in result.stderr


def test_the_app_is_a_typer_app() -> None:
    # `python -m kvcourier` and the script share one entry point.
    assert isinstance(app, typer.Typer)
    done = subprocess.run(
        [sys.executable, "-m", "kvcourier", "teleport"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "No such command 'teleport'" in done.stderr


def test_the_probe_shows_and_writes_its_result(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ProbeConfig] = []
    spread = Spread(median=5.0, min=1.0, max=9.0, p10=2.0, p90=8.0)

    def measured(config: ProbeConfig, console: object) -> ProbeResult:
        asked.append(config)
        return ProbeResult(config.url, "m", "push", 50, 49, 2, 1, 3, spread, spread, ())

    monkeypatch.setattr("kvcourier.cli.probe.run_probe", measured)
    path = tmp_path / "out.json"
    arguments = ["probe", "--tokens", "50", "--mode", "push", "--json", str(path)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0
    assert "5.0" in result.stdout
    assert json.loads(path.read_text())["ttft_ms"]["median"] == 5.0
    assert (asked[0].tokens, asked[0].mode) == (50, TransferMode.PUSH)


def test_a_probe_of_nobody_is_one_sentence(runner: CliRunner) -> None:
    result = runner.invoke(app, ["probe", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("kvcourier: ")
    assert "127.0.0.1:1" in result.stderr
