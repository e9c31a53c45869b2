"""The plots of a report, as plotly figures.

Decides which plots a report has and how they are drawn. Refuses to know the page around them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvcourier.bench.report import Comparison, Report, Row, names_of, phase_means
from kvcourier.bench.samples import METRICS, Metric
from kvcourier.bench.stats import LEVEL, Summary
from kvcourier.bench.timeline import PHASES, Lane, Span, Timeline

# Told apart by people who do not see all colours (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#B8A800")
_PHASE_COLOURS = dict(
    zip(PHASES, ("#BFBFBF", "#56B4E9", "#E69F00", "#D55E00", "#009E73"), strict=True)
)
_SPAN_COLOURS = {
    "first token": "#8C8C8C",
    "more tokens": "#D0D0D0",
    "prefill": "#56B4E9",
    "posting": "#CC79A7",
    "write in flight": "#D55E00",
    "read in flight": "#D55E00",
    "set up and register": "#B8A800",
    "set up": "#B8A800",
    "wait for KV": "#F3DFA2",
}
_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#222"}
_MAX_EXAMPLES = 12
# Of runs with a row per rate, the quantities that are drawn against it.
_AGAINST_QPS = {"sweep": (METRICS[0], METRICS[2]), "trial": (METRICS[0], METRICS[2], METRICS[3])}


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot with its heading and a sentence on how to read it."""

    heading: str
    sentence: str
    figure: Any


def charts(report: Report) -> list[Chart]:
    """All plots that the report has numbers for."""
    made = []
    if report.kind in _AGAINST_QPS:
        made.append(_against_qps(report, _AGAINST_QPS[report.kind]))
    else:
        made.append(_medians(report))
    for base, comparisons in report.by_base().items():
        if any(each.ratio(metric) for each in comparisons for metric in METRICS):
            made.append(_ratios(report, base, comparisons))
    if any(phase_means(row) for row in report.measured):
        made.append(_phases(report))
    examples = _examples(report)
    if examples:
        made.append(_timelines(report, examples))
    return made


def _against_qps(report: Report, metrics: Sequence[Metric]) -> Chart:
    rows = report.measured
    lengths = sorted({row.cell.input_tokens for row in rows})
    figure = make_subplots(
        rows=len(metrics),
        cols=len(lengths),
        shared_xaxes=True,
        vertical_spacing=0.07,
        horizontal_spacing=0.06,
        column_titles=[f"{length:,} tokens" for length in lengths],
    )
    for index, name in enumerate(names_of(rows)):
        colour = _COLOURS[index % len(_COLOURS)]
        for line, metric in enumerate(metrics, start=1):
            for column, length in enumerate(lengths, start=1):
                own = [r for r in rows if r.name == name and r.cell.input_tokens == length]
                shown = line == 1 and column == 1
                for trace in _band(name, colour, _summaries(own, metric), shown):
                    figure.add_trace(trace, row=line, col=column)
    for line, metric in enumerate(metrics, start=1):
        figure.update_yaxes(title_text=f"{metric.title}, ms", row=line, col=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(title_text="requests per second", row=len(metrics))
    _dress(figure, height=260 * len(metrics) + 80)
    return Chart(
        "Time against load",
        f"Medians with their {LEVEL:.0%} intervals. Where a line climbs, requests wait in line.",
        figure,
    )


def _summaries(rows: Sequence[Row], metric: Metric) -> list[tuple[float, Summary]]:
    found = [(row.cell.qps, row.collected.summary(metric)) for row in rows]
    return [(qps, summary) for qps, summary in found if summary is not None]


def _band(
    name: str, colour: str, points: Sequence[tuple[float, Summary]], is_shown: bool
) -> list[Any]:
    """A line of medians, and the band of their intervals; bars where there is one point only."""
    rates = [qps for qps, _ in points]
    medians = [summary.median for _, summary in points]
    bars = None
    made = []
    if len(points) == 1:
        bars = _error(
            [m.value for m in medians], [m.low for m in medians], [m.high for m in medians]
        )
    else:
        made.append(
            go.Scatter(
                x=[*rates, *reversed(rates)],
                y=[*(m.high for m in medians), *(m.low for m in reversed(medians))],
                mode="lines",
                fill="toself",
                fillcolor=_faint(colour),
                line={"width": 0},
                hoverinfo="skip",
                legendgroup=name,
                showlegend=False,
            )
        )
    made.append(
        go.Scatter(
            x=rates,
            y=[m.value for m in medians],
            error_y=bars,
            mode="lines+markers",
            name=name,
            legendgroup=name,
            showlegend=is_shown,
            line={"color": colour, "width": 2},
            customdata=[[m.low, m.high, s.p90.value, s.n] for m, (_, s) in _both(medians, points)],
            hovertemplate=(
                f"<b>{name}</b><br>%{{x:g}} req/s: %{{y:.1f}} ms "
                "[%{customdata[0]:.1f}, %{customdata[1]:.1f}]"
                "<br>90th percentile %{customdata[2]:.1f} ms, n = %{customdata[3]}<extra></extra>"
            ),
        )
    )
    return made


def _both(medians: Sequence[Any], points: Sequence[Any]) -> Any:
    return zip(medians, points, strict=True)


def _medians(report: Report) -> Chart:
    names = [report.label(row) for row in report.measured]
    figure = _columns_per_metric(names, "ms")
    for column, metric in enumerate(METRICS, start=1):
        told = [
            (report.label(row), summary)
            for row in report.measured
            if (summary := row.collected.summary(metric)) is not None
        ]
        values = [summary.median.value for _, summary in told]
        lows = [summary.median.low for _, summary in told]
        highs = [summary.median.high for _, summary in told]
        trace = go.Scatter(
            x=values,
            y=[name for name, _ in told],
            error_x=_error(values, lows, highs),
            mode="markers",
            marker={"size": 9, "color": _COLOURS[0]},
            customdata=[[s.median.low, s.median.high, s.p90.value, s.n] for _, s in told],
            hovertemplate=(
                "<b>%{y}</b><br>%{x:.1f} ms [%{customdata[0]:.1f}, %{customdata[1]:.1f}]"
                "<br>90th percentile %{customdata[2]:.1f} ms, n = %{customdata[3]}<extra></extra>"
            ),
        )
        figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(rangemode="tozero")
    return Chart("Times", f"Medians with their {LEVEL:.0%} intervals.", figure)


def _ratios(report: Report, base: str, comparisons: Sequence[Comparison]) -> Chart:
    figure = _columns_per_metric([report.label(each.b) for each in comparisons], "ratio, log")
    for column, metric in enumerate(METRICS, start=1):
        told = [
            (report.label(each.b), found)
            for each in comparisons
            if (found := each.ratio(metric)) is not None
        ]
        values = [found.estimate.value for _, found in told]
        lows = [found.estimate.low for _, found in told]
        highs = [found.estimate.high for _, found in told]
        colours = [_verdict_colour(found.verdict.name) for _, found in told]
        trace = go.Scatter(
            x=values,
            y=[name for name, _ in told],
            error_x=_error(values, lows, highs),
            mode="markers",
            marker={"size": 10, "color": colours},
            customdata=[
                [f.estimate.low, f.estimate.high, f.num_pairs, f.num_turns] for _, f in told
            ],
            hovertemplate=(
                "<b>%{y}</b><br>%{x:.3f} [%{customdata[0]:.3f}, %{customdata[1]:.3f}]"
                "<br>%{customdata[2]} pairs in %{customdata[3]} turns<extra></extra>"
            ),
        )
        figure.add_trace(trace, row=1, col=column)
        figure.add_vline(x=1, line={"color": "#444", "dash": "dot", "width": 1}, row=1, col=column)
        figure.update_xaxes(
            type="log", tickvals=_ratio_ticks(lows, highs), tickangle=0, row=1, col=column
        )
    return Chart(
        f"Ratio to {base}",
        f"Time divided by that of {base} on the same prompts, geometric mean over pairs with its "
        f"{LEVEL:.0%} interval. Left of 1 is faster. Green: faster, red: slower, grey: cannot "
        "tell.",
        figure,
    )


def _ratio_ticks(lows: Sequence[float], highs: Sequence[float]) -> list[float]:
    """Where a log axis is labelled: plotly's own ticks of a short stretch are bare digits."""
    low, high = min([1.0, *lows]), max([1.0, *highs])
    if high / low < 1.3:
        return [0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.25]
    if high / low < 3:
        return [0.4, 0.5, 0.65, 0.8, 1, 1.25, 1.5, 2, 2.5]
    if high / low < 30:
        return [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20]
    return [0.001, 0.01, 0.1, 1, 10, 100, 1000]


def _verdict_colour(name: str) -> str:
    return {"B_BETTER": "#009E73", "A_BETTER": "#C0392B"}.get(name, "#9A9A9A")


def _columns_per_metric(names: Sequence[str], unit: str) -> Any:
    figure = make_subplots(
        rows=1,
        cols=len(METRICS),
        shared_yaxes=True,
        horizontal_spacing=0.025,
        subplot_titles=[metric.title for metric in METRICS],
    )
    figure.update_yaxes(categoryorder="array", categoryarray=list(reversed(names)))
    figure.update_xaxes(title_text=unit)
    _dress(figure, height=150 + 34 * max(2, len(names)))
    figure.update_layout(showlegend=False)
    return figure


def _phases(report: Report) -> Chart:
    told = [(report.label(row), phase_means(row)) for row in report.measured]
    told = [(name, means) for name, means in told if means]
    figure = go.Figure()
    for phase in PHASES:
        figure.add_trace(
            go.Bar(
                x=[means[phase] for _, means in told],
                y=[name for name, _ in told],
                orientation="h",
                name=phase,
                marker_color=_PHASE_COLOURS[phase],
                hovertemplate="<b>%{y}</b><br>" + phase + ": %{x:.1f} ms<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.35, legend_traceorder="normal")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="ms, mean")
    _dress(figure, height=170 + 34 * len(told))
    return Chart(
        "Where the time to the first token goes",
        "Phases follow each other without a gap. In push D sets up while P computes, so its set-up "
        "shows in pull only.",
        figure,
    )


def _examples(report: Report) -> list[tuple[str, float, Timeline]]:
    """The request with the median TTFT of each row; of a sweep those of the highest rates."""
    rows = (
        sorted(report.measured, key=lambda row: -row.cell.qps)
        if report.kind in _AGAINST_QPS
        else (report.measured)
    )
    found = []
    for row in rows:
        sample = row.collected.example()
        if sample is not None and sample.timeline is not None:
            found.append((report.label(row), sample.answer.token_s[0], sample.timeline))
    return found[:_MAX_EXAMPLES]


def _timelines(report: Report, examples: Sequence[tuple[str, float, Timeline]]) -> Chart:
    figure = make_subplots(
        rows=len(examples),
        cols=1,
        shared_xaxes=True,
        subplot_titles=[name for name, _, _ in examples],
        vertical_spacing=min(0.05, 0.3 / len(examples)),
    )
    seen: set[str] = set()
    for line, (_, _, timeline) in enumerate(examples, start=1):
        for name in dict.fromkeys(span.name for span in timeline.spans):
            spans = [span for span in timeline.spans if span.name == name]
            figure.add_trace(_bars(name, spans, name not in seen), row=line, col=1)
            seen.add(name)
        figure.add_trace(_marks(timeline), row=line, col=1)
    # Bars of spans that overlap in a lane lie on each other; the longer ones are drawn first.
    figure.update_layout(barmode="overlay", bargap=0.2)
    figure.update_yaxes(categoryorder="array", categoryarray=[*reversed(Lane)])
    shown_ms = max(first for _, first, _ in examples) * 1.25e3
    figure.update_xaxes(range=[-0.01 * shown_ms, shown_ms])
    figure.update_xaxes(title_text="ms since the request was sent", row=len(examples))
    for note in figure.layout.annotations:
        note.update(x=0, xanchor="left", font={"size": 13})
    _dress(figure, height=110 + 135 * len(examples))
    return Chart(
        "Single requests",
        "Of each row the request with the median TTFT. Diamonds are entries of the stories that P "
        "and D keep; point at one for its details. Drag to zoom, double-click to see all.",
        figure,
    )


def _bars(name: str, spans: Sequence[Span], is_shown: bool) -> Any:
    return go.Bar(
        base=[span.start_s * 1e3 for span in spans],
        x=[(span.end_s - span.start_s) * 1e3 for span in spans],
        y=[span.lane.value for span in spans],
        orientation="h",
        name=name,
        legendgroup=name,
        showlegend=is_shown,
        marker={"color": _SPAN_COLOURS.get(name, "#999"), "line": {"width": 0}},
        hovertemplate=name + ": %{x:.2f} ms from %{base:.2f}<extra></extra>",
    )


def _marks(timeline: Timeline) -> Any:
    return go.Scatter(
        x=[mark.at_s * 1e3 for mark in timeline.marks],
        y=[mark.lane.value for mark in timeline.marks],
        mode="markers",
        marker={"symbol": "diamond", "size": 7, "color": "#222"},
        showlegend=False,
        customdata=[[mark.name, json.dumps(dict(mark.details))] for mark in timeline.marks],
        hovertemplate="<b>%{customdata[0]}</b> at %{x:.2f} ms<br>%{customdata[1]}<extra></extra>",
    )


def _error(values: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> Any:
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value for value, high in zip(values, highs, strict=True)],
        "arrayminus": [value - low for value, low in zip(values, lows, strict=True)],
        "thickness": 1.5,
        "width": 4,
    }


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"


def _dress(figure: Any, height: int) -> None:
    figure.update_layout(
        template="plotly_white",
        height=height,
        font=_FONT,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": 1.0, "yref": "container", "yanchor": "top", "x": 0},
        hoverlabel={"align": "left"},
    )
    figure.update_yaxes(automargin=True)
