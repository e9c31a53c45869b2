"""What a run found, in one form for all of them, and that form as JSON and as a trace.

Decides what a row and a comparison are, what goes into the JSON file, and when a run has succeeded.
Refuses to know how it was measured and how it is drawn. Pure.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcourier.bench.choices import Choices
from kvcourier.bench.plan import Cell
from kvcourier.bench.samples import METRICS, Collected, Metric, ratio
from kvcourier.bench.stats import Estimate, Ratio, Summary
from kvcourier.bench.timeline import PHASES, trace_events

MAX_LAG_S = 0.02
"""A request that was sent later than that was not sent as planned."""


@dataclass(slots=True)
class Row:
    """One line of the result.

    Attributes:
        name: of the side or the combination; rows of one name are one series over cells.
        choices: of an ablation's combination, else None.
        not_available: why it was not measured; empty if it was.
    """

    name: str
    cell: Cell
    collected: Collected = field(default_factory=Collected)
    choices: Choices | None = None
    not_available: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A: ratios of their times, by the key of a metric."""

    a: Row
    b: Row

    def ratio(self, metric: Metric) -> Ratio | None:
        """B's time over A's; None without a common request."""
        return ratio(metric, self.a.collected, self.b.collected)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of what a run concludes: a heading, sentences, and lines for a shell."""

    heading: str
    sentences: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """What one run found; it grows while the run goes on.

    Attributes:
        title: what was run, for people.
        settings: what it was run with, by name.
        problems: what failed beside requests.
        notes: what a reader should know.
        sections: what follows from it all, for people; `details` is the same for programs.
    """

    kind: str
    title: str
    settings: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> list[Row]:
        """Rows that have had a turn."""
        return [row for row in self.rows if row.collected.turns]

    def label(self, row: Row, separator: str = ", ") -> str:
        """The row's name, with its cell where rows have several."""
        if len({each.cell for each in self.rows}) == 1:
            return row.name
        return f"{row.name}{separator}{row.cell.input_tokens:,} at {row.cell.qps:g}/s"

    def by_base(self) -> dict[str, list[Comparison]]:
        """Comparisons by the label of what they are against; a trial has one base in many cells."""
        found: dict[str, list[Comparison]] = {}
        for each in self.comparisons:
            base = each.a.name if self.kind == "trial" else self.label(each.a)
            found.setdefault(base, []).append(each)
        return found

    @property
    def succeeded(self) -> bool:
        """Something was measured, and nothing failed."""
        failed = any(row.collected.failures for row in self.rows)
        return bool(self.measured) and not failed and not self.problems

    def sentences(self) -> list[str]:
        """Problems and failures, each kind of failure of a row once."""
        found = list(self.problems)
        for row in self.measured:
            failures = row.collected.failures
            if failures:
                count = f"{len(failures)} failed requests"
                found.append(f"{row.name}, {row.cell}: {count}, the first: {failures[0]}")
        return found

    def remarks(self) -> list[str]:
        """Notes, and what makes the numbers doubtful."""
        found = list(self.notes)
        lag_s = max((row.collected.worst_lag_s for row in self.measured), default=0.0)
        if lag_s > MAX_LAG_S:
            found.append(
                f"requests were sent up to {lag_s * 1e3:.0f} ms later than planned: this machine "
                "was too busy to make the load"
            )
        return found


def as_json(report: Report) -> Any:
    """The JSON form: of an ablation the list of its rows, else settings, rows and comparisons."""
    rows = [row_json(row) for row in report.rows]
    if report.kind == "ablate":
        base = {id(each.b): comparison_json(each) for each in report.comparisons}
        return [
            data | ({"ratios": base[id(row)]} if id(row) in base else {})
            for row, data in zip(report.rows, rows, strict=True)
        ]
    return {
        "kind": report.kind,
        "settings": dict(report.settings),
        "rows": rows,
        "comparisons": [comparison_json(each) for each in report.comparisons],
        "problems": report.sentences(),
        "remarks": report.remarks(),
        "sections": [dataclasses.asdict(each) for each in report.sections],
        **report.details,
    }


def row_json(row: Row) -> dict[str, Any]:
    """One row: medians under the metrics' keys, all else about them under `spread`."""
    summaries = {metric.key: row.collected.summary(metric) for metric in METRICS}
    data: dict[str, Any] = {"name": row.name}
    if row.choices is not None:
        choices = row.choices
        data |= {name: getattr(choices, name) for name in choices.__slots__}
    return data | {
        "input_tokens": row.cell.input_tokens,
        "qps": row.cell.qps,
        **{key: _rounded(each.median.value if each else None) for key, each in summaries.items()},
        "spread": {key: _summary_json(each) for key, each in summaries.items()},
        "phases_ms": {name: _rounded(value) for name, value in phase_means(row).items()},
        "n": len(row.collected.samples),
        "failures": len(row.collected.failures),
        "prefix_hit_rates": {k: _rounded(v) for k, v in row.collected.hit_rates.items()},
        "not_available": row.not_available or None,
    }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Ratios B/A with their intervals and verdicts."""
    data: dict[str, Any] = {"a": comparison.a.name, "b": comparison.b.name}
    for metric in METRICS:
        found = comparison.ratio(metric)
        data[metric.key] = found and {
            "ratio": _rounded(found.estimate.value),
            "interval": [_rounded(found.estimate.low), _rounded(found.estimate.high)],
            "pairs": found.num_pairs,
            "turns": found.num_turns,
            "verdict": found.verdict.value,
        }
    return data


def phase_means(row: Row) -> dict[str, float]:
    """Mean ms of each phase of the time to the first token, in order; empty without stories.

    Means, because they add up to the mean TTFT; medians of parts do not add up to anything.
    """
    timelines = [each.timeline for each in row.collected.samples if each.timeline]
    if not timelines:
        return {}
    sums = dict.fromkeys(PHASES, 0.0)
    for timeline in timelines:
        for phase in timeline.phases:
            sums[phase.name] += phase.duration_s
    return {name: total / len(timelines) * 1e3 for name, total in sums.items()}


def as_trace(report: Report) -> dict[str, Any]:
    """Every request whose instances told its story, as a Chrome trace."""
    named = [
        (f"{row.name}, {row.cell} #{number}", each.answer.sent_unix_s, each.timeline)
        for row in report.measured
        for number, each in enumerate(row.collected.samples, start=1)
        if each.timeline is not None
    ]
    return trace_events(named)


def _summary_json(summary: Summary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    names = ("median", "mean", "p90", "p99")
    return {"n": summary.n} | {name: _estimate(getattr(summary, name)) for name in names}


def _estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {
        "value": _rounded(estimate.value),
        "interval": [_rounded(estimate.low), _rounded(estimate.high)],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def names_of(rows: Sequence[Row]) -> list[str]:
    """Names of rows, each once, in order."""
    return list(dict.fromkeys(row.name for row in rows))
