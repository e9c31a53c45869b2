"""Prompt lengths x arrival rates x modes.

Decides which rows there are and in which order they are measured. Refuses to know how a turn is
taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcourier.bench.pair import PairSpec
from kvcourier.bench.plan import Cell, Way, audiences, burst, turn_orders
from kvcourier.bench.report import Report, Row
from kvcourier.bench.session import Session
from kvcourier.bench.target import Endpoint, Target


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What to measure.

    Attributes:
        endpoints: routers and servers; none starts a pair here.
        pair: the pair that is started then.
        rounds: how often every cell is measured, each time with other arrivals and prompts.
    """

    endpoints: Sequence[Endpoint]
    pair: PairSpec
    ways: Sequence[Way]
    cells: Sequence[Cell]
    rounds: int


def run_sweep(settings: SweepSettings, session: Session, report: Report) -> None:
    """Measure into `report`; blocks.

    Raises:
        TargetFailed: a target is not there.
        ConfigError: a target does not offer a mode.
        ProcessFailed: a process of the pair ended.
    """
    sides = _sides(settings, session)
    lengths = sorted({cell.input_tokens for cell in settings.cells})
    report.rows += [Row(name, cell) for cell in settings.cells for name in sides]
    rows = iter(report.rows)
    by_cell = {cell: [next(rows) for _ in sides] for cell in settings.cells}
    targets = list(sides.values())
    names = audiences([target.processes for target in targets])
    requests = sum(cell.requests for cell in settings.cells) * len(sides) * settings.rounds
    session.expect(requests)
    for length in lengths:
        for name, target in sides.items():
            failures = session.warm_up(target, length)
            report.problems += [f"warm-up of {name}, {length} tokens: {each}" for each in failures]
    for number, order in enumerate(turn_orders(len(sides), settings.rounds)):
        for cell, cell_rows in by_cell.items():
            for side in order:
                row = cell_rows[side]
                prompts = session.settings.prompts(cell.input_tokens, names[side])
                label = f"{row.name}, {cell}"
                turn = session.take_turn(label, targets[side], burst(cell, prompts, number))
                row.collected.turns.append(turn)


def _sides(settings: SweepSettings, session: Session) -> dict[str, Target]:
    """Every target in every mode, by the name its rows have."""
    urls = [endpoint.url for endpoint in settings.endpoints]
    if not urls:
        urls = [session.start_pairs([settings.pair])[settings.pair]]
    sides = {}
    for url in urls:
        given = [each.way for each in settings.endpoints if each.url == url]
        # `URL#MODE` names the mode of this target; without one all modes are meant.
        ways = [way for way in given if way is not None] or settings.ways
        for way in ways:
            name = way.value if len(set(urls)) == 1 else f"{url} {way}"
            sides[name] = session.look(url, way)
    return sides
