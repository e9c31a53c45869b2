"""Intervals on distributions whose truth is known, and verdicts."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.bench.stats import (
    MIN_FOR_P99,
    MIN_TURNS,
    Estimate,
    Ratio,
    Verdict,
    paired_ratio,
    summarize,
)

TIMES = st.floats(min_value=1e-3, max_value=1e6)
TURNS = st.lists(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=4), min_size=1, max_size=12)


@given(st.lists(TIMES, min_size=1, max_size=60))
def test_an_interval_is_around_its_value_and_within_the_samples(values: list[float]) -> None:
    summary = summarize(values)
    assert summary is not None
    assert summary.n == len(values)
    for estimate in (summary.median, summary.mean, summary.p90):
        assert estimate.low <= estimate.value <= estimate.high
        assert min(values) <= estimate.low * (1 + 1e-9)
        assert estimate.high <= max(values) * (1 + 1e-9)
    assert summary.median.value <= summary.p90.value


def test_there_is_no_summary_of_nothing() -> None:
    assert summarize([]) is None


def test_quantiles_are_those_of_the_samples() -> None:
    summary = summarize([float(value) for value in range(101)])
    assert summary is not None and summary.p99 is not None
    values = (summary.median.value, summary.mean.value, summary.p90.value, summary.p99.value)
    assert values == (50.0, 50.0, 90.0, 99.0)


def test_the_99th_percentile_needs_samples() -> None:
    few, enough = summarize([1.0] * (MIN_FOR_P99 - 1)), summarize([1.0] * MIN_FOR_P99)
    assert few is not None and few.p99 is None
    assert enough is not None and enough.p99 == Estimate(1.0, 1.0, 1.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [random.Random(1).gauss(10, 3) for _ in range(30)]
    assert summarize(values, seed=4) == summarize(values, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "median", "mean"),
    [
        (lambda chance: chance.gauss(10, 2), 10.0, 10.0),
        (lambda chance: chance.expovariate(1.0), math.log(2), 1.0),
    ],
    ids=["normal", "exponential"],
)
def test_intervals_hold_the_truth_about_as_often_as_they_say(
    draw: Callable[[random.Random], float], median: float, mean: float
) -> None:
    chance = random.Random(7)
    covered = {"median": 0, "mean": 0}
    trials = 200
    for trial in range(trials):
        summary = summarize([draw(chance) for _ in range(50)], seed=trial)
        assert summary is not None
        covered["median"] += summary.median.low <= median <= summary.median.high
        covered["mean"] += summary.mean.low <= mean <= summary.mean.high
    # 95 % are promised; percentile intervals of 50 skewed values keep a little less.
    assert all(0.88 * trials <= count for count in covered.values()), covered
    # An interval that always holds the truth would be too wide to say anything.
    assert any(count < trials for count in covered.values()), covered


@given(TURNS)
def test_swapping_the_sides_inverts_the_ratio(turns: list[list[tuple[float, float]]]) -> None:
    there = paired_ratio(turns)
    back = paired_ratio([[(b, a) for a, b in turn] for turn in turns])
    assert there is not None and back is not None
    assert there.estimate.value * back.estimate.value == pytest.approx(1)
    assert there.estimate.low <= there.estimate.value <= there.estimate.high
    assert there.num_pairs == sum(map(len, turns))
    assert there.num_turns == len(turns)


@given(TURNS, st.floats(min_value=1e-3, max_value=1e3))
def test_a_constant_factor_is_found_exactly(
    turns: list[list[tuple[float, float]]], factor: float
) -> None:
    found = paired_ratio([[(a, a * factor) for a, _ in turn] for turn in turns])
    assert found is not None
    bounds = (found.estimate.low, found.estimate.value, found.estimate.high)
    assert bounds == pytest.approx((factor, factor, factor))


def test_times_that_are_not_above_zero_are_left_out() -> None:
    found = paired_ratio([[(0.0, 1.0), (2.0, 1.0)], [(1.0, 0.0)], [(-1.0, 1.0)]])
    assert found is not None
    assert (found.estimate.value, found.num_pairs, found.num_turns) == (0.5, 1, 1)
    assert paired_ratio([[(0.0, 1.0)]]) is None
    assert paired_ratio([]) is None


def test_turns_are_resampled_whole() -> None:
    # Within each turn all pairs agree, so a thousand pairs know no more than their eight turns.
    factors = [0.5, 2.0, 0.5, 2.0, 0.5, 2.0, 0.5, 2.0]
    few = paired_ratio([[(1.0, factor)] for factor in factors])
    many = paired_ratio([[(1.0, factor)] * 125 for factor in factors])
    assert few is not None and many is not None
    assert many.estimate.low == pytest.approx(few.estimate.low)
    assert many.estimate.high == pytest.approx(few.estimate.high)


@pytest.mark.parametrize(
    ("low", "high", "num_turns", "verdict"),
    [
        (0.7, 0.9, MIN_TURNS, Verdict.B_BETTER),
        (1.1, 1.3, MIN_TURNS, Verdict.A_BETTER),
        (0.9, 1.1, MIN_TURNS, Verdict.CANNOT_TELL),
        (0.9, 1.0, MIN_TURNS, Verdict.CANNOT_TELL),
        (0.7, 0.9, MIN_TURNS - 1, Verdict.CANNOT_TELL),
    ],
)
def test_a_verdict_needs_a_whole_interval_on_one_side(
    low: float, high: float, num_turns: int, verdict: Verdict
) -> None:
    assert Ratio(Estimate((low + high) / 2, low, high), 99, num_turns).verdict is verdict


@pytest.mark.slow
def test_equal_sides_are_seldom_told_apart_and_unequal_ones_are() -> None:
    chance = random.Random(3)

    def verdicts(factor: float) -> list[Verdict]:
        found = []
        for seed in range(60):
            turns = [
                [(chance.lognormvariate(0, 0.1), factor * chance.lognormvariate(0, 0.1))]
                for _ in range(24)
            ]
            ratio = paired_ratio(turns, seed)
            assert ratio is not None
            found.append(ratio.verdict)
        return found

    assert verdicts(1.0).count(Verdict.CANNOT_TELL) >= 50
    assert verdicts(1.3).count(Verdict.A_BETTER) == 60
    assert verdicts(0.7).count(Verdict.B_BETTER) == 60
