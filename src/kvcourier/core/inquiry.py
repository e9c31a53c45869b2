"""What an instance tells of itself to somebody who wants no KV: an operator, by `kvcourier doctor`.

Decides what can be asked beside handshakes and how it is answered: an instance about itself, and
each of its ranks for the story of a transfer (`kvcourier story`). Refuses to know sockets, and
where the values come from (`runtime/about.py`, `runtime/questions.py`). Instances do not ask each
other this.
"""

from typing import Annotated

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


class Inquiry(msgspec.Struct, frozen=True, tag="inquiry"):
    """Asks whoever listens for its offer and its settings."""

    protocol_version: int


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer."""

    protocol_version: int
    offer: Offer
    about: About


class StoryQuestion(msgspec.Struct, frozen=True, tag=_QUESTION):
    """Asks a rank for the story of a transfer, by request id or transfer id."""

    protocol_version: int
    key: Key


class StoryTold(msgspec.Struct, frozen=True, tag="story_told"):
    """The answer. An entry has `at_unix_s` and `what`, and details; none if it knows none.

    Attributes:
        clock_unix_s: what the clock of the entries said when it answered.
    """

    protocol_version: int
    clock_unix_s: float
    entries: Annotated[list[Entry], msgspec.Meta(max_length=_MAX_STORY)]


_encoder = msgspec.msgpack.Encoder()
_inquiry_decoder = msgspec.msgpack.Decoder(Inquiry)
_question_decoder = msgspec.msgpack.Decoder(StoryQuestion)
_story_decoder = msgspec.msgpack.Decoder(StoryTold)
_TAG_WITHIN = 32
_told_decoder: msgspec.msgpack.Decoder[Told | handshake.HandshakeRefused] = msgspec.msgpack.Decoder(
    Told | handshake.HandshakeRefused
)


def inquire() -> bytes:
    """The bytes that ask an instance about itself."""
    return _encoder.encode(Inquiry(PROTOCOL_VERSION))


def answer(payload: bytes, offer: Offer, about: About) -> bytes:
    """The bytes that answer an inquiry or a handshake request.

    Raises:
        RemoteProtocolError: it is neither; drop it.
    """
    try:
        version = _inquiry_decoder.decode(payload).protocol_version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        version = None
    if version == PROTOCOL_VERSION:
        return _encoder.encode(Told(PROTOCOL_VERSION, offer, about))
    # Another version's inquiry is refused in the same words as its handshake.
    return handshake.answer(payload, offer)


def read_told(payload: bytes, max_bytes: int) -> Told:
    """Check an answer.

    Raises:
        HandshakeRejected: refused, which another protocol version is.
        RemoteProtocolError: the bytes are malformed.
    """
    if len(payload) > max_bytes:
        raise RemoteProtocolError(f"answer of {len(payload)} bytes is too long")
    try:
        told = _told_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed answer: {clip(str(error))}") from None
    if isinstance(told, handshake.HandshakeRefused):
        raise HandshakeRejected([clip(reason) for reason in told.reasons[:64]] or ["no reason"])
    return told


def ask_for_story(key: str) -> bytes:
    """The bytes that ask a rank for the story of a transfer."""
    return _encoder.encode(StoryQuestion(PROTOCOL_VERSION, key))


def read_question(payload: bytes) -> str | None:
    """Whose story is asked for; None for any other message, which is found out quickly."""
    if payload.find(_QUESTION.encode(), 0, _TAG_WITHIN) < 0:
        return None
    try:
        question = _question_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
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
    if len(payload) > max_bytes:
        raise RemoteProtocolError(f"answer of {len(payload)} bytes is too long")
    try:
        return _story_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed answer: {clip(str(error))}") from None
