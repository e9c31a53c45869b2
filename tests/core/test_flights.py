"""Flights: memory is quiet when every operation on it is terminal, never before."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvcourier.core.events import OperationId
from kvcourier.core.flights import FlightTable
from kvcourier.errors import LocalProtocolError

OWNERS = ["p", "q", "r"]


class FlightsAgainstAList(RuleBasedStateMachine):
    """The model is a list of (operation, owner) pairs."""

    in_flight = Bundle("in_flight")

    def __init__(self) -> None:
        super().__init__()
        self.table: FlightTable[str] = FlightTable()
        self.plain: list[tuple[OperationId, str]] = []
        self.ever: set[OperationId] = set()

    @rule(target=in_flight, owner=st.sampled_from(OWNERS))
    def launch(self, owner):
        operation_id = self.table.launch(owner)
        assert operation_id not in self.ever, "a name was used twice"
        self.ever.add(operation_id)
        self.plain.append((operation_id, owner))
        return operation_id

    @rule(operation_id=consumes(in_flight))
    def land(self, operation_id):
        owner = dict(self.plain)[operation_id]
        assert self.table.land(operation_id) == owner
        self.plain.remove((operation_id, owner))
        with pytest.raises(LocalProtocolError, match=f"operation {operation_id} is not in flight"):
            self.table.land(operation_id)

    @invariant()
    def agrees(self):
        assert len(self.table) == len(self.plain)
        for owner in OWNERS:
            operations = {each for each, whose in self.plain if whose == owner}
            assert self.table.of(owner) == operations
            assert self.table.quiet(owner) is (not operations)
        for operation_id in self.ever:
            assert self.table.owner(operation_id) == dict(self.plain).get(operation_id)


TestFlightsAgainstAList = pytest.mark.slow(FlightsAgainstAList.TestCase)
TestFlightsAgainstAList.settings = settings(stateful_step_count=30, max_examples=50)


def test_the_first_of_several_to_end_does_not_make_memory_quiet():
    """vllm#56104: the first failed handle freed blocks while its siblings still wrote."""
    table: FlightTable[str] = FlightTable()
    first, second, third = (table.launch("hold") for _ in range(3))
    table.land(second)
    table.land(first)
    assert not table.quiet("hold")
    table.land(third)
    assert table.quiet("hold")


def test_an_operation_counts_from_the_decision_to_post():
    table: FlightTable[str] = FlightTable()
    assert table.quiet("hold")
    table.launch("hold")
    assert not table.quiet("hold")


def test_an_operation_nobody_launched_cannot_land():
    with pytest.raises(LocalProtocolError, match="operation 9 is not in flight"):
        FlightTable[str]().land(OperationId(9))
