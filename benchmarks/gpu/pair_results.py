"""The result file: a list with a header row, then one row per cell and connector.

Decides its form, and when two runs may share a file. Refuses to know how rows come about.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pair_load import Cell, Outcomes, RequestFailed, Sample, mean_decoding, spread

from kvcourier.bench.stats import paired_ratio

METRICS = ("ttft", "after_prefill", "tpot", "latency")
_STATISTIC = "p50"
_KEYS = ("model", "connector", "input_tokens", "qps", "requests", "cache")
FRESH, USED = "fresh", "used"
"""State of the caches: blocks come in order, or in the order in which earlier requests left them.
"""
# A file is one run's, so what it was run with may not change half-way; the day may.
_MAY_DIFFER = ("date", "command")


class ResultsError(Exception):
    """The file cannot be continued; the text says why."""


def make_row(
    model: str, connector: str, cell: Cell, cache: str, rounds: Sequence[Outcomes]
) -> dict[str, Any]:
    """One row; times in ms, of the answered requests, None if there are none.

    The samples of each round are beside them, with None for a request that failed: two connectors
    of one way met the same prompts at the same places.
    """
    outcomes = [each for outcomes in rounds for each in outcomes]
    samples = _answered(outcomes)
    failures = [each for each in outcomes if isinstance(each, RequestFailed)]
    spreads = {
        metric: spread([v for each in samples if (v := getattr(each, f"{metric}_ms")) is not None])
        for metric in METRICS
    }
    row: dict[str, Any] = {
        "model": model,
        "input_tokens": cell.input_tokens,
        "qps": cell.qps,
        "connector": connector,
        "cache": cache,
        **{f"{metric}_ms": _rounded(spreads[metric][_STATISTIC]) for metric in METRICS},
        "failures": len(failures),
        "requests": cell.requests,
    }
    for metric in METRICS:
        for name, value in spreads[metric].items():
            row[f"{metric}_{name}_ms"] = _rounded(value)
    decoding = [x for each in rounds if (x := mean_decoding(_answered(each))) is not None]
    row["mean_decoding"] = _rounded(sum(decoding) / len(decoding) if decoding else None)
    row["samples"] = [
        {
            metric: [_rounded(getattr(each, f"{metric}_ms", None)) for each in outcomes]
            for metric in METRICS
        }
        for outcomes in rounds
    ]
    return row | {"first_failure": str(failures[0]) if failures else None}


def _answered(outcomes: Outcomes) -> list[Sample]:
    return [each for each in outcomes if isinstance(each, Sample)]


def of_vllm(row: Mapping[str, Any], vllm: Mapping[str, Any]) -> dict[str, list[float]]:
    """A row's times over those of vLLM's connector of the same way, on the same prompts.

    Per metric the geometric mean over prompts and its 95 % interval (bootstrap over prompts).
    """
    found = {}
    for metric in METRICS:
        pairs = [
            [(theirs, ours)]
            for ours_of_round, theirs_of_round in zip(row["samples"], vllm["samples"], strict=True)
            for ours, theirs in zip(ours_of_round[metric], theirs_of_round[metric], strict=True)
            if ours is not None and theirs is not None
        ]
        ratio = paired_ratio(pairs)
        if ratio is not None:
            estimate = ratio.estimate
            found[metric] = [round(x, 3) for x in (estimate.value, estimate.low, estimate.high)]
    return found


def show_row(row: Mapping[str, Any]) -> str:
    """One line for a terminal: median, and 90th percentile in brackets."""

    def times(metric: str) -> str:
        median, high = row[f"{metric}_p50_ms"], row[f"{metric}_p90_ms"]
        return "-" if median is None else f"{median:.1f} ({high:.1f})"

    line = (
        f"{row['model']:>4} {row['input_tokens']:>6} tokens, {row['qps']:g}/s "
        f"{row['cache']:5} {row['connector']:14} TTFT {times('ttft')}  "
        f"after prefill {times('after_prefill')}  TPOT {times('tpot')}  "
        f"last token {times('latency')} ms  decoding {row['mean_decoding']}  "
        f"failures {row['failures']}/{row['requests']}"
    )
    for metric, (ratio, low, high) in (row.get("of_vllm") or {}).items():
        line += f"\n  {metric} is {ratio:.2f} ({low:.2f} to {high:.2f}) of vLLM's"
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

    def has(self, model: str, connector: str, cell: Cell, cache: str) -> bool:
        """Whether the file holds this measurement."""
        wanted = (model, connector, cell.input_tokens, cell.qps, cell.requests, cache)
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
