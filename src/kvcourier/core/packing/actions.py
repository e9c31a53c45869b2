"""What the packed path asks its driver to do, and the names it uses.

Decides the closed list and, for each action, the calls that may answer it. Refuses to know who
carries it out.
"""

from dataclasses import dataclass
from typing import NewType

from kvcourier.ids import PeerRank

StreamId = NewType("StreamId", int)
"""A sender's name for one stream. Never used again in the sender's life."""

OwnSlot = NewType("OwnSlot", int)
"""A slot of the sender's own staging memory."""

RingSlot = NewType("RingSlot", int)
"""A slot of the receiver's staging ring. Never mixed up with the sender's."""

NO_STAGING = "no staging"
"""How the reason begins when a stream ends before any slot was granted: nothing was written, so
the same bytes may still go directly."""


# Of the sender.


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Tell the peer of a stream.

    Answered by `Sender.on_granted` or `Sender.on_refused`; by nothing, within `patience_s`.
    """

    peer: PeerRank
    stream: StreamId


@dataclass(frozen=True, slots=True)
class Gather:
    """Copy the parcel's blocks into an own slot. Always answered, by `Sender.on_gathered`."""

    stream: StreamId
    parcel: int
    slot: OwnSlot


@dataclass(frozen=True, slots=True)
class Write:
    """WRITE the slot into the peer's; a notice for `Receiver.on_parcel` rides on it.

    Always answered, by `Sender.on_written` or `Sender.on_write_failed`, once it is terminal.
    """

    stream: StreamId
    parcel: int
    slot: OwnSlot
    peer_slot: RingSlot


@dataclass(frozen=True, slots=True)
class SendClose:
    """Tell the peer that nothing of the stream is in flight and nothing will be written.

    `unused_slots` were granted and hold no parcel that a notice tells of. Not answered.
    """

    peer: PeerRank
    stream: StreamId
    unused_slots: tuple[RingSlot, ...]


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Nothing of the stream is gathered or written any more; the last word on it.

    Attributes:
        reason: None if all parcels were written, else a sentence. It begins with `NO_STAGING` if
            the peer has granted nothing.
        peer_lost: that life of the peer is over.
    """

    stream: StreamId
    reason: str | None
    peer_lost: bool


SenderAction = SendOpen | Gather | Write | SendClose | StreamEnded


# Of the receiver.


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Let the peer write `slots[i]` with parcel `first_parcel + i`, each once. Not answered."""

    peer: PeerRank
    stream: StreamId
    first_parcel: int
    slots: tuple[RingSlot, ...]


@dataclass(frozen=True, slots=True)
class SendRefusal:
    """Tell the peer that the stream is not taken (any more). `Receiver.on_close` follows."""

    peer: PeerRank
    stream: StreamId
    reason: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy the slot into the parcel's blocks. Always answered, by `Receiver.on_scattered`."""

    peer: PeerRank
    stream: StreamId
    parcel: int
    slot: RingSlot


@dataclass(frozen=True, slots=True)
class StreamLanded:
    """Every parcel of the stream is in its blocks. Not answered."""

    peer: PeerRank
    stream: StreamId


ReceiverAction = SendGrant | SendRefusal | Scatter | StreamLanded
