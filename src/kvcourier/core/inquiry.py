"""What an instance tells to somebody who wants no KV: an operator, by `kvcourier doctor`, or a
router that has not been told where the KV of a turn is kept.

Decides what can be asked beside handshakes and how it is answered: an instance about itself and
about a turn that it keeps, and each of its ranks for the story of a transfer (`kvcourier story`).
Refuses to know sockets, and where the values come from (`runtime/about.py`, `runtime/questions.py`,
`vllm_connector/turns.py`). Instances do not ask each other this.

A new question is a `Question` and a struct for its answer. An instance answers those that it has a
function for.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from kvcourier.core import handshake
from kvcourier.core.handshake import Offer
from kvcourier.core.messages import PROTOCOL_VERSION, Text
from kvcourier.errors import HandshakeRejected, RemoteProtocolError, clip

LongText = Annotated[str, msgspec.Meta(max_length=4096)]
_MAX_ENTRIES = 256
_Texts = Annotated[list[LongText], msgspec.Meta(max_length=_MAX_ENTRIES)]
_Table = Annotated[dict[Text, LongText], msgspec.Meta(max_length=_MAX_ENTRIES)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_MAX_DETAIL = 512
Detail = bool | int | float | Annotated[str, msgspec.Meta(max_length=_MAX_DETAIL)] | None
Entry = Annotated[dict[Text, Detail], msgspec.Meta(max_length=64)]
_MAX_STORY = 1024
_QUESTION = "story_question"
_MAX_STATE = 1 << 20
_StateJson = Annotated[str, msgspec.Meta(max_length=_MAX_STATE)]
_Numbers = Annotated[dict[Text, float], msgspec.Meta(max_length=_MAX_ENTRIES)]


class About(msgspec.Struct, frozen=True):
    """Settings and surroundings of one life of an instance, of no use for moving KV.

    Attributes:
        host_name: what its machine calls itself.
        boot_id: one life of one machine; equal for two processes on the same one. May be empty.
        versions: of programs and libraries, by name.
        backends: NIXL backends, in order of preference.
        environment: variables that UCX, NIXL and libfabric read.
        rdma_devices: names of the InfiniBand and RoCE devices that the process sees.
        timing: `config.Timing`, field by field.
        staging: `path`, and bytes of the packed path, as texts.
        allows_all_peers: whether there is no allow-list.
        tells_stories: whether its ranks answer a `StoryQuestion`. A release that does not know the
            question would count it as malformed, so nobody asks where this is not said.
    """

    host_name: LongText
    boot_id: LongText
    versions: _Table
    backends: _Texts
    environment: _Table
    rdma_devices: _Texts
    timing: _Numbers
    staging: _Table
    allows_all_peers: bool
    tells_stories: bool = False


class Question(msgspec.Struct, frozen=True):
    """Base of all that whoever listens can be asked."""

    protocol_version: int


class Inquiry(Question, frozen=True, tag="inquiry"):
    """Asks for its offer and its settings."""


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer."""

    protocol_version: int
    offer: Offer
    about: About


class StoryQuestion(Question, frozen=True, tag=_QUESTION):
    """Asks a rank for the story of a transfer, by request id or transfer id."""

    key: Key


class StoryTold(msgspec.Struct, frozen=True, tag="story_told"):
    """The answer. An entry has `at_unix_s` and `what`, and details; none if it knows none.

    Attributes:
        clock_unix_s: what the clock of the entries said when it answered.
    """

    protocol_version: int
    clock_unix_s: float
    entries: Annotated[list[Entry], msgspec.Meta(max_length=_MAX_STORY)]


class HistoryQuestion(Question, frozen=True, tag="history_question"):
    """Asks what is kept of the turn that was one part of this dispatch."""

    transfer_id: Text
    part: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


class HistoryTold(msgspec.Struct, frozen=True, tag="history_told"):
    """The answer: the `kv_transfer_params` that an answer tells of it, as JSON; None: nothing."""

    protocol_version: int
    state: _StateJson | None


Answerers = Mapping[type[Question], Callable[[Any], msgspec.Struct]]
"""What an instance says to questions beside an `Inquiry`, which everyone answers."""

T = TypeVar("T")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_question_decoder: msgspec.msgpack.Decoder[Inquiry | HistoryQuestion] = msgspec.msgpack.Decoder(
    Inquiry | HistoryQuestion
)
_story_question_decoder = msgspec.msgpack.Decoder(StoryQuestion)
_story_decoder: msgspec.msgpack.Decoder[StoryTold | handshake.HandshakeRefused] = (
    msgspec.msgpack.Decoder(StoryTold)
)
_TAG_WITHIN = 32
_history_decoder: msgspec.msgpack.Decoder[HistoryTold | handshake.HandshakeRefused] = (
    msgspec.msgpack.Decoder(HistoryTold | handshake.HandshakeRefused)
)
_told_decoder: msgspec.msgpack.Decoder[Told | handshake.HandshakeRefused] = msgspec.msgpack.Decoder(
    Told | handshake.HandshakeRefused
)


def inquire() -> bytes:
    """The bytes that ask an instance about itself."""
    return _encoder.encode(Inquiry(PROTOCOL_VERSION))


def ask_for_history(transfer_id: str, part: int = 0) -> bytes:
    """The bytes that ask an instance what it keeps of a turn."""
    return _encoder.encode(HistoryQuestion(PROTOCOL_VERSION, transfer_id, part))


def answer(payload: bytes, offer: Offer, about: About, answerers: Answerers | None = None) -> bytes:
    """The bytes that answer a question or a handshake request.

    Raises:
        RemoteProtocolError: it is neither; drop it.
    """
    try:
        question = _question_decoder.decode(payload)
    except _UNREADABLE:
        return handshake.answer(payload, offer)
    if question.protocol_version != PROTOCOL_VERSION:
        # Another version's question is refused in the same words as its handshake.
        return handshake.answer(payload, offer)
    if isinstance(question, Inquiry):
        return _encoder.encode(Told(PROTOCOL_VERSION, offer, about))
    answerer = (answerers or {}).get(type(question))
    if answerer is None:
        return handshake.refuse([f"{type(question).__name__}: not answered by this instance"])
    return _encoder.encode(answerer(question))


def tell_history(state: str | None) -> HistoryTold:
    """The answer to a `HistoryQuestion`; a state that is too long is none."""
    is_told = state is not None and len(state) <= _MAX_STATE
    return HistoryTold(PROTOCOL_VERSION, state if is_told else None)


def read_told(payload: bytes, max_bytes: int) -> Told:
    """Check the answer to an inquiry.

    Raises:
        HandshakeRejected: refused, which another protocol version is.
        RemoteProtocolError: the bytes are malformed.
    """
    return _read(_told_decoder, payload, max_bytes)


def read_history(payload: bytes, max_bytes: int) -> str | None:
    """Check the answer to a question for a history, and return its state; raises likewise."""
    return _read(_history_decoder, payload, max_bytes).state


def _read(
    decoder: "msgspec.msgpack.Decoder[T | handshake.HandshakeRefused]",
    payload: bytes,
    max_bytes: int,
) -> T:
    if len(payload) > max_bytes:
        raise RemoteProtocolError(f"answer of {len(payload)} bytes is too long")
    try:
        told = decoder.decode(payload)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"malformed answer: {clip(str(error))}") from None
    if isinstance(told, handshake.HandshakeRefused):
        said = [clip(reason) for reason in told.reasons[:64] if reason]
        raise HandshakeRejected(said or ["refused without a reason"])
    return told


def ask_for_story(key: str) -> bytes:
    """The bytes that ask a rank for the story of a transfer."""
    return _encoder.encode(StoryQuestion(PROTOCOL_VERSION, key))


def read_question(payload: bytes) -> str | None:
    """Whose story is asked for; None for any other message, which is found out quickly."""
    if payload.find(_QUESTION.encode(), 0, _TAG_WITHIN) < 0:
        return None
    try:
        question = _story_question_decoder.decode(payload)
    except _UNREADABLE:
        return None
    return question.key if question.protocol_version == PROTOCOL_VERSION else None


def detail_of(value: object) -> Detail:
    """A detail of an entry as it is told: a plain value, within bounds."""
    if isinstance(value, bool | float | None):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else hex(value)[:_MAX_DETAIL]
    return str(value)[:_MAX_DETAIL]


def tell_story(clock_unix_s: float, entries: list[dict[str, Detail]]) -> bytes:
    """The bytes of an answer; the latest entries, if there are too many."""
    return _encoder.encode(StoryTold(PROTOCOL_VERSION, clock_unix_s, entries[-_MAX_STORY:]))


def read_story(payload: bytes, max_bytes: int) -> StoryTold:
    """Check an answer.

    Raises:
        RemoteProtocolError: the bytes are malformed, or too many.
    """
    return _read(_story_decoder, payload, max_bytes)
