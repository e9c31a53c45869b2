"""What is believed of an answer, and what round trips tell of a clock."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.story.accounts import (
    MAX_ENTRIES,
    MAX_TEXT,
    Account,
    Asked,
    Clock,
    Entry,
    Part,
    Reading,
    Unanswered,
    compare_clocks,
    read_entries,
)
from kvcourier.story.show import show_asked, unknown
from kvcourier.story.timeline import make_timeline

SECONDS = st.floats(0, 1e4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {"at_unix_s": st.floats() | JSON, "what": st.text() | JSON}, optional={"rank": JSON}
)


@given(
    offset_s=st.floats(-1e6, 1e6),
    trips=st.lists(st.tuples(SECONDS, st.floats(0, 10), st.floats(0, 10)), min_size=1),
)
def test_the_true_offset_is_never_further_off_than_the_uncertainty(
    offset_s: float, trips: list[tuple[float, float, float]]
) -> None:
    """However unevenly the way there and the way back share a round trip."""
    readings = [
        Reading(asked, asked + there + back, asked + there + offset_s)
        for asked, there, back in trips
    ]
    clock = compare_clocks(readings)
    assert clock is not None
    assert abs(clock.offset_s - offset_s) <= clock.uncertainty_s + 1e-6
    shortest = min(there + back for _, there, back in trips)
    assert clock.uncertainty_s == pytest.approx(shortest / 2, abs=1e-6)


def test_without_readings_nothing_is_known() -> None:
    assert compare_clocks([]) is None


@given(st.lists(JSON | ENTRY))
def test_whatever_is_told_becomes_entries_that_can_be_shown(content: list[object]) -> None:
    for entry in read_entries(content):
        assert entry.what.isprintable() and len(entry.what) <= MAX_TEXT
        for value in entry.details.values():
            assert value is None or isinstance(value, bool | int | float | str)
            assert not isinstance(value, str) or (value.isprintable() and len(value) <= MAX_TEXT)
        json.dumps(dict(entry.details), allow_nan=False)


@given(st.lists(ENTRY, min_size=1))
def test_a_good_entry_is_not_lost_among_bad_ones(others: list[object]) -> None:
    good = {"at_unix_s": 5.5, "what": "posted", "bytes": 7}
    assert Entry(5.5, "posted", {"bytes": 7}) in read_entries([*others, good])


@pytest.mark.parametrize("content", [None, 7, "text", {"entries": []}])
def test_what_is_no_list_is_no_story(content: object) -> None:
    with pytest.raises(Unanswered, match="told no story"):
        read_entries(content)


def test_an_endless_story_is_cut() -> None:
    entry = {"at_unix_s": 1, "what": "x" * 10_000}
    entries = read_entries([entry] * (MAX_ENTRIES + 5))
    assert len(entries) == MAX_ENTRIES
    assert len(entries[0].what) == MAX_TEXT


def account(part: Part, clock: Clock | None, *moments: tuple[float, str]) -> Asked:
    entries = tuple(Entry(at, what, {}) for at, what in moments)
    return Asked(part, f"http://{part}", Account(part, f"http://{part}", entries, clock))


def test_clocks_that_differ_are_taken_into_account() -> None:
    router = account(Part.ROUTER, Clock(0.0, 0.001), (100.0, "dispatched"), (103.0, "finished"))
    prefill = account(Part.PREFILL, Clock(-50.0, 0.001), (51.0, "queued"))
    decode = account(Part.DECODE, Clock(7000.0, 0.001), (7102.0, "received"))
    timeline = make_timeline("t", [decode, router, prefill])
    assert [(each.at_s, each.what) for each in timeline.moments] == [
        (0.0, "dispatched"),
        (1.0, "queued"),
        (2.0, "received"),
        (3.0, "finished"),
    ]
    assert timeline.start_unix_s == 100.0


@given(st.lists(st.tuples(SECONDS, st.sampled_from("abc")), min_size=1), st.floats(-1e6, 1e6))
def test_what_one_process_told_keeps_its_order(
    moments: list[tuple[float, str]], offset_s: float
) -> None:
    moments.sort(key=lambda each: each[0])
    others = account(Part.DECODE, None, (3.0, "z"))
    timeline = make_timeline("t", [account(Part.PREFILL, Clock(offset_s, 0), *moments), others])
    told = [each.what for each in timeline.moments if each.part is Part.PREFILL]
    assert told == [what for _, what in moments]
    assert all(each.at_s >= 0 for each in timeline.moments)


def test_it_is_said_where_a_clock_is_taken_for_ours() -> None:
    timeline = make_timeline("t", [account(Part.DECODE, None, (3.0, "z"))])
    assert "taken for ours" in show_asked(timeline).plain


def test_nobody_knows_it_is_one_sentence_with_everybody_in_it() -> None:
    asked = [Asked(Part.ROUTER, "http://r", problem="did not answer within 5 s")]
    assert unknown(make_timeline("t", asked)) == (
        "nobody tells the story of 't': router http://r did not answer within 5 s"
    )
