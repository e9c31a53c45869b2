"""Who may use which slot of staging memory when, on the packed path. Pure.

A sender gathers scattered blocks into a slot of its own, WRITEs that into a slot of the receiver's
ring, and the receiver scatters it into its blocks. What a sender moves for one request is a stream
of parcels, numbered from 0; each parcel passes through one slot on either side.

Decides which slot a parcel gets, when it is written and scattered, when a slot is free again, and
how a stream ends. Refuses to know bytes, addresses and blocks: what is to be done goes out as
actions, and the driver calls back when it is done.

Three rules carry everything else:
- an own slot is taken only for a parcel that has a slot of the ring, so own slots always come back;
- a slot of the ring is granted to one numbered parcel, so that a message which comes late, twice or
  in another order can never be taken for a newer one;
- a slot that may still be written is never granted again: its notice, the sender's close, the loss
  of the peer, or `slot_limit_s` frees it.

Reading path: `actions` (what is asked of the driver), `sender`, `receiver`.

Common changes: a new action goes into `actions`, the driver, and the two sides of the machine in
tests/core; a new reason for a slot to come back goes into the side, its `check` and that machine.
"""

from kvcourier.core.packing.actions import (
    NO_STAGING,
    Gather,
    OwnSlot,
    ReceiverAction,
    RingSlot,
    Scatter,
    SendClose,
    SenderAction,
    SendGrant,
    SendOpen,
    SendRefusal,
    StreamEnded,
    StreamId,
    StreamLanded,
    Write,
)
from kvcourier.core.packing.receiver import Receiver
from kvcourier.core.packing.sender import Sender

__all__ = [
    "NO_STAGING",
    "Gather",
    "OwnSlot",
    "Receiver",
    "ReceiverAction",
    "RingSlot",
    "Scatter",
    "SendClose",
    "SendGrant",
    "SendOpen",
    "SendRefusal",
    "Sender",
    "SenderAction",
    "StreamEnded",
    "StreamId",
    "StreamLanded",
    "Write",
]
