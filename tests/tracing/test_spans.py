"""Which entries of a story bound which span."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcourier.tracing.interface import Span
from kvcourier.tracing.spans import RULES, Side, instance_spans, is_over

WORDS = sorted({word for rule in RULES for word in (rule.opens, *rule.closes)})


def entry(at: float, what: str, **details: Any) -> dict[str, Any]:
    return {"at_unix_s": at, "what": what, "thread": "t", **details}


PREFILL = [
    entry(1.0, "queued", prompt_tokens=9),
    entry(1.1, "hold_begun", rank="r"),
    entry(1.5, "registered", rank="r", by="d"),
    entry(2.0, "scheduled"),
    entry(3.0, "posted", rank="r", id=1, operation="WRITE", post_s=0.25, bytes=7),
    entry(3.5, "posted", rank="r", id=2, operation="WRITE", post_s=0.0, bytes=8),
    entry(4.0, "prefill_finished", rank="r"),
    entry(4.5, "completed", rank="r", id=2),
    entry(4.6, "answered", reason="length", tokens=1),
    entry(5.0, "completed", rank="r", id=1),
    entry(6.0, "released", rank="r"),
]
DECODE = [
    entry(1.0, "queued"),
    entry(1.2, "want_begun", rank="r"),
    entry(2.0, "registered", rank="r"),
    entry(3.0, "received", rank="r", continuation="secret"),
    entry(3.0, "released", rank="r"),
    entry(3.1, "first_token"),
    entry(3.2, "scheduled"),
    entry(5.0, "answered", reason="length", tokens=8),
]


def bounds(spans: list[Span]) -> list[tuple[str, float, float]]:
    return sorted((each.name, each.start_unix_s, each.end_unix_s) for each in spans)


def test_a_story_that_couriers_alone_tell_ends_with_its_transfer() -> None:
    failed = [
        entry(1.0, "want_begun", rank="r"),
        entry(2.0, "registered", rank="r"),
        entry(3.0, "receive_failed", rank="r", reason="p is gone"),
        entry(4.0, "released", rank="r"),
    ]
    root, children = instance_spans(failed, Side.DECODE, {})
    assert (root.start_unix_s, root.end_unix_s, root.failure) == (1.0, 4.0, "p is gone")
    assert bounds(children) == [("register", 1.0, 2.0), ("wait for KV", 2.0, 3.0)]
    received = [*failed[:2], entry(3.0, "received", rank="r"), failed[3]]
    assert instance_spans(received, Side.DECODE, {})[0].failure == ""


def test_a_prefill_is_queue_prefill_hold_and_each_write_from_its_posting_to_its_end() -> None:
    root, children = instance_spans(PREFILL, Side.PREFILL, {"a": 1})
    assert (root.name, root.start_unix_s, root.end_unix_s) == ("prefill request", 1.0, 4.6)
    assert bounds(children) == [
        ("hold", 4.0, 6.0),
        ("prefill", 2.0, 4.0),
        ("queue", 1.0, 2.0),
        ("write", 2.75, 5.0),
        ("write", 3.5, 4.5),
    ]
    assert root.attributes == {"a": 1}
    assert {each.attributes.get("kvcourier.bytes") for each in children} == {None, 7, 8}


def test_a_decode_is_registered_waiting_and_decoding() -> None:
    root, children = instance_spans(DECODE, Side.DECODE, {})
    assert (root.name, root.end_unix_s) == ("decode request", 5.0)
    assert bounds(children) == [
        ("decode", 3.1, 5.0),
        ("queue", 1.0, 3.2),
        ("register", 1.2, 2.0),
        ("wait for KV", 2.0, 3.0),
    ]
    assert "first_token" in [each.name for each in root.events]


def test_a_first_token_is_content_and_stays_out() -> None:
    assert "secret" not in repr(instance_spans(DECODE, Side.DECODE, {}))


def test_what_failed_says_why() -> None:
    story = [
        entry(1.0, "queued"),
        entry(1.1, "want_begun", rank="r"),
        entry(1.5, "registered", rank="r"),
        entry(2.0, "receive_failed", rank="r", reason="the lease was over"),
        entry(2.1, "failed", reason="no KV"),
    ]
    root, children = instance_spans(story, Side.DECODE, {})
    assert root.failure == "no KV"
    (waiting,) = [each for each in children if each.name == "wait for KV"]
    assert waiting.failure == "the lease was over"


def test_a_request_without_a_transfer_is_a_request() -> None:
    story = [entry(1, "queued"), entry(2, "scheduled"), entry(3, "answered", reason="stop")]
    root, children = instance_spans(story, Side.NONE, {})
    assert root.name == "request"
    assert bounds(children) == [("queue", 1, 2)]


def test_a_span_whose_end_is_lost_says_so() -> None:
    _, children = instance_spans(PREFILL[:7], Side.PREFILL, {})
    is_open = {each.name for each in children if each.attributes.get("kvcourier.open")}
    assert is_open == {"hold", "write"}


def test_it_is_over_when_every_rank_has_let_go_and_the_answer_has_ended() -> None:
    assert is_over(PREFILL, Side.PREFILL) and is_over(DECODE, Side.DECODE)
    assert not is_over(PREFILL[:-1], Side.PREFILL)
    unanswered = [each for each in PREFILL if each["what"] != "answered"]
    assert not is_over(unanswered, Side.PREFILL)
    other = entry(1.1, "hold_begun", rank="other")
    assert not is_over([*PREFILL, other], Side.PREFILL)
    assert is_over([*PREFILL, other, entry(7, "dropped", rank="other")], Side.PREFILL)
    assert not is_over([], Side.NONE)


def test_what_is_kept_for_the_next_turn_is_not_waited_for() -> None:
    kept = entry(4.0, "hold_begun", rank="r")
    assert is_over([*DECODE, kept], Side.DECODE)


def test_a_prompt_whose_beginning_came_from_elsewhere_is_over_with_its_own_hold() -> None:
    fetched = [entry(1.2, "want_begun", rank="r"), entry(1.5, "released", rank="r")]
    assert not is_over([*PREFILL[:-1], *fetched], Side.PREFILL)
    assert is_over([*PREFILL, *fetched], Side.PREFILL)


@given(
    st.lists(
        st.builds(
            entry,
            st.floats(0, 1e6),
            st.sampled_from(WORDS),
            rank=st.sampled_from(["r0", "r1"]),
            id=st.integers(0, 3),
            operation=st.sampled_from(["READ", "WRITE"]),
            post_s=st.floats(0, 10),
        ),
        min_size=1,
    ),
    st.sampled_from(Side),
)
def test_whatever_the_story_spans_do_not_end_before_they_begin(
    story: list[Any], side: Side
) -> None:
    story.sort(key=lambda each: each["at_unix_s"])
    root, children = instance_spans(story, side, {})
    for each in (root, *children):
        assert each.start_unix_s <= each.end_unix_s <= story[-1]["at_unix_s"]
    assert len(root.events) == len(story)
    assert len(children) <= len(RULES) * len(story)
