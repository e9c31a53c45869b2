"""Conversations: what D said of the KV it keeps of one turn, until the next turn takes it along.

Decides how many states are kept and how long, that each is given out once and to its own
conversation only, and how they come out of answers without the client seeing them. Refuses to know
what is in a state: P checks that, and whether the next prompt really begins with that turn.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcourier.router.config import ConversationLimits
from kvcourier.router.legs import Params

_STATE_KEY = "kv_transfer_params"
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_MAX_EVENT_BYTES = 4 << 20
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Turn:
    """The state after a turn.

    Attributes:
        params: `kv_transfer_params` of D's answer.
        decode: name of the D that keeps the KV.
        until: when it is certainly gone there, on our clock.
    """

    params: Params
    decode: str
    until: float


class Conversations:
    """The latest turn of each conversation. Used on the event loop; `clock` never goes back."""

    def __init__(self, limits: ConversationLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._turns: OrderedDict[str, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def take(self, conversation: str) -> Turn | None:
        """The turn before this one, which nobody else gets; None if there is none, or no more."""
        turn = self._turns.pop(conversation, None)
        return turn if turn is not None and turn.until > self._clock() else None

    @property
    def are_kept(self) -> bool:
        """Whether any state is."""
        return self._limits.max_conversations > 0

    def put(self, conversation: str, params: object, decode: str) -> bool:
        """A turn has ended, and D told this of it; what is no state of a turn is ignored.

        Returns whether it is one.
        """
        if not conversation or not _is_state(params):
            return False
        assert isinstance(params, dict)
        if len(json.dumps(params)) > self._limits.max_state_bytes:
            return False
        now = self._clock()
        self._forget_before(now)
        ttl_s = min(self._limits.ttl_s, _seconds(params.get("remote_ttl_s")))
        self._turns[conversation] = Turn(params, decode, now + ttl_s)
        self._turns.move_to_end(conversation)
        while len(self._turns) > self._limits.max_conversations:
            self._turns.popitem(last=False)
        return True

    def _forget_before(self, now: float) -> None:
        """Those that are over, as far as they are the oldest."""
        while self._turns and next(iter(self._turns.values())).until <= now:
            self._turns.popitem(last=False)


def conversation_key(conversation: str, headers: Mapping[str, str]) -> str:
    """The name of a client's conversation; another client's of the same id has another one."""
    if not conversation:
        return ""
    caller = hashlib.blake2b(headers.get("authorization", "").encode(), digest_size=16)
    return f"{caller.hexdigest()}:{conversation}"


class StateFilter:
    """Takes the state out of one answer on its way to the client."""

    def __init__(self, keep: Callable[[object], None]) -> None:
        """`keep` is called with the state, if the answer has one."""
        self._keep = keep
        self._pending = b""
        self.has_found = False

    def whole(self, content: bytes) -> bytes:
        """A complete answer without the state."""
        return self._without_state(content) or content

    def chunk(self, chunk: bytes) -> bytes:
        """What of a stream can go on now; an event that is not complete is kept back."""
        *events, self._pending = _split(self._pending + chunk)
        passed = b"".join(map(self._event, events))
        if len(self._pending) > _MAX_EVENT_BYTES or self._pending.strip() == _DONE:
            passed, self._pending = passed + self._pending, b""
        return passed

    def _event(self, event: bytes) -> bytes:
        if _STATE_KEY.encode() not in event:
            return event
        content = self._without_state(event.strip().removeprefix(b"data:"))
        return event if content is None else b"data: " + content + b"\n\n"

    def _without_state(self, content: bytes) -> bytes | None:
        """None if there is none in it."""
        if _STATE_KEY.encode() not in content:
            return None
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            return None
        if not isinstance(answer, dict) or not _is_state(answer.get(_STATE_KEY)):
            return None
        self.has_found = True
        self._keep(answer.pop(_STATE_KEY))
        return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()


def read_state(text: str) -> object:
    """What a state's JSON says; None if it cannot be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _split(stream: bytes) -> list[bytes]:
    """Complete events, each with its end, and what comes after the last."""
    pieces, start = [], 0
    for end in _EVENT_END.finditer(stream):
        pieces.append(stream[start : end.end()])
        start = end.end()
    return [*pieces, stream[start:]]


def _is_state(params: object) -> bool:
    return (
        isinstance(params, dict)
        and params.get("do_remote_decode") is True
        and bool(params.get("remote_block_ids"))
    )


def _seconds(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value >= 0 else float("inf")
