"""Operators' questions for stories, which a courier answers between two looks.

Decides what is a question, how many wait, and what is told: never a first token, which is content.
Refuses to know sockets, and when there is time to answer.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvcourier.core import inquiry

MAX_WAITING = 64
"""Who asks when so many wait already gets no answer, and may ask again."""

_NOT_TOLD = frozenset({"continuation"})


class Questions:
    """Those of one courier that wait for an answer.

    Args:
        is_answered: whether anybody is; without, a question is no different from any other
            message that nobody knows.
        story: of a transfer, in the form of `Courier.story`.
        now_unix_s: what its clock says.
        reply: sends bytes back to a socket.
    """

    def __init__(
        self,
        is_answered: bool,
        story: Callable[[str], list[dict[str, Any]]],
        now_unix_s: Callable[[], float],
        reply: Callable[[bytes, bytes], None],
    ) -> None:
        self._is_answered = is_answered
        self._story = story
        self._now_unix_s = now_unix_s
        self._reply = reply
        self._waiting: deque[tuple[bytes, str]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, identity: bytes, payload: bytes) -> bool:
        """Whether a message of this socket is a question; it is answered later."""
        key = inquiry.read_question(payload) if self._is_answered else None
        if key is not None and len(self._waiting) < MAX_WAITING:
            self._waiting.append((identity, key))
        return key is not None

    def answer_one(self) -> None:
        """Answer who has waited longest, if anybody has."""
        if self._waiting:
            identity, key = self._waiting.popleft()
            entries = list(_tellable(self._story(key)))
            self._reply(identity, inquiry.tell_story(self._now_unix_s(), entries))


def _tellable(story: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, inquiry.Detail]]:
    for entry in story:
        yield {
            name: inquiry.detail_of(value) for name, value in entry.items() if name not in _NOT_TOLD
        }
