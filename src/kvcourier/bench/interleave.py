"""Several sides in turns, so that whatever drifts on the machine drifts for all of them.

Decides when which side has its turn and when there is no time for another round. Refuses to know
what the sides are.
"""

import time
from collections.abc import Callable, Sequence

from kvcourier.bench.plan import Burst, Cell, audiences, burst, turn_orders
from kvcourier.bench.report import Report, Row
from kvcourier.bench.session import Session
from kvcourier.bench.target import Target

Plan = Callable[[str, int], Burst]
"""What an audience is sent in a round: as many requests, at the same times, for all audiences."""


def interleave(
    session: Session,
    report: Report,
    sides: Sequence[tuple[Row, Target]],
    num_turns: int,
    ends_at_s: float = float("inf"),
    plan: Plan | None = None,
) -> None:
    """Warm every side up, then give each a turn per round, with the same prompts and gaps.

    Stops early, after the first round at the earliest, if the next would end after `ends_at_s`
    (monotonic clock). All rows have the same cell; `plan` says what its turns are, if not Poisson
    arrivals of prompts of one length.

    Raises:
        ProcessFailed: a process ended.
    """
    cell: Cell = sides[0][0].cell

    def poisson(audience: str, number: int) -> Burst:
        return burst(cell, session.settings.prompts(cell.input_tokens, audience), number)

    plan = plan or poisson
    names = audiences([target.processes for _, target in sides])
    session.expect(cell.requests * num_turns * len(sides))
    for row, target in sides:
        failures = session.warm_up(target, cell.input_tokens)
        report.problems += [f"warm-up of {row.name}: {each}" for each in failures]
    longest_s = 0.0
    for number, order in enumerate(turn_orders(len(sides), num_turns)):
        began_s = time.monotonic()
        if number and began_s + longest_s > ends_at_s:
            rounds = f"{number} of {num_turns} rounds of {cell.input_tokens:,} tokens"
            report.notes.append(f"{rounds}: there was no time for more")
            return
        for side in order:
            row, target = sides[side]
            label = f"round {number + 1} of {num_turns}, {row.name}"
            turn = session.take_turn(label, target, plan(names[side], number))
            row.collected.turns.append(turn)
        longest_s = max(longest_s, time.monotonic() - began_s)
