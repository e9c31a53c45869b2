"""The tables are complete: every state is listed, reached, left, and left in time."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from kvcourier.config import Timing
from kvcourier.core.lifecycle import (
    BY_ENGINE,
    DELIVERY,
    EXITS_BY_TIME,
    HOLD,
    WANT,
    DeliveryEvent,
    DeliveryState,
    HoldEvent,
    HoldState,
    WantEvent,
    WantState,
    diagram,
    diagrams,
    step,
)
from kvcourier.errors import LocalProtocolError

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
BEGIN, END = "<!-- lifecycle:begin -->", "<!-- lifecycle:end -->"
TABLES = pytest.mark.parametrize(
    ("table", "states", "events"),
    [
        (HOLD, HoldState, HoldEvent),
        (DELIVERY, DeliveryState, DeliveryEvent),
        (WANT, WantState, WantEvent),
    ],
    ids=["hold", "delivery", "want"],
)


def reachable(table, start):
    found, todo = {start}, [start]
    while todo:
        for after in table[todo.pop()].values():
            if after not in found:
                found.add(after)
                todo.append(after)
    return found


@TABLES
def test_every_state_and_event_is_used(table, states, events):
    assert set(table) == set(states)
    assert {event for transitions in table.values() for event in transitions} == set(events)


@TABLES
def test_every_state_is_reached_and_reaches_an_end(table, states, events):
    first = next(iter(table))
    assert reachable(table, first) == set(states)
    terminal = {state for state in states if not table[state]}
    assert terminal
    for state in states:
        assert reachable(table, state) & terminal, f"{state} can never end"


def test_every_state_that_waits_is_ended_by_time():
    """vllm#46283: both sides aborted, and a state without an exit kept its blocks for ever."""
    waiting = {state for table in (HOLD, DELIVERY, WANT) for state, after in table.items() if after}
    # A failed delivery waits for nothing: it has its answer, and goes with its hold.
    assert set(EXITS_BY_TIME) == waiting - {DeliveryState.FAILED}
    settings = {field.name for field in dataclasses.fields(Timing)}
    for state, limit in EXITS_BY_TIME.items():
        assert limit == BY_ENGINE or limit in settings, f"{state}: {limit} is no setting"


def test_only_states_without_blocks_of_ours_wait_for_the_engine():
    waiting = {state for state, limit in EXITS_BY_TIME.items() if limit == BY_ENGINE}
    assert waiting == {HoldState.COMPUTING, WantState.QUEUED}


@TABLES
def test_every_transition_is_taken_and_every_other_refused(table, states, events):
    for state in states:
        for event in events:
            if event in table[state]:
                assert step(table, state, event, "r1") is table[state][event]
            else:
                with pytest.raises(LocalProtocolError) as caught:
                    step(table, state, event, "r1")
                assert str(caught.value) == f"r1: no transition from {state} by {event}"


@TABLES
def test_what_is_quarantined_ends_by_quiescence_only(table, states, events):
    """Memory in flight cannot come back by any other way than its end."""
    (event,) = table[states("quarantined")]
    assert event == "quiesced"


@TABLES
def test_a_diagram_draws_every_transition(table, states, events):
    lines = diagram(table).splitlines()
    drawn = [line for line in lines if ": " in line]
    assert len(drawn) == sum(len(transitions) for transitions in table.values())
    for state, transitions in table.items():
        for event, after in transitions.items():
            assert f"    {state} --> {after}: {event}" in lines
        assert (f"    {state} --> [*]" in lines) is (not transitions)


def test_the_protocol_page_has_these_very_tables():
    advice = (
        f"the state diagrams in {PROTOCOL} are not those of core/lifecycle.py: put the output of "
        f"`python -m kvcourier.core.lifecycle` between {BEGIN} and {END}"
    )
    page = PROTOCOL.read_text() if PROTOCOL.exists() else ""
    assert BEGIN in page and END in page, advice
    shown = page.split(BEGIN, 1)[1].split(END, 1)[0]
    assert diagrams().strip() == shown.strip(), advice


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
def test_the_command_prints_the_diagrams(capsys):
    runpy.run_module("kvcourier.core.lifecycle", run_name="__main__")
    assert capsys.readouterr().out == diagrams()
    assert diagrams().count("stateDiagram-v2") == 3
    for state, limit in EXITS_BY_TIME.items():
        assert f"| {state} | {limit} |" in diagrams()
