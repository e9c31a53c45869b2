"""Reports as a run would leave them, without a run."""

import random

from kvcourier.bench.choices import ROWS
from kvcourier.bench.plan import Cell
from kvcourier.bench.report import Comparison, Report, Row
from kvcourier.bench.samples import Answered, CacheCounts, Sample, Turn
from kvcourier.bench.timeline import make_timeline

CELL = Cell(512, 2.0, 2)
SETTINGS = {"output tokens": 3, "seed": 1}


def sample(ttft_s: float, sent_unix_s: float = 1000.0) -> Sample:
    """A request with a story in which prefill ends at half of its TTFT."""
    answer = Answered(sent_unix_s, 0.001, (ttft_s, ttft_s + 0.02, ttft_s + 0.03), "t-1")
    times = {"hold_begun": 0.1, "prefill_finished": 0.5, "posted": 0.6, "written": 0.7}
    prefill = [
        {"what": what, "at_unix_s": sent_unix_s + part * ttft_s} for what, part in times.items()
    ]
    decode = [{"what": "received", "at_unix_s": sent_unix_s + 0.8 * ttft_s}]
    return Sample(answer, make_timeline(sent_unix_s, answer.token_s, prefill, decode))


def filled(row: Row, slowness: float, num_turns: int = 8, seed: int = 5) -> Row:
    """The row with turns; rows of one seed differ by their slowness alone."""
    chance = random.Random(seed)
    for _ in range(num_turns):
        samples = tuple(
            sample(slowness * chance.lognormvariate(-1.5, 0.1)) for _ in range(row.cell.requests)
        )
        row.collected.turns.append(Turn(samples, (), {"P": CacheCounts(1024, 0)}))
    return row


def ablation(*cells: Cell) -> Report:
    """Two combinations measured, the second half as slow again; all others not available."""
    report = Report("ablate", "Ablation <of nothing>", SETTINGS)
    for cell in cells or (CELL,):
        rows = [Row(each.name, cell, choices=each.choices) for each in ROWS]
        for number, row in enumerate(rows):
            if number < 2:
                filled(row, 1 + number / 2)
            else:
                row.not_available = "this `kvcourier serve` has no --path"
        report.rows += rows
        report.comparisons.append(Comparison(*rows[:2]))
    return report


def sweep() -> Report:
    """Two modes in four cells."""
    report = Report("sweep", "Sweep of nothing", SETTINGS)
    for length in (128, 512):
        for qps in (1.0, 2.0):
            for slowness, name in ((1.0, "pull"), (1.2, "push")):
                report.rows.append(filled(Row(name, Cell(length, qps, 4)), slowness, 2))
    return report


def comparison() -> Report:
    """Equal sides."""
    report = Report("compare", "A against B", SETTINGS)
    report.rows += [filled(Row("A: x", CELL), 1.0), filled(Row("B: y", CELL), 1.0)]
    report.comparisons.append(Comparison(*report.rows))
    return report
