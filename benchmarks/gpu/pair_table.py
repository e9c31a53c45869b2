"""A result file as the tables of docs/benchmarks.md.

python benchmarks/gpu/pair_table.py benchmarks/gpu/results/vllm-pairs.json
"""

import json
import re
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
                *(_number(row.get(key), digits) for _, key, digits in _TIMES),
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
                *(_ratio(row["of_vllm"].get(key)) for _, key in _RATIOS),
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


def _ratio(estimate: Sequence[float] | None) -> str:
    if estimate is None:
        return "-"
    value, low, high = estimate
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
TABLES = {"times": times_table, "ratios": ratios_table}


def filled(page: str) -> str:
    """The page with its tables as the result files have them now.

    A table lies between ``<!-- times vllm-pairs -->`` and ``<!-- end -->``: its kind, and the file.
    """

    def table(mark: re.Match[str]) -> str:
        kind, name = mark["kind"], mark["name"]
        rows = read_rows(Path(__file__).with_name("results") / f"{name}.json")
        return f"<!-- {kind} {name} -->\n{markdown(TABLES[kind](rows))}\n<!-- end -->"

    pattern = r"<!-- (?P<kind>times|ratios) (?P<name>[\w-]+) -->\n.*?<!-- end -->"
    return re.sub(pattern, table, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
