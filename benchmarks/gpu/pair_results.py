"""The result file: a list with a header row, then one row per cell and connector.

Decides its form, and when two runs may share a file. Refuses to know how rows come about.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pair_load import Cell, RequestFailed, Sample, spread

_METRICS = ("ttft", "after_prefill", "tpot")
_STATISTIC = "p50"
_KEYS = ("model", "connector", "input_tokens", "qps", "requests")
# A file is one run's, so what it was run with may not change half-way; the day may.
_MAY_DIFFER = ("date", "command")


class ResultsError(Exception):
    """The file cannot be continued; the text says why."""


def make_row(
    model: str, connector: str, cell: Cell, outcomes: Sequence[Sample | RequestFailed]
) -> dict[str, Any]:
    """One row; times in ms, of the answered requests, None if there are none."""
    samples = [each for each in outcomes if isinstance(each, Sample)]
    failures = [each for each in outcomes if isinstance(each, RequestFailed)]
    spreads = {
        metric: spread([v for each in samples if (v := getattr(each, f"{metric}_ms")) is not None])
        for metric in _METRICS
    }
    row: dict[str, Any] = {
        "model": model,
        "input_tokens": cell.input_tokens,
        "qps": cell.qps,
        "connector": connector,
        **{f"{metric}_ms": _rounded(spreads[metric][_STATISTIC]) for metric in _METRICS},
        "failures": len(failures),
        "requests": cell.requests,
    }
    for metric in _METRICS:
        for name, value in spreads[metric].items():
            row[f"{metric}_{name}_ms"] = _rounded(value)
    return row | {"first_failure": str(failures[0]) if failures else None}


def show_row(row: Mapping[str, Any]) -> str:
    """One line for a terminal: median, and 90th percentile in brackets."""

    def times(metric: str) -> str:
        median, high = row[f"{metric}_p50_ms"], row[f"{metric}_p90_ms"]
        return "-" if median is None else f"{median:.1f} ({high:.1f})"

    line = (
        f"{row['model']:>4} {row['input_tokens']:>6} tokens, {row['qps']:g}/s "
        f"{row['connector']:14} TTFT {times('ttft')}  after prefill {times('after_prefill')}  "
        f"TPOT {times('tpot')} ms  failures {row['failures']}/{row['requests']}"
    )
    return f"{line}\n  first failure: {row['first_failure']}" if row["first_failure"] else line


class ResultFile:
    """Rows on disk; each `add` leaves a whole file behind, whenever the run is cut off."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        """Begin a file, or go on with one.

        Raises:
            ResultsError: the file to go on with is not one of ours, or of another setup.
        """
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._header = {"header": True, "statistic": "median", **header}
        if resume and path.exists():
            self._load()
        self._save()

    def has(self, model: str, connector: str, cell: Cell) -> bool:
        """Whether the file holds this measurement."""
        wanted = (model, connector, cell.input_tokens, cell.qps, cell.requests)
        return any(tuple(row[key] for key in _KEYS) == wanted for row in self._rows)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and write the file."""
        self._rows.append(row)
        self._save()

    def _load(self) -> None:
        try:
            header, *self._rows = json.loads(self._path.read_text())
            if not header["header"] or any(key not in row for row in self._rows for key in _KEYS):
                raise KeyError("header")
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{self._path}: expected a result file, found {error!r}") from error
        differing = [
            f"{key} was {header.get(key)!r}, is {self._header.get(key)!r}"
            for key in sorted(header.keys() | self._header.keys())
            if key not in _MAY_DIFFER and header.get(key) != self._header.get(key)
        ]
        if differing:
            raise ResultsError(
                f"{self._path}: the rows of one file are of one setup, but {'; '.join(differing)}; "
                "name another --out, or leave --resume out to begin anew"
            )
        self._header = header

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(row) for row in (self._header, *self._rows))
        unfinished = self._path.with_name(self._path.name + ".part")
        unfinished.write_text(f"[\n{lines}\n]\n")
        os.replace(unfinished, self._path)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
