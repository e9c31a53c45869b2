"""JSON, tables and the page, from reports that no run has made."""

import io
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.reports import CELL, ablation, comparison, filled, sweep
from kvcourier.bench.plan import Cell
from kvcourier.bench.report import Report, Row, as_json, as_trace, phase_means
from kvcourier.bench.run import Outputs
from kvcourier.bench.samples import METRICS, Turn
from kvcourier.bench.tables import tables, verdicts
from kvcourier.errors import ConfigError


def ablation_of_two_lengths() -> Report:
    return ablation(CELL, Cell(2048, 2.0, 2))


REPORTS = (ablation, ablation_of_two_lengths, sweep, comparison)


def through_json(report: Report) -> Any:
    return json.loads(json.dumps(as_json(report), allow_nan=False))


def test_an_ablation_is_a_list_with_every_combination() -> None:
    rows = through_json(ablation())
    assert len(rows) == len(ablation().rows)
    for row in rows:
        choices = ("binding", "initiator", "posting", "granularity", "path")
        assert all(isinstance(row[choice], str) for choice in ("name", *choices))
        assert {"ttft_ms", "after_prefill_ms", "tpot_ms", "spread", "n"} <= row.keys()
        is_measured = row["not_available"] is None
        assert (row["n"] > 0) is is_measured
        assert (row["ttft_ms"] is not None) is is_measured
    first, second = rows[:2]
    assert "ratios" not in first
    ratio = second["ratios"]["ttft_ms"]
    assert ratio["ratio"] == pytest.approx(1.5)
    assert ratio["verdict"] == "A is better"
    assert (ratio["pairs"], ratio["turns"]) == (16, 8)


def test_rows_of_several_lengths_are_told_apart() -> None:
    report = ablation_of_two_lengths()
    assert list(report.by_base()) == ["kvcourier, 512 at 2/s", "kvcourier, 2,048 at 2/s"]
    rows = [row for row in through_json(report) if row["n"]]
    assert [(row["name"], row["input_tokens"]) for row in rows] == [
        ("kvcourier", 512),
        ("NixlConnector", 512),
        ("kvcourier", 2048),
        ("NixlConnector", 2048),
    ]
    assert [row.get("ratios", {}).get("a") for row in rows] == [None, "kvcourier"] * 2


@pytest.mark.parametrize("make", [sweep, comparison])
def test_other_reports_have_settings_rows_and_comparisons(make: Callable[[], Report]) -> None:
    data = through_json(make())
    assert data["settings"] == {"output tokens": 3, "seed": 1}
    assert len(data["comparisons"]) == len(make().comparisons)
    for row in data["rows"]:
        for metric in METRICS:
            spread = row["spread"][metric.key]
            low, high = spread["median"]["interval"]
            assert low <= row[metric.key] <= high
            assert spread["n"] == row["n"]
        assert row["prefix_hit_rates"] == {"P": 0.0}


def test_phases_add_up_to_the_mean_time_to_the_first_token() -> None:
    row = filled(Row("x", CELL), 1.0)
    summary = row.collected.summary(METRICS[0])
    assert summary is not None
    assert math.fsum(phase_means(row).values()) == pytest.approx(summary.mean.value)
    assert phase_means(Row("empty", CELL)) == {}


def test_failures_are_told_and_are_no_success() -> None:
    report = sweep()
    assert report.succeeded and report.sentences() == []
    report.rows[0].collected.turns.append(Turn((None, None), ("HTTP 503: no", "late")))
    assert not report.succeeded
    assert report.sentences() == [
        "pull, 128 tokens, 1/s, 4 requests: 2 failed requests, the first: HTTP 503: no"
    ]
    assert through_json(report)["rows"][0]["failures"] == 2


def test_nothing_measured_is_no_success() -> None:
    assert not Report("sweep", "", {}, rows=[Row("x", CELL)]).succeeded


def test_only_prompts_that_both_answered_are_compared() -> None:
    report = comparison()
    a, b = (row.collected for row in report.rows)
    a.turns[0] = Turn((None, a.turns[0].samples[1]), ("failed",))
    b.turns.pop()  # as of a run that was cut off
    ratio = report.comparisons[0].ratio(METRICS[0])
    assert ratio is not None
    assert (ratio.num_pairs, ratio.num_turns) == (13, 7)


@pytest.mark.parametrize("make", REPORTS)
@pytest.mark.parametrize("width", [80, 160])
def test_tables_hold_every_row_that_was_measured(make: Callable[[], Report], width: int) -> None:
    report = make()
    console = Console(file=io.StringIO(), width=width)
    for table in tables(report):
        console.print(table)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, output.splitlines())) <= width
    assert "…" not in output
    summary = report.measured[0].collected.summary(METRICS[0])
    assert summary is not None and f"{summary.median.value:.0f}" in output
    if report.comparisons:
        assert "faster" in output or "slower" in output or "cannot" in output


def test_a_comparison_says_what_it_found() -> None:
    said = verdicts(comparison())
    assert said[0] == "TTFT: cannot tell (16 pairs in 8 turns)"
    assert len(said) == len(METRICS)
    assert verdicts(sweep()) == []


def test_a_trace_holds_every_request_with_a_story() -> None:
    report = sweep()
    events = as_trace(report)["traceEvents"]
    requests = sum(len(row.collected.samples) for row in report.rows)
    assert len({event["pid"] for event in events}) == requests


class References(HTMLParser):
    """Whatever a browser would fetch for a page, and the scripts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "poster", "action") and value:
                self.fetched.append((tag, value))


@pytest.mark.slow
@pytest.mark.parametrize("make", REPORTS)
def test_a_page_needs_nothing_but_itself(make: Callable[[], Report], tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the extra `bench` is not installed")
    report = make()
    path = tmp_path / "report.html"
    Outputs(html=path).write(report)
    page = path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    references = References()
    references.feed(page)
    assert references.fetched == []
    styles = "".join(re.findall(r"<style>(.*?)</style>", page, re.S))
    assert "url(" not in styles and "@import" not in styles
    assert page.count("Plotly.newPlot(") >= 3
    # Names come from the user and from the network.
    assert "<of nothing>" not in page
    for row in report.measured:
        assert row.name in page


def test_files_are_checked_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--trace: the folder .*nowhere does not exist"):
        Outputs(trace=tmp_path / "nowhere" / "x.json")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kvcourier\[bench\]"):
        Outputs(html=tmp_path / "x.html")
