"""What ratios say, and what follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.reports import filled
from kvcourier.bench.plan import Cell
from kvcourier.bench.report import Comparison, Row
from kvcourier.bench.samples import METRICS
from kvcourier.bench.stats import MIN_TURNS, Estimate, Ratio
from kvcourier.trial.decision import (
    JUDGED,
    Advice,
    Decision,
    Judgement,
    Point,
    Reading,
    as_json,
    decide,
    judge,
)

MARGIN = 0.03
RATES = (1.0, 2.0, 4.0)
JUDGEMENTS = st.lists(st.sampled_from(Judgement), min_size=1, max_size=8)


def ratio(low: float, high: float, num_turns: int = 8) -> Ratio:
    return Ratio(Estimate((low * high) ** 0.5, low, high), 16, num_turns)


def comparisons(*slowness: float, length: int = 512, turns: int = 8) -> list[Comparison]:
    """The candidate as slow as said, at one rate after the other."""
    found = []
    for qps, slow in zip(RATES, slowness, strict=False):
        cell = Cell(length, qps, 4)
        a = filled(Row("baseline: x", cell), 1.0, turns)
        found.append(Comparison(a, filled(Row("candidate: y", cell), slow, turns)))
    return found


def ttft(decision: Decision) -> Reading:
    return next(each for each in decision.readings if each.metric.key == "ttft_ms")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.70, 0.80, Judgement.BETTER),
        (1.20, 1.40, Judgement.WORSE),
        (0.98, 1.02, Judgement.EQUAL),
        # Surely faster, by less than what matters.
        (0.98, 0.99, Judgement.EQUAL),
        (0.90, 0.99, Judgement.BETTER),
        (0.80, 1.20, Judgement.UNSURE),
        (0.98, 1.05, Judgement.UNSURE),
    ],
)
def test_an_interval_is_judged_by_where_all_of_it_lies(
    low: float, high: float, expected: Judgement
) -> None:
    assert judge(ratio(low, high), MARGIN) is expected


def test_nothing_measured_or_too_few_turns_are_unsure() -> None:
    assert judge(None, MARGIN) is Judgement.UNSURE
    assert judge(ratio(0.1, 0.2, MIN_TURNS - 1), MARGIN) is Judgement.UNSURE


@given(JUDGEMENTS)
def test_better_from_is_the_lowest_rate_of_an_unbroken_end(judgements: list[Judgement]) -> None:
    points = [Point(float(n), None, each) for n, each in enumerate(judgements)]
    start = Reading(METRICS[0], 512, tuple(points)).better_from
    if start is None:
        assert judgements[-1] is not Judgement.BETTER
        return
    at = int(start)
    assert all(each is Judgement.BETTER for each in judgements[at:])
    assert at == 0 or judgements[at - 1] is not Judgement.BETTER


def test_better_everywhere_means_switch_and_says_from_when() -> None:
    decision = decide(comparisons(0.5, 0.5, 0.5), MARGIN)
    assert decision.advice is Advice.SWITCH
    assert ttft(decision).better_from == 1
    assert any(
        "TTFT, 512 tokens: the candidate is better from 1/s on" in s for s in decision.because
    )


def test_better_under_load_only() -> None:
    decision = decide(comparisons(1.0, 0.5, 0.5), MARGIN)
    assert decision.advice is Advice.SWITCH
    assert ttft(decision).better_from == 2
    assert any("equal at 1/s" in sentence for sentence in decision.because)


def test_better_here_and_worse_there_is_for_people_to_weigh() -> None:
    assert decide(comparisons(1.5, 1.0, 0.5), MARGIN).advice is Advice.TRADE_OFF


def test_worse_and_nowhere_better_to_the_end_means_keep() -> None:
    assert decide(comparisons(1.0, 1.5), MARGIN).advice is Advice.KEEP
    assert decide(comparisons(0.5, 1.5), MARGIN).advice is Advice.KEEP


def test_equal_sides_are_called_equal_not_better() -> None:
    assert decide(comparisons(1.0, 1.0), MARGIN).advice is Advice.EQUAL


def test_too_few_turns_decide_nothing_and_it_is_said() -> None:
    decision = decide(comparisons(0.5, 0.5, turns=MIN_TURNS - 1), MARGIN)
    assert decision.advice is Advice.UNDECIDED
    assert any(f"fewer than {MIN_TURNS} turns" in sentence for sentence in decision.undecided)


def test_nothing_measured_decides_nothing() -> None:
    assert decide([], MARGIN).advice is Advice.UNDECIDED


def test_a_candidate_that_fails_more_is_not_switched_to_however_fast() -> None:
    found = comparisons(0.5, 0.5)
    turn = found[0].b.collected.turns[0]
    object.__setattr__(turn, "failures", ("HTTP 500",))
    decision = decide(found, MARGIN)
    assert decision.advice is Advice.KEEP
    assert decision.because[0] == "failed requests: 0 of the baseline, 1 of the candidate"


def test_lengths_are_judged_apart() -> None:
    found = [*comparisons(1.0, 1.0, length=128), *comparisons(0.5, 0.5, length=4096)]
    decision = decide(found, MARGIN)
    assert {(r.metric.key, r.input_tokens) for r in decision.readings} == {
        (metric.key, length) for metric in JUDGED for length in (128, 4096)
    }
    starts = {r.input_tokens: r.better_from for r in decision.readings if r.metric is METRICS[0]}
    assert starts == {128: None, 4096: 1.0}


def test_the_decision_as_data() -> None:
    data = as_json(decide(comparisons(0.5, 0.5), MARGIN))
    assert data["advice"] == "switch"
    first = data["readings"][0]
    assert (first["metric"], first["better_from_qps"]) == ("ttft_ms", 1.0)
    assert first["points"][1]["judgement"] == "better"
    assert first["points"][1]["ratio"] == pytest.approx(0.5)
