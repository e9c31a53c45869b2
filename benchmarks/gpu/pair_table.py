"""A result file as the tables of docs/benchmarks.md.

python benchmarks/gpu/pair_table.py benchmarks/gpu/results/vllm-pairs.json
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_TIMES = (
    ("TTFT", "ttft_ms", 0),
    ("after prefill", "after_prefill_ms", 0),
    ("TPOT", "tpot_ms", 1),
    ("last token", "latency_ms", 0),
    ("decoding", "mean_decoding", 1),
)
_RATIOS = (
    ("TTFT", "ttft"),
    ("after prefill", "after_prefill"),
    ("TPOT", "tpot"),
    ("last token", "latency"),
)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file, without its header."""
    _, *rows = json.loads(path.read_text())
    return rows


def times_table(rows: Sequence[Row]) -> list[list[str]]:
    """What was measured, with a line of titles: medians in ms."""
    titles = [*_CELL, "connector", *(title for title, _, _ in _TIMES), "failed"]
    return [
        titles,
        *(
            [
                *_cell(row),
                f"`{row['connector']}`",
                *(_number(row[key], digits) for _, key, digits in _TIMES),
                f"{row['failures']} of {row['requests']}",
            ]
            for row in rows
        ),
    ]


def ratios_table(rows: Sequence[Row]) -> list[list[str]]:
    """Our time over that of vLLM's connector of the same way, with its 95 % interval."""
    titles = [*_CELL, "connector", *(title for title, _ in _RATIOS)]
    return [
        titles,
        *(
            [
                *_cell(row),
                f"`{row['connector']}`",
                *(_ratio(row["of_vllm"][key]) for _, key in _RATIOS),
            ]
            for row in rows
            if "of_vllm" in row
        ),
    ]


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table's text."""
    titles, *lines = table
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *lines))


_CELL = ("model", "tokens", "requests/s", "cache")


def _cell(row: Row) -> list[str]:
    return [row["model"], str(row["input_tokens"]), f"{row['qps']:g}", row["cache"]]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(estimate: Sequence[float]) -> str:
    value, low, high = estimate
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    found = read_rows(Path(sys.argv[1]))
    print(markdown(ratios_table(found)), markdown(times_table(found)), sep="\n\n")
