"""Arrivals, prompts and turns follow from the seed alone."""

import itertools
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.bench.plan import (
    FIRST_TOKEN_ID,
    Cell,
    Prompts,
    arrivals,
    audiences,
    burst,
    cells,
    turn_orders,
)
from kvcourier.errors import ConfigError

SEEDS = st.integers(0, 1 << 31)
CELLS = st.builds(
    Cell, st.integers(1, 300), st.floats(min_value=0.1, max_value=50), st.integers(1, 50)
)


def prompts(**changed: object) -> Prompts:
    fields = {"seed": 1, "input_tokens": 64, "audience": "all", "vocab_size": 256}
    return Prompts(**(fields | changed))  # type: ignore[arg-type]


@given(CELLS, SEEDS, st.integers(0, 9))
def test_arrivals_are_repeatable_ascending_and_begin_at_once(
    cell: Cell, seed: int, number: int
) -> None:
    times = arrivals(cell, seed, number)
    assert times == arrivals(cell, seed, number)
    assert len(times) == cell.requests
    assert times[0] == 0
    assert list(times) == sorted(times)


def test_arrivals_are_poisson() -> None:
    times = arrivals(Cell(1, 4.0, 20_000), seed=5)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    # Mean and standard deviation of exponential gaps are equal.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)


def test_rounds_and_seeds_differ_audiences_meet_the_same_bursts() -> None:
    cell = Cell(64, 2.0, 10)
    assert arrivals(cell, 1) != arrivals(cell, 2)
    assert arrivals(cell, 1, 0) != arrivals(cell, 1, 1)
    here, there = (burst(cell, prompts(audience=name), 3) for name in ("one", "two"))
    assert [each.arrival_s for each in here] == [each.arrival_s for each in there]
    assert [each.name for each in here] == [each.name for each in there]
    first, other = here[0], there[0]
    assert first.prompts.prompt(first.name) != other.prompts.prompt(other.name)


@given(st.integers(1, 200), st.floats(0, 1), SEEDS)
def test_a_prompt_is_repeatable_as_long_as_asked_and_of_allowed_ids(
    length: int, shared: float, seed: int
) -> None:
    made = prompts(input_tokens=length, shared_prefix=shared, seed=seed)
    prompt = made.prompt("a")
    again = prompts(input_tokens=length, shared_prefix=shared, seed=seed)
    assert prompt == again.prompt("a")
    assert len(prompt) == length
    assert all(FIRST_TOKEN_ID <= token < 256 for token in prompt)
    assert prompt[: made.num_shared] == made.prompt("b")[: made.num_shared]


def test_prompts_share_no_beginning_unless_asked() -> None:
    beginnings = {
        tuple(prompts(audience=audience, seed=seed).prompt(name)[:16])
        for audience in ("one", "two")
        for seed in (1, 2)
        for name in map(str, range(50))
    }
    assert len(beginnings) == 200
    half = prompts(shared_prefix=0.5)
    first, second = half.prompt("a"), half.prompt("b")
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


@given(st.integers(1, 12), st.integers(0, 40))
def test_every_side_has_one_turn_a_round_and_is_first_equally_often(
    num_sides: int, num_rounds: int
) -> None:
    orders = turn_orders(num_sides, num_rounds)
    assert len(orders) == num_rounds
    assert all(sorted(order) == list(range(num_sides)) for order in orders)
    whole = orders[: num_rounds // num_sides * num_sides]
    firsts = Counter(order[0] for order in whole)
    assert all(firsts[side] == len(whole) // num_sides for side in range(num_sides))


def test_two_sides_alternate() -> None:
    assert turn_orders(2, 4) == ((0, 1), (1, 0), (0, 1), (1, 0))


@given(st.lists(st.frozensets(st.sampled_from("abcd"), min_size=1), max_size=6))
def test_only_sides_apart_from_each_other_share_an_audience(sides: list[frozenset[str]]) -> None:
    names = audiences(sides)
    assert len(names) == len(sides)
    for index, own in enumerate(sides):
        for other in range(index):
            assert names[index] != names[other] or not own & sides[other]


def test_separate_sides_get_the_very_same_prompts() -> None:
    one, two = audiences([frozenset("ab"), frozenset("cd")])
    assert one == two


def test_cells_are_every_length_with_every_rate() -> None:
    found = cells([512, 128, 512], [2.0, 1.0], 5)
    assert [(c.input_tokens, c.qps, c.requests) for c in found] == [
        *((128, 1.0, 5), (128, 2.0, 5)),
        *((512, 1.0, 5), (512, 2.0, 5)),
    ]


@pytest.mark.parametrize("numbers", [(0, 1.0, 1), (1, 0.0, 1), (1, float("inf"), 1), (1, 1.0, 0)])
def test_a_cell_of_nothing_is_refused(numbers: tuple[int, float, int]) -> None:
    with pytest.raises(ConfigError, match="cell: expected numbers above 0"):
        Cell(*numbers)


@pytest.mark.parametrize("changed", [{"shared_prefix": 1.5}, {"vocab_size": FIRST_TOKEN_ID}])
def test_unusable_prompts_are_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        prompts(**changed)
