"""What it costs to bind the decode instance early, late or near, in a fleet that is not well.

Decides the fleet, its traffic and its faults, and what is printed. Refuses to know how a router
decides (`fleet`).

    python -m kvcourier.sim.binding [--seeds N] [--calls N]

Two prefill and four decode instances on virtual time; one decode instance takes much longer for a
step, another one dies again and again. The same clients come in each row. All rows choose the
decode instance by load and compute a prompt anew up to twice; near also binds anew.
"""

import argparse
import logging
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvcourier.config import Binding, TransferMode
from kvcourier.router.events import CallOutcome
from kvcourier.sim.engine import EngineSettings
from kvcourier.sim.fleet import Fleet, FleetCall, FleetSettings
from kvcourier.sim.instance import InstanceSettings
from kvcourier.sim.memory import Shape
from kvcourier.sim.world import Plan, World

NUM_PREFILL, NUM_DECODE = 2, 4
SLOW, FAILING = "d0", "d1"
_LIVES_S, _DOWN_S = 0.7, 0.25
_CALLS_PER_S = 4.0
_PROMPT_TOKENS = (200, 800)
_ANSWER_TOKENS = (16, 48)

ROWS: dict[str, FleetSettings] = {
    "pull (late)": FleetSettings(mode=TransferMode.PULL, binding=Binding.LATE),
    "push, early": FleetSettings(mode=TransferMode.PUSH, binding=Binding.EARLY),
    "push, near": FleetSettings(
        mode=TransferMode.PUSH, binding=Binding.NEAR, rebinds=3, near_lead_s=0.1
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one row.

    Attributes:
        ttft_s: of the calls that got a first token, sorted.
        num_failed: calls that got none.
        num_broken: calls whose stream broke after that.
        num_anew: prompts that were computed more than once.
    """

    ttft_s: Sequence[float]
    num_failed: int
    num_broken: int
    num_anew: int
    num_rebinds: int

    def quantile_s(self, part: float) -> float:
        """Of the times to first token; a call without one counts as the longest."""
        times = [*self.ttft_s, *[float("inf")] * self.num_failed]
        return times[min(len(times) - 1, int(part * len(times)))]


def run(seed: int, settings: FleetSettings, num_calls: int) -> Result:
    """One fleet with one row's router, and everything that happens to it by this seed.

    Raises:
        Violation: an answer is wrong, or an invariant of the world does not hold.
    """
    world = World(Plan(seed=seed, instances=_instances(), asks=()))
    chance = random.Random(seed)
    fleet = Fleet(world.timeline, world.instances, random.Random(seed + 1), settings)
    at = 0.5
    for _ in range(num_calls):
        at += chance.expovariate(_CALLS_PER_S)
        prompt = tuple(chance.randrange(50) for _ in range(chance.randint(*_PROMPT_TOKENS)))
        max_tokens = chance.randint(*_ANSWER_TOKENS)
        world.timeline.at(at, partial(fleet.serve, prompt, max_tokens))
    _die_again_and_again(world, fleet, chance, until=at)
    world.advance(at + 30.0)
    return _result(fleet.calls)


def _instances() -> dict[str, InstanceSettings]:
    prefill = InstanceSettings(
        shape=Shape(num_blocks=128, block_size=16),
        engine=EngineSettings(max_batch_tokens=32, step_s=0.008, token_s=0.0005),
    )
    decode = InstanceSettings(
        shape=Shape(num_blocks=128, block_size=16),
        engine=EngineSettings(max_batch_tokens=64, step_s=0.012, token_s=0.0005),
    )
    slow = InstanceSettings(
        shape=decode.shape,
        engine=EngineSettings(max_batch_tokens=64, step_s=0.25, token_s=0.0005),
    )
    places = [f"p{number}" for number in range(NUM_PREFILL)]
    fleet = dict.fromkeys(places, prefill)
    return fleet | {f"d{n}": slow if f"d{n}" == SLOW else decode for n in range(NUM_DECODE)}


def _die_again_and_again(world: World, fleet: Fleet, chance: random.Random, until: float) -> None:
    instance, at = world.instances[FAILING], 0.5

    def die() -> None:
        life = instance.life
        if life is not None:
            instance.kill()
            fleet.instance_died(life)

    while at < until:
        at += chance.expovariate(1 / _LIVES_S)
        world.timeline.at(at, die)
        at += _DOWN_S
        world.timeline.at(at, lambda: instance.start(f"engine-{FAILING}"))


def _result(calls: Sequence[FleetCall]) -> Result:
    served = [call.first_at - call.came_at for call in calls if call.first_at is not None]
    return Result(
        ttft_s=sorted(served),
        num_failed=sum(call.first_at is None for call in calls),
        num_broken=sum(
            call.first_at is not None and call.outcome is not CallOutcome.OK for call in calls
        ),
        num_anew=sum(call.num_prefills > 1 for call in calls),
        num_rebinds=sum(call.num_rebinds for call in calls),
    )


def table(seeds: Sequence[int], num_calls: int) -> str:
    """All rows, with the spread over the seeds: median (least to most)."""
    lines = [
        "| router | TTFT p50, ms | TTFT p99, ms | no first token | broken later | computed anew "
        "| bound anew |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, settings in ROWS.items():
        results = [run(seed, settings, num_calls) for seed in seeds]
        cells = [
            _spread([1000 * each.quantile_s(0.5) for each in results]),
            _spread([1000 * each.quantile_s(0.99) for each in results]),
            _spread([each.num_failed for each in results]),
            _spread([each.num_broken for each in results]),
            _spread([each.num_anew for each in results]),
            _spread([each.num_rebinds for each in results]),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m kvcourier.sim.binding")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row")
    parser.add_argument("--calls", type=int, default=100, help="calls of each run")
    given = parser.parse_args()
    # What fails here is meant to.
    logging.disable(logging.WARNING)
    print(table(range(given.seeds), given.calls))


if __name__ == "__main__":
    main()
