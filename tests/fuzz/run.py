"""`make fuzz`: every decoder takes spoilt inputs for a while, and how many it took is printed.

    python -m fuzz.run [--seconds N | --inputs N] [--seed N] [--only WORD] [--json FILE]

An input that a decoder answers with anything but its own refusal, or that costs more than its
length explains, ends the run with a traceback and the smallest such input that was found.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz import couriers, servers
from fuzz.inputs import inputs
from fuzz.meter import Cost, measure
from fuzz.targets import PURE, Target

_ROUND = 200
"""Inputs of one decoder before the next has its turn."""


@dataclass
class Tally:
    """What one decoder was fed.

    Attributes:
        most: the dearest input.
    """

    inputs: int = 0
    taken: int = 0
    longest: int = 0
    most: Cost = field(default_factory=Cost)


def every_target() -> list[Target]:
    """All decoders."""
    return [*PURE, *servers.targets(), *couriers.targets()]


def feed(target: Target, number: int, inputs_seed: int, tally: Tally) -> None:
    """Feed a decoder so many inputs, which the seed draws.

    Raises:
        Exception: whatever a decoder raises that it should not, after the input is as small as
            Hypothesis could make it.
    """

    @seed(inputs_seed)
    @settings(
        max_examples=number,
        database=None,
        report_multiple_bugs=False,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(payload=inputs(target.examples, target.codec))
    def run(payload: bytes) -> None:
        tally.taken += bool(measure(target.feed, payload, tally.most, target.max_calls))
        tally.inputs += 1
        tally.longest = max(tally.longest, len(payload))

    for example in target.examples:
        # As it is, too.
        measure(target.feed, example, tally.most, target.max_calls)
    run()


def rounds(
    targets: Sequence[Target], first_seed: int, seconds: float, number: int | None
) -> Iterator[tuple[int, int]]:
    """(seed, inputs for each decoder) until there were enough."""
    if number is not None:
        yield first_seed, number
        return
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        yield first_seed, _ROUND
        first_seed += 1


def main() -> int:
    """Feed all decoders in turn and print how many inputs each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all decoders together")
    parser.add_argument("--inputs", type=int, help="for each decoder, instead of --seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--only", default="", help="a word that a decoder's name must have")
    parser.add_argument("--json", type=Path, help="file for the counts")
    options = parser.parse_args()
    # Thousands of refusals would be logged.
    logging.disable()
    targets = [target for target in every_target() if options.only in target.name]
    tallies = {target.name: Tally() for target in targets}
    for round_seed, number in rounds(targets, options.seed, options.seconds, options.inputs):
        for target in targets:
            try:
                feed(target, number, round_seed, tallies[target.name])
            except BaseException:
                print(f"{target.name}, --seed {round_seed} --inputs {number}:", file=sys.stderr)
                raise
    print(f"{'decoder':24} {'inputs':>8} {'taken':>8} {'longest':>9} {'calls':>8} {'KiB':>7}")
    for name, tally in tallies.items():
        print(
            f"{name:24} {tally.inputs:8} {tally.taken:8} {tally.longest:9} {tally.most.calls:8} "
            f"{tally.most.num_bytes >> 10:7}"
        )
    print(f"{sum(each.inputs for each in tallies.values())} inputs, no surprise")
    if options.json:
        options.json.write_text(
            json.dumps({name: asdict(each) for name, each in tallies.items()}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
