"""Which of several instances serves the next request.

Decides by a table of policies, each a pure function of the candidates and a turn number. Refuses
to know requests, HTTP and the clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One instance as a policy sees it.

    Attributes:
        usable: it may be chosen at all (fits the mode, not just tried).
        reachable: it answered when last asked; the others are a last resort.
        in_flight: legs running on it.
    """

    usable: bool = True
    reachable: bool = True
    in_flight: int = 0


Policy = Callable[[Sequence[Candidate], Sequence[int], int], int]
"""(all candidates, indices to choose from: not empty, turn: counts up by one) -> chosen index."""


def round_robin(candidates: Sequence[Candidate], choices: Sequence[int], turn: int) -> int:
    """The first choice at or after the turn's own place, so that a gap moves nobody else's turn."""
    return min(choices, key=lambda index: (index - turn) % len(candidates))


def least_in_flight(candidates: Sequence[Candidate], choices: Sequence[int], turn: int) -> int:
    """The choice with the fewest legs running; ties go round."""
    return min(
        choices,
        key=lambda index: (candidates[index].in_flight, (index - turn) % len(candidates)),
    )


POLICIES: Mapping[str, Policy] = {
    "round_robin": round_robin,
    "least_in_flight": least_in_flight,
}


def choose(policy: str, candidates: Sequence[Candidate], turn: int) -> int | None:
    """Index of the instance to use, or None if none is usable.

    Reachable instances come first; if none is, the unreachable are tried rather than giving up.
    """
    usable = [index for index, candidate in enumerate(candidates) if candidate.usable]
    reachable = [index for index in usable if candidates[index].reachable]
    choices = reachable or usable
    return POLICIES[policy](candidates, choices, turn) if choices else None
