"""Which of the choices brings the gain: combinations in turns on the same prompts.

Decides which combinations run here and what they are compared with. Refuses to know flags
(`choices`) and how a turn is taken.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvcourier.bench.choices import ROWS, KnownFlags, NotAvailable, Setup, set_up
from kvcourier.bench.interleave import interleave
from kvcourier.bench.pair import PairSpec
from kvcourier.bench.plan import Cell
from kvcourier.bench.report import Comparison, Report, Row
from kvcourier.bench.session import Session
from kvcourier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AblateSettings:
    """What to measure.

    Attributes:
        pair: what all combinations have in common.
        known: flags of the installed `serve`.
        cells: of one turn, one after the other.
        turns: rounds of each cell; every combination has one turn in each.
        ends_at_s: no round begins that would end later (monotonic clock); cells share the time.
    """

    pair: PairSpec
    known: KnownFlags
    cells: Sequence[Cell]
    turns: int
    ends_at_s: float = float("inf")


def run_ablate(settings: AblateSettings, session: Session, report: Report) -> None:
    """Measure into `report`; blocks.

    Raises:
        ProcessFailed: a process of a pair ended.
    """
    setups = {each.name: set_up(each.choices, settings.known) for each in ROWS}
    available = {name: each for name, each in setups.items() if not isinstance(each, NotAvailable)}
    if not available:
        raise ConfigError("ablate: this `kvcourier serve` can run none of the combinations")
    # Combinations with equal flags differ in the router's mode alone and share a pair.
    specs = {
        name: replace(settings.pair, flags=(*setup.flags, *settings.pair.flags))
        for name, setup in available.items()
    }
    session.say(f"{len(available)} of {len(ROWS)} combinations are available here")
    routers = session.start_pairs(specs.values())
    targets = {
        name: session.look(routers[specs[name]], setup.way) for name, setup in available.items()
    }
    for number, cell in enumerate(settings.cells):
        rows = _add_rows(report, cell, setups)
        sides = [(rows[name], target) for name, target in targets.items()]
        now_s = time.monotonic()
        share_s = (settings.ends_at_s - now_s) / (len(settings.cells) - number)
        interleave(session, report, sides, settings.turns, now_s + share_s)


def _add_rows(
    report: Report, cell: Cell, setups: Mapping[str, Setup | NotAvailable]
) -> dict[str, Row]:
    """A row per combination, and what each that can be measured is compared with."""
    rows = {each.name: Row(each.name, cell, choices=each.choices) for each in ROWS}
    for name, setup in setups.items():
        if isinstance(setup, NotAvailable):
            rows[name].not_available = setup.reason
    report.rows += rows.values()
    report.comparisons += [
        Comparison(rows[each.base], rows[each.name])
        for each in ROWS
        if each.base and not (rows[each.base].not_available or rows[each.name].not_available)
    ]
    return rows
