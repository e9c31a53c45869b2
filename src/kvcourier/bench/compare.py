"""Two sides in turns on the same prompts and gaps.

Decides what a side is and who has the first turn. Refuses to know how a turn is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcourier.bench.interleave import interleave
from kvcourier.bench.pair import PairSpec
from kvcourier.bench.plan import Cell, Way
from kvcourier.bench.report import Comparison, Report, Row
from kvcourier.bench.session import Session
from kvcourier.bench.target import Target


@dataclass(frozen=True, slots=True)
class Side:
    """A name, and an address or a pair to start here, with the mode."""

    name: str
    where: str | PairSpec
    way: Way


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """What to compare.

    Attributes:
        sides: A and B.
        cell: of one turn: its requests are sent at its rate.
        turns: how many each side has.
    """

    sides: Sequence[Side]
    cell: Cell
    turns: int


def run_compare(settings: CompareSettings, session: Session, report: Report) -> None:
    """Measure into `report`; blocks.

    Raises:
        TargetFailed: a side is not there.
        ConfigError: a side does not offer the mode.
        ProcessFailed: a process of a pair ended.
    """
    specs = [side.where for side in settings.sides if isinstance(side.where, PairSpec)]
    routers = session.start_pairs(specs)
    targets: list[Target] = []
    for side in settings.sides:
        url = side.where if isinstance(side.where, str) else routers[side.where]
        targets.append(session.look(url, side.way))
    report.rows += [Row(side.name, settings.cell) for side in settings.sides]
    report.comparisons.append(Comparison(*report.rows))
    interleave(session, report, list(zip(report.rows, targets, strict=True)), settings.turns)
