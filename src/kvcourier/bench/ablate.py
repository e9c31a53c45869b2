"""Which of the choices brings the gain: combinations in turns on the same prompts.

Decides which combinations run here and what they are compared with. Refuses to know flags
(`choices`) and how a turn is taken.
"""

from dataclasses import dataclass, replace

from kvcourier.bench.choices import OURS, ROWS, KnownFlags, NotAvailable, Setup, set_up
from kvcourier.bench.interleave import interleave
from kvcourier.bench.pair import PairSpec
from kvcourier.bench.plan import Cell
from kvcourier.bench.report import Comparison, Report, Row
from kvcourier.bench.session import Session
from kvcourier.bench.target import Target
from kvcourier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AblateSettings:
    """What to measure.

    Attributes:
        pair: what all combinations have in common.
        known: flags of the installed `serve`.
        cell: of one turn.
        turns: rounds; every combination has one turn in each.
        ends_at_s: no round begins that would end later (monotonic clock).
    """

    pair: PairSpec
    known: KnownFlags
    cell: Cell
    turns: int
    ends_at_s: float = float("inf")


def run_ablate(settings: AblateSettings, session: Session, report: Report) -> None:
    """Measure into `report`; blocks.

    Raises:
        ProcessFailed: a process of a pair ended.
    """
    available: list[tuple[Row, Setup]] = []
    for each in ROWS:
        setup = set_up(each.choices, settings.known)
        row = Row(each.name, settings.cell, choices=each.choices)
        if isinstance(setup, NotAvailable):
            row.not_available = setup.reason
        else:
            available.append((row, setup))
        report.rows.append(row)
    if not available:
        raise ConfigError("ablate: this `kvcourier serve` can run none of the combinations")
    # Combinations with equal flags differ in the router's mode alone and share a pair.
    specs = [
        replace(settings.pair, flags=(*setup.flags, *settings.pair.flags)) for _, setup in available
    ]
    session.say(f"{len(available)} of {len(ROWS)} combinations are available here")
    routers = session.start_pairs(specs)
    sides: list[tuple[Row, Target]] = [
        (row, session.look(routers[spec], setup.way))
        for spec, (row, setup) in zip(specs, available, strict=True)
    ]
    rows = [row for row, _ in sides]
    base = next((row for row in rows if row.choices == OURS), rows[0])
    report.comparisons += [Comparison(base, row) for row in rows if row is not base]
    interleave(session, report, sides, settings.turns, settings.ends_at_s)
