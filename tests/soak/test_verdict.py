"""Whether a soak would notice: each thing that must not be, alone, is a sentence."""

import dataclasses
import itertools

import pytest

from soak import plan
from soak.memory import SHORTEST_S, WARM_UP_S, Growth, Sample, growth
from soak.plan import Call
from soak.traffic import Outcome
from soak.verdict import DESCRIPTORS_BOUND, MEMORY_BOUND, Evidence, Restart, violations

CALL = Call((0,), 3)
GOOD = Outcome(CALL, began=1.0, ended=2.0, end="answered", tokens=[[7, 8, 9]])
STEADY = Growth(0.0, 0.0, num_lives=1, minutes=1.0)
FINE = Evidence(
    seed=0,
    minutes=1.0,
    outcomes=[GOOD],
    restarts=[Restart("prefill", killed=10.0, back=15.0)],
    expected=[[7, 8, 9, 10]],
    leftovers={"prefill": {}},
    samples=[],
    growth={"prefill": STEADY, "decode": None},
    errors={"prefill": []},
    last_answers={"pull": True},
    began=0.0,
    load=1.0,
)


def changed(**fields: object) -> Evidence:
    return dataclasses.replace(FINE, **fields)


def with_outcome(**fields: object) -> Evidence:
    return changed(outcomes=[GOOD, dataclasses.replace(GOOD, **fields)])


def test_nothing_is_found_where_all_is_well() -> None:
    assert violations(FINE) == []


@pytest.mark.parametrize(
    ("evidence", "word"),
    [
        (with_outcome(tokens=[[7, 8, 10]]), "wrong tokens"),
        (with_outcome(tokens=[[7, 8]]), "wrong tokens"),
        (with_outcome(tokens=[[7, 8, 9, 10]]), "wrong tokens"),
        (with_outcome(end="left", tokens=[[8]]), "wrong tokens"),
        (with_outcome(end="failed", tokens=[[7, 9]], ended=12.0), "wrong tokens"),
        (with_outcome(end="hung", ended=12.0, tokens=[[]]), "no end"),
        (with_outcome(end="failed", tokens=[[]]), "nothing was down"),
        (with_outcome(end="failed", tokens=[[]], began=15.1, ended=16.0), "nothing was down"),
        (changed(leftovers={"decode": {"kvcourier_wants": 1.0}}), "left behind"),
        (changed(growth={"decode": Growth(MEMORY_BOUND + 1, 0.0, 1, 1.0)}), "memory"),
        (changed(growth={"decode": Growth(0.0, DESCRIPTORS_BOUND + 1, 1, 1.0)}), "descriptors"),
        (changed(growth={"router": Growth(0.0, 1.0, 1, DESCRIPTORS_BOUND + 1)}), "descriptors"),
        (changed(errors={"prefill": ["Traceback | ..."]}), "log of prefill"),
        (changed(last_answers={"push": False}), "not right afterwards"),
        (changed(outcomes=[]), "nothing was answered"),
        (changed(restarts=[]), "restarts"),
    ],
)
def test_what_must_not_be_is_found(evidence: Evidence, word: str) -> None:
    (found,) = violations(evidence)
    assert word in found


@pytest.mark.parametrize(
    "outcome",
    [
        {"end": "left", "tokens": [[7]]},
        {"end": "left", "tokens": [[]]},
        {"end": "failed", "tokens": [[7, 8]], "began": 9.0, "ended": 11.0},
        {"end": "failed", "tokens": [[]], "began": 11.0, "ended": 12.0},
        {"end": "failed", "tokens": [[]], "began": 14.0, "ended": 20.0},
    ],
)
def test_what_a_restart_or_the_client_did_is_allowed(outcome: dict[str, object]) -> None:
    assert violations(with_outcome(**outcome)) == []


def life(pid: int, start: float, level: float, mib_a_second: float) -> list[Sample]:
    length = int(WARM_UP_S + 2 * SHORTEST_S)
    return [
        Sample("decode", pid, start + at, level + mib_a_second * at, 40, 9) for at in range(length)
    ]


def test_lives_are_compared_each_by_itself() -> None:
    """A later life at another level is no growth; a short one, and a warm-up, say nothing."""
    steady = [*life(1, 0.0, 300.0, 0.0), *life(2, 100.0, 500.0, 0.0)]
    found = growth(steady)
    assert found is not None and found.num_lives == 2
    assert found.mib_per_minute == pytest.approx(0.0)
    rising = growth([*life(1, 0.0, 300.0, 0.1), *life(2, 100.0, 100.0, 0.1)])
    assert rising is not None and rising.mib_per_minute == pytest.approx(6.0)
    assert growth(life(1, 0.0, 300.0, 1.0)[: int(WARM_UP_S + SHORTEST_S) - 2]) is None


def test_a_seed_repeats_what_clients_ask() -> None:
    def first(seed: int, client: int) -> list[Call]:
        calls = plan.calls(seed, client, 42)
        return [next(calls) for _ in range(200)]

    assert first(1, 0) == first(1, 0) != first(1, 1)
    assert plan.pool(1) == plan.pool(1) != plan.pool(2)
    assert plan.restarts(1, 5) == plan.restarts(1, 5)


def test_calls_are_of_every_kind() -> None:
    calls = plan.calls(0, 0, 42)
    drawn = [next(calls) for _ in range(2000)]
    kinds = {(call.mode, call.binding, call.streams) for call in drawn if call.whom == "router"}
    assert len(kinds) == len(plan.MODES) * len(plan.BINDINGS) * 2
    assert {call.whom for call in drawn if len(call.prompts) > 1} == {"prefill", "decode"}
    assert any(call.leaves_after_tokens for call in drawn)
    early, late = plan.LEAVE_S
    delays = [call.leaves_after_s for call in drawn if call.leaves_after_s is not None]
    assert min(delays) < 10 * early and max(delays) > late / 10
    assert any(not call.leaves for call in drawn)


@pytest.mark.parametrize("minutes", [0.5, 1, 2, 30])
def test_one_process_is_killed_each_minute(minutes: float) -> None:
    kills = plan.restarts(3, minutes)
    assert len(kills) == max(1, minutes)
    whom = [name for _, name in kills]
    assert all(one != other for one, other in itertools.pairwise(whom))
    assert all(0 < at < minutes * 60 for at, _ in kills)
