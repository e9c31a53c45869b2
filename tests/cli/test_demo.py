"""What the demo reads from a stream and from stories, and what it concludes."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvcourier.cli.app import app
from kvcourier.demo import run as run_module
from kvcourier.demo.prompts import PROMPTS
from kvcourier.demo.report import ModeResult, Report, Sample
from kvcourier.demo.run import first_difference
from kvcourier.demo.traffic import StoryMissing, read_traffic

Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(handler))


PREFILL_FINISHED = {"at_unix_s": 100.5, "what": "prefill_finished", "thread": "engine"}
POSTED = {"at_unix_s": 100.6, "what": "posted", "thread": "c", "bytes": 64, "pieces": 2}


def stories(prefill: list[Any] | None, decode: list[Any] | None) -> Handler:
    known = {"p": prefill, "d": decode}

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/kvcourier/story/t-1"
        entries = known[request.url.host]
        return httpx.Response(404) if entries is None else httpx.Response(200, json=entries)

    return answer


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ([PREFILL_FINISHED], [POSTED, POSTED]),
        ([PREFILL_FINISHED, POSTED, POSTED], []),
        ([POSTED, PREFILL_FINISHED, POSTED], None),
    ],
    ids=["pull", "push", "push-early"],
)
def test_whoever_posted_is_counted(prefill: list[Any], decode: list[Any] | None) -> None:
    traffic = read_traffic(client_of(stories(prefill, decode)), "http://p", "http://d", "t-1")
    assert (traffic.prefill_finished_unix_s, traffic.num_bytes, traffic.num_pieces) == (
        100.5,
        128,
        4,
    )


def test_a_story_may_come_a_moment_late() -> None:
    answers = iter([404, 404, 200, 200])

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(next(answers), json=[PREFILL_FINISHED, POSTED])

    assert read_traffic(client_of(answer), "http://p", "http://d", "t-1").num_bytes == 128


@pytest.mark.parametrize(
    ("prefill", "decode", "sentence"),
    [
        ([PREFILL_FINISHED], [], "lacks a posted operation"),
        ([], [POSTED], "lacks the end of prefill"),
        (None, None, "lacks a posted operation"),
    ],
)
def test_an_incomplete_story_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
    prefill: list[Any] | None,
    decode: list[Any] | None,
    sentence: str,
) -> None:
    monkeypatch.setattr("kvcourier.demo.traffic._PATIENCE_S", 0)
    with pytest.raises(StoryMissing, match=sentence):
        read_traffic(client_of(stories(prefill, decode)), "http://p", "http://d", "t-1")


def test_no_transfer_is_a_failure() -> None:
    with pytest.raises(StoryMissing, match="named no transfer"):
        read_traffic(client_of(stories([], [])), "http://p", "http://d", "")


@pytest.mark.parametrize(
    ("expected", "found", "sentence"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], "token 1: expected 2 .* found 3"),
        ([1, 2], [1], "expected 2 tokens .* found 1"),
        ([1], [1, 2], "expected 1 tokens .* found 2"),
    ],
)
def test_first_difference(expected: list[int], found: list[int], sentence: str | None) -> None:
    difference = first_difference(expected, found)
    assert difference is None if sentence is None else re.search(sentence, difference or "")


def sample(scale: float) -> Sample:
    return Sample(
        ttft_s=0.1 * scale,
        after_prefill_s=0.01 * scale,
        tpot_s=0.02 * scale,
        num_bytes=int(1000 * scale),
        num_pieces=int(10 * scale),
    )


def test_the_json_file_has_medians() -> None:
    good = ModeResult([sample(1), sample(2), sample(9)])
    report = Report({"pull": good, "push": ModeResult([sample(1), sample(3)])})
    assert report.succeeded
    assert report.as_json() == {
        "tokens_equal": True,
        "modes": {
            "pull": {
                "ttft_ms": 200.0,
                "after_prefill_ms": 20.0,
                "tpot_ms": 40.0,
                "bytes": 2000,
                "pieces": 20,
                "failures": 0,
            },
            "push": {
                "ttft_ms": 200.0,
                "after_prefill_ms": 20.0,
                "tpot_ms": 40.0,
                "bytes": 2000,
                "pieces": 20,
                "failures": 0,
            },
        },
    }


@pytest.mark.parametrize(
    ("push", "tokens_equal", "problem"),
    [
        (ModeResult([sample(1)], mismatches=["prompt 1: token 3"]), False, "push: prompt 1: token"),
        (ModeResult([sample(1)], failures=["prompt 2: HTTP 503"]), True, "push: prompt 2: HTTP"),
        (ModeResult(), False, "push: no answer"),
    ],
)
def test_anything_wrong_is_named_and_no_success(
    push: ModeResult, tokens_equal: bool, problem: str
) -> None:
    report = Report({"pull": ModeResult([sample(1)]), "push": push})
    assert not report.succeeded
    assert report.tokens_equal is tokens_equal
    assert any(sentence.startswith(problem) for sentence in report.problems())
    assert report.as_json()["modes"]["push"]["failures"] == len(push.failures)


def test_nothing_run_is_no_success() -> None:
    assert not Report({}).succeeded
    assert not Report({}).tokens_equal


def test_the_table_shows_what_the_json_has() -> None:
    report = Report({"pull": ModeResult([sample(2)]), "push": ModeResult()})
    output = io.StringIO()
    Console(file=output, width=120).print(report.table())
    row = next(line for line in output.getvalue().splitlines() if "pull" in line)
    assert all(text in row for text in ("200.0", "20.0", "40.0", "2,000", "20"))


@pytest.mark.parametrize(
    ("failures", "code", "text"), [([], 0, "tokens equal"), (["HTTP 503"], 1, "HTTP 503")]
)
def test_the_command_writes_the_file_and_ends_with_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: list[str], code: int, text: str
) -> None:
    report = Report({mode: ModeResult([sample(1)], failures=failures) for mode in ("pull", "push")})
    monkeypatch.setattr(run_module, "run_demo", lambda settings, console: report)
    path = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["demo", "--json", str(path)])
    assert result.exit_code == code
    assert text in result.stdout
    assert json.loads(path.read_text()) == report.as_json()


@pytest.mark.e2e
def test_a_child_that_cannot_start_is_a_failure_with_its_log() -> None:
    result = CliRunner().invoke(app, ["demo", "--serve-flag=--block-size=0"])
    assert result.exit_code == 1
    assert re.search(
        r"(?s)(single|prefill|decode) ended with exit code 2.*block-size", result.stderr
    )
    assert "The logs of all processes are in" in result.stdout


def test_prompts_differ_and_are_mixed() -> None:
    words = sorted(len(prompt.split()) for prompt in PROMPTS)
    assert len(set(PROMPTS)) == len(PROMPTS) == 8
    assert words[0] < 10
    assert words[-1] > 250
