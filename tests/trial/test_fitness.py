"""Whether the traffic is such that a change can help."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.trial.fitness import Alone, Facts, Fit, examine

MILLISECONDS = st.floats(0.01, 10_000)


def facts(**changed: object) -> Facts:
    known = {
        "brings_push": True,
        "input_tokens": [2000],
        "output_tokens": [64],
        "rates": [1.0],
        "alone": [Alone(2000, 100.0, 45.0, 5.0)],
        "num_prefill": 1,
    }
    return Facts(**(known | changed))  # type: ignore[arg-type]


def fits(found: Facts) -> list[Fit]:
    return [each.fit for each in examine(found)]


def test_much_time_after_prefill_can_be_hidden() -> None:
    (finding,) = examine(facts())
    assert finding.fit is Fit.CAN_HELP
    assert "of 100 ms" in finding.sentence
    assert "40 ms or 40%" in finding.sentence


def test_where_a_decode_step_is_all_that_follows_there_is_little_to_gain() -> None:
    assert fits(facts(alone=[Alone(2000, 100.0, 6.0, 5.0)])) == [Fit.LITTLE_TO_GAIN]


def test_between_much_and_little_only_measuring_tells() -> None:
    assert fits(facts(alone=[Alone(2000, 100.0, 15.0, 5.0)])) == [Fit.CANNOT_TELL]


def test_instances_without_stories_leave_it_open() -> None:
    (finding,) = examine(facts(alone=[Alone(2000, 100.0, None, 5.0)]))
    assert finding.fit is Fit.CANNOT_TELL
    assert "do not tell when prefill ended" in finding.sentence


def test_a_prefill_as_short_as_the_set_up_hides_little() -> None:
    found = examine(facts(alone=[Alone(50, 10.0, 6.0, 1.0)]))
    assert any("prefill is over after 4.0 ms" in each.sentence for each in found)


def test_short_prompts_are_told_where_prefill_cannot_be_timed() -> None:
    known = {"alone": [Alone(100, 10.0, None, None)], "input_tokens": [50, 60, 2000]}
    assert any("67% of the prompts" in each.sentence for each in examine(facts(**known)))


def test_rates_at_which_prefill_is_saturated_are_named() -> None:
    # Prefill takes 55 ms: 16/s are 88 % of one instance, 18/s are 99 %.
    said = [each.sentence for each in examine(facts(rates=[16.0, 18.0]))]
    assert [text for text in said if "queues decide" in text] == [
        "at 18/s prefill alone takes about 99% of the prefill instances' time: queues decide "
        "about the time to the first token there, not the transfer"
    ]
    assert not any("queues" in e.sentence for e in examine(facts(rates=[18.0], num_prefill=2)))


def test_answers_of_one_token_have_no_time_per_token() -> None:
    assert any("single token" in each.sentence for each in examine(facts(output_tokens=[1, 1, 9])))


@pytest.mark.parametrize("alone", [Alone(2000, 100.0, 45.0, 5.0), Alone(50, 10.0, None, None)])
def test_a_change_that_brings_no_push_is_not_judged_by_what_push_hides(alone: Alone) -> None:
    assert examine(facts(brings_push=False, alone=[alone])) == []


@given(MILLISECONDS, st.none() | MILLISECONDS, st.none() | MILLISECONDS, st.integers(1, 9000))
def test_whatever_was_timed_there_is_a_word_for_it(
    ttft_ms: float, after_ms: float | None, tpot_ms: float | None, length: int
) -> None:
    after_ms = None if after_ms is None else min(after_ms, ttft_ms)
    assert examine(facts(alone=[Alone(length, ttft_ms, after_ms, tpot_ms)]))
