"""Runs the random worlds of a range of seeds and says which do not hold.

Decides what is printed. Refuses to know what a world is.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvcourier.sim.draw import draw
from kvcourier.sim.faults import Fault
from kvcourier.sim.shrink import shrink, without
from kvcourier.sim.world import Plan, World

_PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A world that does not hold.

    Attributes:
        kept: numbers of the faults by which it still fails.
        faults: these faults.
        reason: what does not hold then.
    """

    seed: int
    kept: Sequence[int]
    faults: Sequence[Fault]
    reason: str

    @property
    def command(self) -> str:
        """Replays it."""
        only = ",".join(map(str, self.kept)) or "none"
        return f"make worlds SEEDS={self.seed} ONLY={only}"

    def __str__(self) -> str:
        lines = [f"seed {self.seed} fails: {self.reason}", f"  replay: {self.command}"]
        return "\n".join(lines + [f"  {fault}" for fault in self.faults])


def why_it_fails(plan: Plan) -> str | None:
    """What does not hold in this world; None if all does.

    Whatever is raised counts: in a real instance it would end a courier or an engine.
    """
    try:
        World(plan).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_seed(seed: int, only: Sequence[int] | None = None) -> Failure | None:
    """Run one world; if it fails, find the fewest faults by which it does.

    Args:
        only: numbers of the faults to keep; None keeps all.
    """
    plan = draw(seed)
    numbers = list(range(len(plan.faults)))
    if only is not None:
        numbers = [number for number in numbers if number in only]
    plan = without(plan, numbers)
    if why_it_fails(plan) is None:
        return None
    kept = shrink(plan, lambda smaller: why_it_fails(smaller) is not None)
    smallest = without(plan, kept)
    reason = why_it_fails(smallest) or "not any more"
    return Failure(seed, [numbers[number] for number in kept], smallest.faults, reason)


def run_seeds(
    seeds: Sequence[int],
    only: Sequence[int] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Failure]:
    """Run worlds one after the other, telling of failures as they come, and of progress."""
    failures = []
    told_at = time.monotonic()
    with quiet_logs():
        for number, seed in enumerate(seeds, 1):
            failure = run_seed(seed, only)
            if failure is not None:
                failures.append(failure)
                tell(str(failure))
            if time.monotonic() - told_at > _PROGRESS_S:
                told_at = time.monotonic()
                tell(f"{number} of {len(seeds)} worlds, {number - len(failures)} held")
    return failures


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Failed transfers are what worlds are made of: nobody wants a line for each."""
    logger = logging.getLogger("kvcourier")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def main(arguments: Sequence[str]) -> int:
    """`SEEDS [ONLY]`: a seed or first:stop, and numbers of faults to keep, or "none".

    1 if a world fails, 2 if the arguments cannot be read.
    """
    try:
        seeds = _seeds(arguments[0] if arguments else "0:300")
        only = _numbers(arguments[1]) if len(arguments) > 1 else None
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    failures = run_seeds(seeds, only, lambda text: print(text, flush=True))
    print(f"{len(seeds)} worlds, {len(seeds) - len(failures)} held")
    return 1 if failures else 0


def _seeds(text: str) -> range:
    first, colon, stop = text.partition(":")
    if first.isdecimal() and (stop.isdecimal() if colon else True):
        seeds = range(int(first), int(stop) if colon else int(first) + 1)
        if seeds:
            return seeds
    raise ValueError(f"SEEDS: expected a number or first:stop with first below stop, found {text}")


def _numbers(text: str) -> list[int]:
    if text == "none":
        return []
    if all(part.isdecimal() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    raise ValueError(f"ONLY: expected numbers of faults, as in 0,3, or none; found {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
