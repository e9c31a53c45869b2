"""What an instance tells of itself to somebody who wants no KV: an operator, by `kvcourier doctor`.

Decides what can be asked beside handshakes and how it is answered. Refuses to know sockets, and
where the values come from (`runtime/about.py`). Instances do not ask each other this.
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


class Inquiry(msgspec.Struct, frozen=True, tag="inquiry"):
    """Asks whoever listens for its offer and its settings."""

    protocol_version: int


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer."""

    protocol_version: int
    offer: Offer
    about: About


_encoder = msgspec.msgpack.Encoder()
_inquiry_decoder = msgspec.msgpack.Decoder(Inquiry)
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
