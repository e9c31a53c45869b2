"""The result as tables for a terminal.

Decides columns and how a number is shown. Refuses to know how it was measured.
"""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE
from rich.table import Table

from kvcourier.bench.report import Comparison, Report, Row, phase_means
from kvcourier.bench.samples import METRICS, Metric
from kvcourier.bench.stats import LEVEL, Estimate, Ratio, Verdict

SAID = {
    Verdict.A_BETTER: "slower",
    Verdict.B_BETTER: "faster",
    Verdict.CANNOT_TELL: "cannot tell",
}
"""A verdict as what it says of the row against the base."""


def tables(report: Report) -> Iterator[Table]:
    """All tables of a report, the most important last."""
    yield _times(report)
    if any(row.not_available for row in report.rows):
        yield _missing(report)
    if any(phase_means(row) for row in report.measured):
        yield _phases(report)
    for base, comparisons in report.by_base().items():
        yield _ratios(report, base, comparisons)


def _times(report: Report) -> Table:
    what = f"median (90th percentile),\nbelow it the {LEVEL:.0%} interval of the median"
    table = _table(f"{report.title}; ms: {what}")
    for metric in METRICS:
        table.add_column(metric.title.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("prefix\nhits", justify="right", no_wrap=True)
    table.add_column("n\nfailed", justify="right", no_wrap=True)
    for row in report.measured:
        failures = len(row.collected.failures)
        table.add_row(
            report.label(row, "\n"),
            *(_time(row, metric) for metric in METRICS),
            "\n".join(f"{side} {rate:.0%}" for side, rate in row.collected.hit_rates.items())
            or "-",
            f"{len(row.collected.samples) + failures}\n{failures}",
            style="red" if failures else None,
        )
    return table


def _time(row: Row, metric: Metric) -> str:
    summary = row.collected.summary(metric)
    if summary is None:
        return "-"
    median = summary.median
    return f"{_number(median.value)} ({_number(summary.p90.value)})\n{_interval(median)}"


def _missing(report: Report) -> Table:
    table = _table("not available")
    table.add_column("why")
    for row in report.rows:
        if row.not_available:
            table.add_row(row.name, row.not_available)
    return table


def _phases(report: Report) -> Table:
    told = [(row, phase_means(row)) for row in report.measured]
    names = list(dict.fromkeys(name for _, means in told for name in means))
    table = _table("where the time to the first token goes; mean ms")
    for name in names:
        table.add_column(name, justify="right")
    for row, means in told:
        if means:
            table.add_row(report.label(row, "\n"), *(_number(means[name]) for name in names))
    return table


def _ratios(report: Report, base: str, comparisons: Sequence[Comparison]) -> Table:
    table = _table(f"time / time of {base}, its {LEVEL:.0%} interval; below 1 is faster")
    for metric in METRICS:
        table.add_column(metric.title, justify="right", no_wrap=True)
    for comparison in comparisons:
        ratios = [comparison.ratio(metric) for metric in METRICS]
        table.add_row(report.label(comparison.b, "\n"), *map(_ratio, ratios))
    return table


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    estimate = ratio.estimate
    interval = f"{estimate.low:.2f}-{estimate.high:.2f}"
    return f"{estimate.value:.2f}\n{interval}\n{SAID[ratio.verdict]}"


def verdicts(report: Report) -> list[str]:
    """Of two sides, a sentence per quantity: which is better, or that one cannot tell."""
    if report.kind != "compare":
        return []
    said = []
    for comparison in report.comparisons:
        for metric in METRICS:
            found = comparison.ratio(metric)
            if found is not None:
                pairs = f"{found.num_pairs} pairs in {found.num_turns} turns"
                said.append(f"{metric.title}: {found.verdict} ({pairs})")
    return said


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column("", overflow="fold", min_width=14)
    return table


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _interval(estimate: Estimate) -> str:
    return f"{_number(estimate.low)}-{_number(estimate.high)}"
