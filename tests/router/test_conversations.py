"""What the router remembers of conversations, and how it comes out of answers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.errors import ConfigError
from kvcourier.router.config import ConversationLimits
from kvcourier.router.conversations import Conversations, StateFilter, conversation_key

STATE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": [[1, 2]]}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def table(**limits: Any) -> tuple[Conversations, Clock]:
    clock = Clock()
    return Conversations(ConversationLimits(**limits), clock), clock


def test_a_state_is_given_out_once_and_to_its_own_conversation() -> None:
    turns, _ = table()
    turns.put("a", STATE, "d0")
    turns.put("b", STATE | {"remote_request_id": "b"}, "d1")
    taken = turns.take("a")
    assert taken is not None and (taken.params, taken.decode) == (STATE, "d0")
    assert turns.take("a") is None and turns.take("c") is None
    assert len(turns) == 1


def test_the_latest_turn_counts() -> None:
    turns, _ = table()
    turns.put("a", STATE, "d0")
    turns.put("a", STATE | {"remote_num_tokens": 7}, "d1")
    taken = turns.take("a")
    assert taken is not None and taken.params["remote_num_tokens"] == 7 and taken.decode == "d1"


@pytest.mark.parametrize(("told", "after"), [(None, 10.0), (4, 4.0), (60.0, 10.0), ("4", 10.0)])
def test_it_is_kept_for_the_shorter_of_both_times(told: object, after: float) -> None:
    for late, is_there in ((-0.1, True), (0.1, False)):
        turns, clock = table(ttl_s=10.0)
        turns.put("a", STATE | {"remote_ttl_s": told}, "d0")
        clock.now += after + late
        assert (turns.take("a") is not None) is is_there


def test_the_oldest_are_forgotten() -> None:
    turns, clock = table(max_conversations=2, ttl_s=10.0)
    for name in "abc":
        turns.put(name, STATE, "d0")
    assert turns.take("a") is None and len(turns) == 2
    clock.now += 11
    turns.put("d", STATE, "d0")
    assert len(turns) == 1


def test_none_is_remembered_where_none_is_wanted() -> None:
    turns, _ = table(max_conversations=0)
    turns.put("a", STATE, "d0")
    assert turns.take("a") is None


@pytest.mark.parametrize(
    "params",
    [None, {}, [], "x", {"do_remote_decode": True}, {**STATE, "do_remote_decode": False}],
)
def test_what_is_no_state_is_not_kept(params: object) -> None:
    turns, _ = table()
    turns.put("a", params, "d0")
    turns.put("", STATE, "d0")
    assert len(turns) == 0


def test_a_state_that_is_too_large_is_not_kept() -> None:
    turns, _ = table(max_state_bytes=1000)
    turns.put("a", STATE | {"remote_digests": "x" * 1000}, "d0")
    assert len(turns) == 0


def test_callers_do_not_share_conversations() -> None:
    names = {
        conversation_key("a", headers)
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Bearer y"})
    }
    assert len(names) == 3
    assert conversation_key("", {"authorization": "Bearer x"}) == ""


def test_limits_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match="max_conversations"):
        ConversationLimits(max_conversations=-1)
    with pytest.raises(ConfigError, match="conversation_ttl"):
        ConversationLimits(ttl_s=0)


def events(*bodies: object, end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(body).encode() + end for body in bodies)


TEXT = {"choices": [{"text": 'a "kv_transfer_params" in the text, 京'}]}


@given(st.lists(st.integers(1, 40)), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_a_stream_loses_the_state_and_nothing_else(sizes: list[int], end: bytes) -> None:
    kept: list[object] = []
    last = {"choices": [], "kv_transfer_params": STATE}
    stream = events(TEXT, TEXT, last, end=end) + b"data: [DONE]" + end
    passed, state = b"", StateFilter(kept.append)
    for size in [*sizes, len(stream)]:
        chunk, stream = stream[:size], stream[size:]
        passed += state.chunk(chunk)
    assert kept == [STATE]
    assert passed.startswith(events(TEXT, TEXT, end=end))
    rest = passed.removeprefix(events(TEXT, TEXT, end=end))
    assert rest.rstrip() == b'data: {"choices":[]}\n\ndata: [DONE]'


def test_a_stream_without_a_last_blank_line_is_whole() -> None:
    state = StateFilter(lambda _: None)
    assert state.chunk(events(TEXT) + b"data: [DONE]") == events(TEXT) + b"data: [DONE]"


def test_an_event_without_an_end_is_not_kept_back_for_ever() -> None:
    state = StateFilter(lambda _: None)
    assert state.chunk(b"data: " + b"x" * 1000) == b""
    assert len(state.chunk(b"x" * (4 << 20))) == 1006 + (4 << 20)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        json.dumps(TEXT).encode(),
        b'{"kv_transfer_params": {"do_remote_prefill": true}}',
    ],
)
def test_an_answer_without_a_state_goes_on_as_it_is(content: bytes) -> None:
    kept: list[object] = []
    assert StateFilter(kept.append).whole(content) == content
    assert kept == []


def test_a_whole_answer_loses_the_state() -> None:
    kept: list[object] = []
    content = json.dumps(TEXT | {"kv_transfer_params": STATE}).encode()
    assert json.loads(StateFilter(kept.append).whole(content)) == TEXT
    assert kept == [STATE]
