"""Deadlines against a plain list of (name, time) that is searched from end to end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcourier.core.deadlines import Deadlines

NAMES = st.sampled_from(["a", "b", "c", "d", ("kind", 1), 7])
TIMES = st.integers(-5, 40).map(float)


class DeadlinesAgainstAList(RuleBasedStateMachine):
    """Every question is also answered by looking at every entry."""

    def __init__(self) -> None:
        super().__init__()
        self.deadlines: Deadlines[object] = Deadlines()
        self.plain: list[tuple[object, float]] = []

    @rule(name=NAMES, at=TIMES)
    def set(self, name, at):
        self.deadlines.set(name, at)
        self.plain = [entry for entry in self.plain if entry[0] != name] + [(name, at)]

    @rule(name=NAMES)
    def cancel(self, name):
        self.deadlines.cancel(name)
        self.plain = [entry for entry in self.plain if entry[0] != name]

    @rule(now=TIMES)
    def take_due(self, now):
        due = [(name, at) for name, at in self.plain if at <= now]
        taken = self.deadlines.take_due(now)
        assert sorted(map(repr, taken)) == sorted(repr(name) for name, _ in due)
        when = dict(due)
        assert [when[name] for name in taken] == sorted(when[name] for name in taken)
        self.plain = [entry for entry in self.plain if entry not in due]

    @rule(now=TIMES)
    def pop_due(self, now):
        due = [(name, at) for name, at in self.plain if at <= now]
        name = self.deadlines.pop_due(now)
        assert (name is None) is (not due)
        if due:
            assert dict(due)[name] == min(at for _, at in due)
            self.plain = [entry for entry in self.plain if entry[0] != name]

    @invariant()
    def agrees(self):
        assert len(self.deadlines) == len(self.plain)
        assert self.deadlines.next() == min((at for _, at in self.plain), default=None)
        for name, at in self.plain:
            assert name in self.deadlines
            assert self.deadlines.at(name) == at


TestDeadlinesAgainstAList = pytest.mark.slow(DeadlinesAgainstAList.TestCase)
TestDeadlinesAgainstAList.settings = settings(stateful_step_count=30, max_examples=100)


def test_unknown_names_are_fine():
    deadlines: Deadlines[str] = Deadlines()
    deadlines.cancel("nobody")
    assert deadlines.at("nobody") is None
    assert "nobody" not in deadlines
    assert deadlines.next() is None
    assert deadlines.take_due(1e9) == []
    assert deadlines.pop_due(1e9) is None


def test_a_moved_deadline_is_due_once_and_at_its_new_time():
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 5.0)
    deadlines.set("a", 9.0)
    assert deadlines.take_due(8.9) == []
    assert deadlines.take_due(9.0) == ["a"]
    assert deadlines.take_due(100.0) == []


def test_setting_the_same_time_again_does_not_double_the_deadline():
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 5.0)
    deadlines.set("a", 5.0)
    deadlines.cancel("a")
    deadlines.set("a", 5.0)
    assert deadlines.take_due(5.0) == ["a"]
    assert len(deadlines) == 0


def test_acting_on_one_may_cancel_the_next():
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("second", 2.0)
    deadlines.set("first", 1.0)
    assert deadlines.pop_due(5.0) == "first"
    deadlines.cancel("second")
    assert deadlines.pop_due(5.0) is None


def test_names_that_cannot_be_compared_may_be_due_together():
    deadlines: Deadlines[object] = Deadlines()
    for name in ("text", 3, ("pair", 1), frozenset()):
        deadlines.set(name, 1.0)
    assert deadlines.take_due(1.0) == ["text", 3, ("pair", 1), frozenset()]


@pytest.mark.slow
@given(
    num_live=st.integers(0, 40),
    moves=st.lists(st.tuples(st.integers(0, 39), TIMES), min_size=500, max_size=500),
)
@settings(max_examples=10)
def test_churn_does_not_grow_the_heap(num_live, moves):
    deadlines: Deadlines[int] = Deadlines()
    live: dict[int, float] = {}
    for name, at in moves:
        if name < num_live:
            deadlines.set(name, at)
            live[name] = at
        else:
            deadlines.set(name, at)
            deadlines.cancel(name)
        # Looked at from inside: a leak shows nowhere else until the process is out of memory.
        assert len(deadlines._heap) <= 2 * max(1, len(deadlines) + 1) + 64
    assert sorted(deadlines.take_due(1e9)) == sorted(live)
