"""What is sent when, and who goes first.

Decides arrival times, prompts and the order of turns, all from a seed. Refuses to know clocks and
servers: whoever runs a plan does so as it says. Pure.
"""

import enum
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcourier.config import Binding, TransferMode
from kvcourier.errors import ConfigError

FIRST_TOKEN_ID = 16
"""The lowest ids are often special: padding, end of text."""


class Way(enum.StrEnum):
    """How a request goes: by a router in a mode, as the server chooses, or to one instance.

    Of the modes, early-pull and late-push are bound when the other one usually is.
    """

    PULL = "pull"
    PUSH = "push"
    EARLY_PULL = "early-pull"
    LATE_PUSH = "late-push"
    SINGLE = "single"
    DEFAULT = "default"


ASKED: Mapping[Way, tuple[TransferMode, Binding | None]] = {
    Way.PULL: (TransferMode.PULL, None),
    Way.PUSH: (TransferMode.PUSH, None),
    Way.EARLY_PULL: (TransferMode.PULL, Binding.EARLY),
    Way.LATE_PUSH: (TransferMode.PUSH, Binding.LATE),
}
"""What a router is asked for; a binding only where it is not the mode's usual one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: prompt length, mean arrivals a second, number of requests.

    Raises:
        ConfigError: a number is not above 0.
    """

    input_tokens: int
    qps: float
    requests: int

    def __post_init__(self) -> None:
        if not (self.input_tokens > 0 and 0 < self.qps < float("inf") and self.requests > 0):
            raise ConfigError(f"cell: expected numbers above 0, found {self}")

    def __str__(self) -> str:
        return f"{self.input_tokens} tokens, {self.qps:g}/s, {self.requests} requests"


def cells(input_tokens: Sequence[int], rates: Sequence[float], requests: int) -> tuple[Cell, ...]:
    """Every length with every rate, short and slow ones first."""
    return tuple(
        Cell(length, rate, requests)
        for length, rate in itertools.product(sorted(set(input_tokens)), sorted(set(rates)))
    )


def arrivals(cell: Cell, seed: int, number: int = 0) -> tuple[float, ...]:
    """Seconds from the start at which requests are sent: Poisson, the first at 0.

    They depend on the arguments alone, so that whoever has the same round of a cell meets the same
    bursts. `number` is the round's.
    """
    clock = random.Random(f"{seed} arrivals {cell} {number}")
    gaps = (clock.expovariate(cell.qps) for _ in range(cell.requests - 1))
    return (0.0, *itertools.accumulate(gaps))


@dataclass(frozen=True)
class Prompts:
    """The prompts of one cell as one audience gets them: token ids.

    Audiences that share instances need names of their own: a prompt sent twice would be found in
    the prefix cache the second time. Others may share a name, and get the very same prompts.

    Attributes:
        vocab_size: ids are drawn below it.
        shared_prefix: part of each prompt, 0 to 1, that all of this audience begin with.

    Raises:
        ConfigError: a number is out of its range.
    """

    seed: int
    input_tokens: int
    audience: str
    vocab_size: int
    shared_prefix: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.shared_prefix <= 1:
            raise ConfigError(
                f"shared prefix: expected a part from 0 to 1, found {self.shared_prefix:g}"
            )
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise ConfigError(
                f"vocabulary: expected more than {FIRST_TOKEN_ID} ids, found {self.vocab_size}"
            )

    @property
    def num_shared(self) -> int:
        """Tokens that all prompts begin with."""
        return round(self.input_tokens * self.shared_prefix)

    @cached_property
    def _shared(self) -> list[int]:
        return self._draw("shared", self.num_shared)

    def prompt(self, name: str) -> list[int]:
        """The prompt of this name, always the same."""
        return self._shared + self._draw(f"own {name}", self.input_tokens - self.num_shared)

    def _draw(self, name: str, count: int) -> list[int]:
        chance = random.Random(f"{self.seed} prompt {self.input_tokens} {self.audience} {name}")
        return chance.choices(range(FIRST_TOKEN_ID, self.vocab_size), k=count)


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a burst.

    Attributes:
        arrival_s: when it is sent, in seconds from the start of its burst.
        prompts: where its prompt is drawn from.
        name: of its prompt.
        output_tokens: to generate; None: as many as all requests of the run.
    """

    arrival_s: float
    prompts: Prompts
    name: str
    output_tokens: int | None = None


Burst = tuple[Planned, ...]
"""Requests that are sent in one go."""


def burst(cell: Cell, prompts: Prompts, number: int) -> Burst:
    """Everything a side is sent in one round of a cell."""
    return tuple(
        Planned(arrival_s, prompts, f"{number} {index} {cell.qps:g}")
        for index, arrival_s in enumerate(arrivals(cell, prompts.seed, number))
    )


def turn_orders(num_sides: int, num_rounds: int) -> tuple[tuple[int, ...], ...]:
    """Per round, in which order the sides have their turn: each is first equally often.

    With two sides they alternate. With more, every second cycle runs backwards, so that a side does
    not always come after the same one.
    """
    sides = list(range(num_sides))
    orders = []
    for number in range(num_rounds):
        cycle, start = divmod(number, num_sides)
        order = sides[start:] + sides[:start]
        orders.append(tuple(order if cycle % 2 == 0 or num_sides == 2 else reversed(order)))
    return tuple(orders)


def audiences(processes: Sequence[frozenset[str]]) -> tuple[str, ...]:
    """A name of its audience for each side: two sides that share a process have different ones.

    As few as possible, so that sides apart from each other get the very same prompts.
    """
    numbers: list[int] = []
    for own in processes:
        taken = {n for n, other in zip(numbers, processes, strict=False) if own & other}
        numbers.append(next(n for n in itertools.count(1) if n not in taken))
    return tuple(f"audience {number}" for number in numbers)
