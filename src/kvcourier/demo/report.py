"""What the demo found: medians, a table, a JSON file, a verdict.

Decides how results are summed up, and what counts as success. Refuses to know how they were made.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Sample:
    """One request through the router."""

    ttft_s: float
    after_prefill_s: float
    tpot_s: float
    num_bytes: int
    num_pieces: int


@dataclass(slots=True)
class ModeResult:
    """All requests of one transfer mode.

    Attributes:
        samples: of the requests that were answered, right or wrong.
        mismatches: one sentence per answer whose tokens differ from the reference.
        failures: one sentence per request without an answer or without a transfer.
    """

    samples: list[Sample] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Column:
    key: str
    title: str
    of: Callable[[Sample], float]
    digits: int


_COLUMNS = (
    _Column("ttft_ms", "TTFT", lambda sample: sample.ttft_s * 1e3, 1),
    _Column("after_prefill_ms", "after prefill", lambda sample: sample.after_prefill_s * 1e3, 1),
    _Column("tpot_ms", "TPOT", lambda sample: sample.tpot_s * 1e3, 1),
    _Column("bytes", "bytes", lambda sample: sample.num_bytes, 0),
    _Column("pieces", "pieces", lambda sample: sample.num_pieces, 0),
)


@dataclass(frozen=True, slots=True)
class Report:
    """Results per mode, in the order in which they are shown."""

    modes: Mapping[str, ModeResult]

    @property
    def tokens_equal(self) -> bool:
        """At least one answer per mode was compared, and none differed."""
        return bool(self.modes) and all(
            result.samples and not result.mismatches for result in self.modes.values()
        )

    @property
    def succeeded(self) -> bool:
        """The demo was run, and nothing is wrong."""
        return bool(self.modes) and not self.problems()

    def problems(self) -> Sequence[str]:
        """Why the demo did not succeed; empty if it did."""
        found = [
            f"{mode}: {sentence}"
            for mode, result in self.modes.items()
            for sentence in (*result.failures, *result.mismatches)
        ]
        found += [f"{mode}: no answer" for mode, r in self.modes.items() if not r.samples]
        return found

    def as_json(self) -> dict[str, Any]:
        """Medians per mode; a mode without an answer has nulls."""
        return {
            "tokens_equal": self.tokens_equal,
            "modes": {
                mode: {
                    **{column.key: _median(column, result) for column in _COLUMNS},
                    "failures": len(result.failures),
                }
                for mode, result in self.modes.items()
            },
        }

    def table(self) -> Table:
        """The same for people."""
        table = Table(title="medians per request, times in ms", title_justify="left", box=SIMPLE)
        table.add_column("mode")
        for column in _COLUMNS:
            table.add_column(column.title, justify="right")
        table.add_column("requests", justify="right")
        table.add_column("failures", justify="right")
        for mode, result in self.modes.items():
            cells = [_median(column, result) for column in _COLUMNS]
            table.add_row(
                mode,
                *("-" if cell is None else f"{cell:,}" for cell in cells),
                str(len(result.samples) + len(result.failures)),
                str(len(result.failures)),
            )
        return table


def _median(column: _Column, result: ModeResult) -> float | int | None:
    if not result.samples:
        return None
    value = statistics.median(column.of(sample) for sample in result.samples)
    return round(value, column.digits) if column.digits else round(value)
