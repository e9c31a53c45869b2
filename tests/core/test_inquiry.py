"""What an instance tells an operator: all of it, or nothing, and nothing else changes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.golden_messages import OFFER, REQUEST
from core.wire_strategies import wire
from kvcourier.config import Limits
from kvcourier.core import handshake, inquiry
from kvcourier.core.handshake import HandshakeAccepted, HandshakeRefused
from kvcourier.core.inquiry import (
    About,
    StoryQuestion,
    StoryTold,
    Told,
    answer,
    ask_for_story,
    inquire,
    read_question,
    read_story,
    read_told,
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


def test_an_inquiry_is_told_everything() -> None:
    told = read_told(answer(inquire(), OFFER, ABOUT), MAX_BYTES)
    assert (told.offer, told.about) == (OFFER, ABOUT)


def test_a_handshake_is_answered_as_ever() -> None:
    asked = answer(REQUEST, OFFER, ABOUT)
    assert asked == handshake.answer(REQUEST, OFFER)
    reply = msgspec.msgpack.decode(asked, type=HandshakeAccepted | HandshakeRefused)
    assert isinstance(reply, HandshakeAccepted)


def test_another_version_is_refused_by_its_number() -> None:
    asked = msgspec.msgpack.encode(inquiry.Inquiry(PROTOCOL_VERSION + 1))
    with pytest.raises(HandshakeRejected, match=f"{PROTOCOL_VERSION + 1} there"):
        read_told(answer(asked, OFFER, ABOUT), MAX_BYTES)


@given(wire(Told) | st.binary())
def test_whatever_is_told_is_read_or_refused(payload: object) -> None:
    content = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
    try:
        read_told(content, MAX_BYTES)
    except (HandshakeRejected, RemoteProtocolError) as error:
        assert 0 < len(str(error)) < 1000


@given(wire(StoryTold) | st.binary())
def test_whatever_a_rank_tells_is_read_or_refused(payload: object) -> None:
    content = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
    try:
        read_story(content, MAX_BYTES)
    except RemoteProtocolError as error:
        assert 0 < len(str(error)) < 1000


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


def test_too_much_is_not_even_read() -> None:
    for read in (read_told, read_story):
        with pytest.raises(RemoteProtocolError, match="too long"):
            read(b"x" * 11, 10)


@given(st.binary())
def test_noise_is_dropped(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        answer(payload, OFFER, ABOUT)
