"""What an instance tells an operator: all of it, or nothing, and nothing else changes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.golden_messages import OFFER, REQUEST
from core.wire_strategies import wire
from kvcourier.config import Limits
from kvcourier.core import handshake
from kvcourier.core.handshake import HandshakeAccepted, HandshakeRefused
from kvcourier.core.inquiry import (
    About,
    Answerers,
    HistoryQuestion,
    HistoryTold,
    Inquiry,
    Question,
    StoryQuestion,
    StoryTold,
    Told,
    answer,
    ask_for_history,
    ask_for_story,
    inquire,
    read_history,
    read_question,
    read_story,
    read_told,
    tell_history,
)
from kvcourier.core.messages import PROTOCOL_VERSION
from kvcourier.errors import HandshakeRejected, RemoteProtocolError

ABOUT = About(
    host_name="node-1",
    boot_id="1f",
    versions={"kvcourier": "0.1.0"},
    backends=["UCX"],
    environment={"UCX_TLS": "rc"},
    rdma_devices=["mlx5_0"],
    timing={"kv_lease_duration": 30.0},
    staging={"path": "auto"},
    allows_all_peers=True,
)
MAX_BYTES = Limits().max_message_bytes
STATES = {("t", 0): '{"do_remote_decode": true}', ("long", 0): "x" * (1 << 20) + "x"}
ANSWERERS: Answerers = {
    HistoryQuestion: lambda asked: tell_history(STATES.get((asked.transfer_id, asked.part)))
}


def test_an_inquiry_is_told_everything() -> None:
    told = read_told(answer(inquire(), OFFER, ABOUT), MAX_BYTES)
    assert (told.offer, told.about) == (OFFER, ABOUT)


def test_a_handshake_is_answered_as_ever() -> None:
    asked = answer(REQUEST, OFFER, ABOUT)
    assert asked == handshake.answer(REQUEST, OFFER)
    reply = msgspec.msgpack.decode(asked, type=HandshakeAccepted | HandshakeRefused)
    assert isinstance(reply, HandshakeAccepted)


def test_another_version_is_refused_by_its_number() -> None:
    for question in (Inquiry(PROTOCOL_VERSION + 1), HistoryQuestion(PROTOCOL_VERSION + 1, "t")):
        asked = msgspec.msgpack.encode(question)
        for read in (read_told, read_history):
            with pytest.raises(HandshakeRejected, match=f"{PROTOCOL_VERSION + 1} there"):
                read(answer(asked, OFFER, ABOUT, ANSWERERS), MAX_BYTES)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (ask_for_history("t"), STATES["t", 0]),
        (ask_for_history("t", 1), None),
        (ask_for_history("other"), None),
        (ask_for_history("long"), None),
    ],
    ids=["kept", "another part", "unknown", "too long to be told"],
)
def test_who_knows_a_transfer_id_is_told_what_is_kept_of_it(asked: bytes, told: str | None) -> None:
    for _ in range(2):
        assert read_history(answer(asked, OFFER, ABOUT, ANSWERERS), MAX_BYTES) == told


def test_a_question_that_an_instance_has_no_answer_to_is_refused_at_once() -> None:
    with pytest.raises(HandshakeRejected, match="HistoryQuestion: not answered"):
        read_history(answer(ask_for_history("t"), OFFER, ABOUT), MAX_BYTES)


def test_a_question_of_a_later_release_is_dropped() -> None:
    class Later(Question, frozen=True, tag="of_a_later_release"):
        pass

    with pytest.raises(RemoteProtocolError):
        answer(msgspec.msgpack.encode(Later(PROTOCOL_VERSION)), OFFER, ABOUT, ANSWERERS)


READERS = {Told: read_told, HistoryTold: read_history, StoryTold: read_story}


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
def test_whatever_is_told_is_read_or_refused(
    kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    payload = data.draw(wire(kind) | wire(HandshakeRefused) | st.binary())
    content = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
    try:
        READERS[kind](content, MAX_BYTES)
    except (HandshakeRejected, RemoteProtocolError) as error:
        # 64 reasons of 300 characters at most.
        assert 0 < len(str(error)) < 64 * 302


@given(wire(StoryQuestion) | st.binary())
def test_whatever_is_asked_is_a_question_or_not(payload: object) -> None:
    content = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
    key = read_question(content)
    assert key is None or 0 < len(key) <= 1024


def test_a_question_of_another_version_is_none() -> None:
    asked = StoryQuestion(PROTOCOL_VERSION + 1, "t")
    assert read_question(msgspec.msgpack.encode(asked)) is None
    assert read_question(ask_for_story("t")) == "t"


def test_an_older_instance_is_one_that_tells_no_stories() -> None:
    told = msgspec.msgpack.decode(answer(inquire(), OFFER, ABOUT))
    del told["about"]["tells_stories"]
    assert not read_told(msgspec.msgpack.encode(told), MAX_BYTES).about.tells_stories


@given(wire(HistoryQuestion) | st.binary())
def test_whatever_is_asked_is_answered_or_dropped(payload: object) -> None:
    content = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
    try:
        reply = answer(content, OFFER, ABOUT, ANSWERERS)
    except RemoteProtocolError:
        return
    assert msgspec.msgpack.decode(reply, type=HistoryTold | HandshakeRefused)


@pytest.mark.parametrize("read", READERS.values())
def test_too_much_is_not_even_read(read) -> None:
    with pytest.raises(RemoteProtocolError, match="too long"):
        read(b"x" * 11, 10)


@given(st.binary())
def test_noise_is_dropped(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        answer(payload, OFFER, ABOUT)
