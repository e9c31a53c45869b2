"""Stories become spans, phases and a trace."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.bench.samples import Answered, Sample
from kvcourier.bench.timeline import PHASES, Lane, Timeline, make_timeline, trace_events

SENT = 1_000.0


def entry(what: str, after_s: float, **details: Any) -> dict[str, Any]:
    return {"what": what, "at_unix_s": SENT + after_s, "rank": "pp0tp0", **details}


PUSH_P = [
    entry("hold_begun", 0.01),
    entry("registered", 0.02),
    entry("prefill_finished", 0.30),
    entry("posted", 0.34, operation="WRITE", post_s=0.03, pieces=8),
    entry("written", 0.36),
    entry("sent", 0.36),
]
PUSH_D = [
    entry("want_begun", 0.012),
    entry("registered", 0.02),
    entry("landed", 0.37),
    entry("received", 0.37),
]
PULL_D = [
    entry("want_begun", 0.32),
    entry("posted", 0.35, operation="READ", post_s=0.02),
    entry("read", 0.36),
    entry("received", 0.37),
]
TOKENS = (0.40, 0.42, 0.44)


def made(prefill: list[dict[str, Any]], decode: list[dict[str, Any]]) -> Timeline:
    timeline = make_timeline(SENT, TOKENS, prefill, decode)
    assert timeline is not None
    return timeline


def spans(timeline: Timeline) -> dict[tuple[Lane, str], tuple[float, float]]:
    return {
        (span.lane, span.name): (round(span.start_s, 6), round(span.end_s, 6))
        for span in timeline.spans
    }


def test_a_push_has_its_spans() -> None:
    assert spans(made(PUSH_P, PUSH_D)) == {
        (Lane.CLIENT, "first token"): (0.0, 0.4),
        (Lane.CLIENT, "more tokens"): (0.4, 0.44),
        (Lane.PREFILL, "prefill"): (0.01, 0.3),
        (Lane.PREFILL, "posting"): (0.31, 0.34),
        (Lane.PREFILL, "write in flight"): (0.34, 0.36),
        (Lane.DECODE, "set up and register"): (0.012, 0.02),
        (Lane.DECODE, "wait for KV"): (0.02, 0.37),
    }


def test_a_pull_has_its_spans() -> None:
    found = spans(made(PUSH_P[:3], PULL_D))
    assert found[Lane.DECODE, "set up"] == (0.32, 0.35)
    assert found[Lane.DECODE, "posting"] == (0.33, 0.35)
    assert found[Lane.DECODE, "read in flight"] == (0.35, 0.36)


def test_several_writes_are_several_spans() -> None:
    prefill = [
        *PUSH_P[:2],
        entry("posted", 0.1),
        entry("written", 0.15),
        entry("posted", 0.2),
        entry("prefill_finished", 0.3),
        entry("written", 0.31),
    ]
    flights = [span for span in made(prefill, PUSH_D).spans if span.name == "write in flight"]
    found = [(round(span.start_s, 6), round(span.end_s, 6)) for span in flights]
    assert found == [(0.1, 0.15), (0.2, 0.31)]


def test_entries_that_no_rule_knows_stay_visible() -> None:
    marks = made([*PUSH_P, entry("parcel_packed", 0.2, slot=3)], PUSH_D).marks
    (mark,) = (each for each in marks if each.name == "parcel_packed")
    assert (mark.lane, round(mark.at_s, 6), mark.details["slot"]) == (Lane.PREFILL, 0.2, 3)
    assert [each.at_s for each in marks] == sorted(each.at_s for each in marks)


def test_phases_of_a_pull_and_of_a_push() -> None:
    def phases(timeline: Timeline) -> dict[str, float]:
        return {phase.name: round(phase.duration_s, 6) for phase in timeline.phases}

    assert phases(made(PUSH_P[:3], PULL_D)) == {
        "to P": 0.01,
        "prefill": 0.29,
        "P's answer, router, to D": 0.02,
        "KV to D": 0.05,
        "D's step, first token": 0.03,
    }
    # D's set-up lies within prefill: it takes no part of its own.
    assert phases(made(PUSH_P, PUSH_D)) == {
        "to P": 0.01,
        "prefill": 0.29,
        "KV to D": 0.07,
        "D's step, first token": 0.03,
    }


STORIES = st.lists(
    st.tuples(
        st.sampled_from(["hold_begun", "prefill_finished", "want_begun", "received", "posted"]),
        st.floats(min_value=-1, max_value=2),
    ),
    max_size=8,
)


@given(STORIES, STORIES)
def test_phases_add_up_to_the_first_token_whatever_is_told(
    prefill: list[tuple[str, float]], decode: list[tuple[str, float]]
) -> None:
    timeline = make_timeline(
        SENT, TOKENS, [entry(*each) for each in prefill], [entry(*each) for each in decode]
    )
    if timeline is None:
        return
    assert sum(phase.duration_s for phase in timeline.phases) == pytest.approx(TOKENS[0])
    assert all(phase.duration_s >= 0 for phase in timeline.phases)
    assert [phase.name for phase in timeline.phases] == [
        name for name in PHASES if name in {phase.name for phase in timeline.phases}
    ]
    assert all(span.start_s <= span.end_s for span in timeline.spans)


@pytest.mark.parametrize("finished_s", [-0.5, 0.5])
def test_a_story_by_another_clock_is_not_used(finished_s: float) -> None:
    assert make_timeline(SENT, TOKENS, [entry("prefill_finished", finished_s)], []) is None


@pytest.mark.parametrize(
    "story", [[], [{"what": "posted"}], [{"at_unix_s": 1.0}], [{"what": 1, "at_unix_s": "x"}]]
)
def test_what_is_no_story_is_passed_over(story: list[dict[str, Any]]) -> None:
    assert make_timeline(SENT, TOKENS, story, story) is None


def test_samples_read_their_times_off_tokens_and_timeline() -> None:
    sample = Sample(Answered(SENT, 0.0, TOKENS), made(PUSH_P, PUSH_D))
    assert sample.ttft_ms == pytest.approx(400)
    assert sample.after_prefill_ms == pytest.approx(100)
    assert sample.tpot_ms == pytest.approx(20)
    assert sample.token2_ms == pytest.approx(20)
    bare = Sample(Answered(SENT, 0.0, (0.4,)))
    assert (bare.after_prefill_ms, bare.tpot_ms, bare.token2_ms) == (None, None, None)


def test_a_trace_is_what_chrome_reads() -> None:
    timeline = made(PUSH_P, PUSH_D)
    trace = json.loads(
        json.dumps(trace_events([("one", SENT, timeline), ("two", SENT + 1, timeline)]))
    )
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ts"] >= 0 and isinstance(event["tid"], int)
        assert event["ph"] == "i" or event["dur"] >= 0
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"one", "two"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= threads
    starts = [e["ts"] for e in events if e["name"] == "first token"]
    assert starts == [0.0, pytest.approx(1e6)]
