"""The fewest faults by which a world still fails.

Decides which faults are tried without. Refuses to know why a world fails: any failure counts.
"""

import dataclasses
from collections.abc import Callable, Sequence

from kvcourier.sim.faults import Fault
from kvcourier.sim.world import Plan


def without(plan: Plan, kept: Sequence[int]) -> Plan:
    """The plan with only these of its faults, by number."""
    return dataclasses.replace(plan, faults=[plan.faults[number] for number in kept])


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> list[int]:
    """Numbers of the faults that are left when none can be left out any more.

    The plan fails as it is, and each plan that `without` makes of what is returned does.
    """
    kept = list(range(len(plan.faults)))
    smaller = True
    while smaller:
        smaller = False
        for number in reversed(kept):
            fewer = [each for each in kept if each != number]
            if fails(without(plan, fewer)):
                kept, smaller = fewer, True
    return kept


def shown(faults: Sequence[Fault]) -> list[str]:
    """One line a fault."""
    return [repr(fault) for fault in faults] or ["no fault is needed"]
