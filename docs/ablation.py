"""Writes the tables and plots of docs/ablation.md from what `kvcourier bench ablate --json` wrote.

Decides the form of both. Refuses to know how anything was measured: a result that is not there yet
leaves its place as it is.

    python docs/ablation.py           rewrites the page and its plots
    python docs/ablation.py --check   only says whether they are up to date (exit code 1: no)
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "ablation.md"
BENCHMARKS = DOCS.parent / "benchmarks"
RESULTS: Mapping[str, Path] = {
    "cpu": BENCHMARKS / "results" / "ablation.json",
    "cpu-fragmented": BENCHMARKS / "results" / "ablation-fragmented.json",
    "one-gpu": BENCHMARKS / "gpu" / "results" / "ablation-one-gpu.json",
    "gpu": BENCHMARKS / "gpu" / "results" / "ablation.json",
    "gpu-fragmented": BENCHMARKS / "gpu" / "results" / "ablation-fragmented.json",
}
"""By the name that its place on the page and its plot have."""

METRICS = {"ttft_ms": "TTFT", "after_prefill_ms": "after prefill", "tpot_ms": "TPOT"}
COMPARED = ("ttft_ms", "after_prefill_ms")
_SAID = {"A is better": "slower", "B is better": "faster", "cannot tell": "cannot tell"}

Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Medians with their intervals, and the ratio to the row that each is compared with."""
    several = len({row["input_tokens"] for row in rows}) > 1
    heads = [*(["tokens"] if several else []), "combination", *METRICS.values(), "against"]
    heads += [f"{METRICS[metric]} ratio" for metric in COMPARED]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in rows:
        cells = [f"{row['input_tokens']:,}"] if several else []
        cells += [row["name"], *(_time(row, metric) for metric in METRICS)]
        ratios = row.get("ratios")
        if ratios is None:
            cells += ["-"] * (1 + len(COMPARED))
        else:
            cells += [ratios["a"], *(_ratio(ratios[metric]) for metric in COMPARED)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(row: Row, metric: str) -> str:
    spread = row["spread"][metric]
    if spread is None:
        return "-"
    low, high = spread["median"]["interval"]
    return f"{_number(row[metric])} ({_number(low)}-{_number(high)})"


def _ratio(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    low, high = found["interval"]
    return f"{found['ratio']:.2f} ({low:.2f}-{high:.2f}) {_SAID[found['verdict']]}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


# Plots.

_LABELS, _PANEL, _GAP, _LINE, _TOP = 230, 210, 30, 20, 46
_COLOURS = ("#0072B2", "#D55E00", "#009E73")


def plot(rows: Sequence[Row]) -> str:
    """Medians with their intervals as an SVG: a panel per quantity, a line per row."""
    measured = [row for row in rows if row["n"]]
    width = _LABELS + len(METRICS) * (_PANEL + _GAP)
    height = _TOP + _LINE * len(measured) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    lengths = sorted({row["input_tokens"] for row in measured})
    for line, row in enumerate(measured):
        label = row["name"] + (f", {row['input_tokens']:,}" if len(lengths) > 1 else "")
        y = _TOP + _LINE * line + _LINE / 2
        parts.append(_text(_LABELS - 8, y + 4, label, "end"))
    for column, (metric, title) in enumerate(METRICS.items()):
        left = _LABELS + column * (_PANEL + _GAP)
        parts += _panel(measured, metric, f"{title}, ms", left, lengths)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    rows: Sequence[Row], metric: str, title: str, left: float, lengths: Sequence[int]
) -> Iterator[str]:
    spreads = [row["spread"][metric] for row in rows]
    top = max((each["median"]["interval"][1] for each in spreads if each), default=1.0)
    step = _step(top)
    count = int(top / step) + 1
    bottom = _TOP + _LINE * len(rows)
    yield _text(left + _PANEL / 2, 18, title, "middle")
    for number in range(count + 1):
        x = left + _PANEL * number / count
        yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#ddd"/>'
        yield _text(x, bottom + 16, f"{number * step:g}", "middle")
    scale = _PANEL / (count * step)
    for line, (row, spread) in enumerate(zip(rows, spreads, strict=True)):
        if spread is None:
            continue
        y = _TOP + _LINE * line + _LINE / 2
        low, high = (left + scale * each for each in spread["median"]["interval"])
        colour = _COLOURS[lengths.index(row["input_tokens"]) % len(_COLOURS)]
        middle = left + scale * row[metric]
        yield f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{colour}" stroke-width="2"/>'
        yield f'<circle cx="{middle:.1f}" cy="{y}" r="4" fill="{colour}"/>'


def _step(top: float) -> float:
    """A round distance of about four marks up to `top`."""
    size = 1e-3
    while True:
        for factor in (1, 2, 5):
            if top / (size * factor) <= 4:
                return size * factor
        size *= 10


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# The page.


def image(name: str) -> Path:
    """Where a result's plot is."""
    return DOCS / "images" / f"ablation-{name}.svg"


def files() -> dict[Path, str]:
    """Everything that this writes, with what belongs into it."""
    page = PAGE.read_text()
    made = {}
    for name, path in RESULTS.items():
        if not path.exists():
            continue
        rows = json.loads(path.read_text())
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        picture = f"![Medians with their intervals](images/{image(name).name})"
        page = f"{before}{begin}\n{table(rows)}\n\n{picture}\n{end}{after}"
        made[image(name)] = plot(rows)
    return {PAGE: page, **made}


def main() -> int:
    """Write, or with `--check` compare; returns the exit code."""
    stale = [
        path for path, text in files().items() if not path.exists() or path.read_text() != text
    ]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is not what was measured: run docs/ablation.py")
        return int(bool(stale))
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
