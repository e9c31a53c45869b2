"""What a courier answers to whoever asks for a story, and how many may wait."""

from typing import Any

import pytest

from kvcourier.config import Limits
from kvcourier.core import inquiry
from kvcourier.runtime.questions import MAX_WAITING, Questions

MAX_BYTES = Limits().max_message_bytes
STORY: list[dict[str, Any]] = [
    {"at_unix_s": 1.0, "what": "received", "rank": "r", "blocks": [1, 2], "continuation": "secret"},
    {"at_unix_s": 2.0, "what": "failed", "reason": "x" * 10_000, "big": 1 << 70, "none": None},
]


class Desk:
    """Questions, and what was replied to whom."""

    def __init__(self, is_answered: bool = True) -> None:
        self.replies: list[tuple[bytes, bytes]] = []
        self.questions = Questions(
            is_answered,
            lambda key: STORY if key == "t" else [],
            lambda: 99.5,
            lambda identity, payload: self.replies.append((identity, payload)),
        )

    def told(self, number: int) -> inquiry.StoryTold:
        return inquiry.read_story(self.replies[number][1], MAX_BYTES)


def test_a_story_is_told_in_plain_values_and_without_a_first_token() -> None:
    desk = Desk()
    assert desk.questions.take(b"asker", inquiry.ask_for_story("t"))
    assert desk.replies == [] and len(desk.questions) == 1, "not before there is time"
    desk.questions.answer_one()
    desk.questions.answer_one()
    ((identity, payload),) = desk.replies
    assert identity == b"asker" and b"secret" not in payload
    told = desk.told(0)
    assert told.clock_unix_s == 99.5
    first = {"at_unix_s": 1.0, "what": "received", "rank": "r", "blocks": "[1, 2]"}
    assert told.entries[0] == first
    assert told.entries[1]["reason"] == "x" * 512
    assert told.entries[1]["big"] == hex(1 << 70)


def test_one_that_is_unknown_has_no_entries() -> None:
    desk = Desk()
    desk.questions.take(b"asker", inquiry.ask_for_story("another"))
    desk.questions.answer_one()
    assert desk.told(0).entries == []


def test_only_so_many_wait() -> None:
    desk = Desk()
    for number in range(MAX_WAITING + 10):
        assert desk.questions.take(b"%d" % number, inquiry.ask_for_story("t"))
    while desk.questions:
        desk.questions.answer_one()
    assert [identity for identity, _ in desk.replies] == [b"%d" % n for n in range(MAX_WAITING)]


@pytest.mark.parametrize(
    "payload", [b"", b"story_question", inquiry.inquire(), inquiry.ask_for_story("")]
)
def test_anything_else_is_no_question(payload: bytes) -> None:
    assert not Desk().questions.take(b"asker", payload)


def test_nobody_is_answered_where_it_is_off() -> None:
    desk = Desk(is_answered=False)
    assert not desk.questions.take(b"asker", inquiry.ask_for_story("t"))
    assert not desk.questions
