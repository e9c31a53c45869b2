"""The report as one HTML file that needs nothing else: no network, no second file.

Decides the page around the plots. Refuses to know the plots (`charts`).
"""

import html
from collections.abc import Iterator, Sequence
from typing import Any

from plotly.io import to_html
from plotly.offline import get_plotlyjs

from kvcourier.bench.charts import charts
from kvcourier.bench.report import Comparison, Report, Row, Section
from kvcourier.bench.samples import METRICS
from kvcourier.bench.tables import SAID

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto;
       max-width: 1180px; padding: 24px 28px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 34px 0 2px; }
p { margin: 0 0 8px; color: #555; max-width: 90ch; }
table { border-collapse: collapse; margin: 10px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px; text-align: right; border-bottom: 1px solid #e3e3e3; font-size: 13px;
         white-space: nowrap; }
th { color: #555; font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td small { color: #888; }
pre { background: #f5f5f5; padding: 8px 12px; overflow-x: auto; font-size: 13px; }
.settings { color: #666; font-size: 13px; }
.wide { overflow-x: auto; }
.problem { color: #b03020; }
.faster { color: #007a58; } .slower { color: #b03020; } .cannot { color: #888; }
"""
# Dragging and double-clicking zoom without the bar, which would lie over the legend.
_CONFIG = {"displayModeBar": False, "responsive": True}


def make_page(report: Report) -> str:
    """The whole file as text, about 5 MB, most of it plotly's own script."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    title = html.escape(report.title)
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f"<style>{_STYLE}</style>"
    yield f"<script>{get_plotlyjs()}</script></head><body>"
    yield f"<h1>{title}</h1>"
    told = (f"{name} {value}" for name, value in report.settings.items() if value not in (None, ""))
    yield f'<p class="settings">{html.escape(" · ".join(told))}</p>'
    for sentence in report.sentences():
        yield f'<p class="problem">{html.escape(sentence)}</p>'
    for sentence in report.remarks():
        yield f"<p>Note: {html.escape(sentence)}.</p>"
    for section in report.sections:
        yield from _section(section)
    for chart in charts(report):
        yield f"<h2>{html.escape(chart.heading)}</h2><p>{html.escape(chart.sentence)}</p>"
        yield to_html(chart.figure, full_html=False, include_plotlyjs=False, config=_CONFIG)
    for base, comparisons in report.by_base().items():
        yield from _verdicts(report, base, comparisons)
    yield from _numbers(report.measured)
    yield from _missing(report)
    yield "</body></html>"


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{html.escape(section.heading)}</h2>"
    for sentence in section.sentences:
        yield f"<p>{html.escape(sentence)}</p>"
    if section.commands:
        yield f"<pre>{html.escape(chr(10).join(section.commands))}</pre>"


def _verdicts(report: Report, base: str, comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield f"<h2>Verdicts</h2><p>Against {html.escape(base)}.</p>"
    rows = []
    for comparison in comparisons:
        cells = [html.escape(report.label(comparison.b))]
        for metric in METRICS:
            found = comparison.ratio(metric)
            if found is None:
                cells.append("-")
                continue
            said = SAID[found.verdict]
            estimate = found.estimate
            cells.append(
                f'<span class="{said.split()[0]}">{said}</span> {estimate.value:.2f} '
                f"<small>[{estimate.low:.2f}, {estimate.high:.2f}]</small>"
            )
        rows.append(cells)
    yield _table(["", *(metric.title for metric in METRICS)], rows)


def _numbers(rows: Sequence[Row]) -> Iterator[str]:
    yield "<h2>Numbers</h2><p>ms: median with its interval, mean, 90th percentile.</p>"
    body = []
    for row in rows:
        cells = [html.escape(row.name), f"{row.cell.input_tokens:,}", f"{row.cell.qps:g}"]
        for metric in METRICS:
            summary = row.collected.summary(metric)
            cells.append(_spread(summary))
        hits = " ".join(f"{side} {rate:.0%}" for side, rate in row.collected.hit_rates.items())
        failures = len(row.collected.failures)
        cells += [hits or "-", str(len(row.collected.samples) + failures), str(failures)]
        body.append(cells)
    titles = [metric.title for metric in METRICS]
    heads = ["", "tokens", "req/s", *titles, "prefix hits", "requests", "failures"]
    yield _table(heads, body)


def _spread(summary: Any) -> str:
    if summary is None:
        return "-"
    median = summary.median
    return (
        f"{median.value:.1f} <small>[{median.low:.1f}, {median.high:.1f}] "
        f"mean {summary.mean.value:.1f}, p90 {summary.p90.value:.1f}</small>"
    )


def _missing(report: Report) -> Iterator[str]:
    rows = [
        [html.escape(r.name), html.escape(r.not_available)] for r in report.rows if r.not_available
    ]
    if rows:
        yield "<h2>Not available</h2><p>These combinations were not measured.</p>"
        yield _table(["", "why"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in cells)}</tr>" for cells in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
