"""What can happen to an endpoint: inputs of `Endpoint.handle`.

Decides the closed list. Each is a fact in the past tense. Refuses to know what follows from it.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, cast

from kvcourier.config import TransferMode, TransferPath
from kvcourier.core.messages import CoreMessage
from kvcourier.core.params import WantIntent
from kvcourier.ids import (
    BlockId,
    HoldId,
    Incarnation,
    InstanceAddress,
    PeerRank,
    Rank,
    RequestId,
    TransferKey,
)
from kvcourier.layout.geometry import GroupGeometries, TokenSpan

OperationId = NewType("OperationId", int)
"""The core's name for one posted operation."""

NOT_POSTED = OperationId(-1)
"""In place of one, in a command that is only looked at."""

BlockGroups = tuple[tuple[BlockId, ...], ...]
"""Block ids per cache group, each list in token order.

Where a group has a sliding window, its list begins with the block of the first position needed
(`TokenSpan.needed`); other lists begin with the first position of their span.
"""


def groups_of(block_ids: Sequence[Sequence[int]]) -> BlockGroups:
    """Block ids as they come from a message."""
    # Not one `BlockId(...)` each: a long prompt has thousands, and its transfer waits for this.
    return cast(BlockGroups, tuple(tuple(map(int, group)) for group in block_ids))


# From the engine.


@dataclass(frozen=True, slots=True)
class HoldBegun:
    """P accepted a prompt that somebody wants; its KV does not exist yet.

    `hold_id` is new for every hold of every life. `rebindable`: it is kept for another wanter if
    the first gives up or is lost.
    """

    request_id: RequestId
    hold_id: HoldId
    key: TransferKey | None
    rebindable: bool = False


@dataclass(frozen=True, slots=True)
class PrefillAdvanced:
    """The KV of positions [0, num_tokens) is written, for these layers (None: all), in these
    blocks, which are still the engine's.

    Per layer it never becomes less, until it is rolled back. Said of a hold that is over or has
    finished it means nothing, so it may be late.
    """

    request_id: RequestId
    block_ids: BlockGroups
    num_tokens: int
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PrefillRolledBack:
    """The prompt was preempted, or is computed anew: what was written is void, and its blocks may
    be anybody's."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The KV of positions [0, num_tokens) is written in these blocks, which are ours now.

    `continuation` is for the wanter's engine, see `Report`. `keep_s`, where given, is how long they
    are kept for somebody who may come later, instead of a lease for somebody who is about to.
    """

    request_id: RequestId
    block_ids: BlockGroups
    num_tokens: int
    continuation: str | None = None
    keep_s: float | None = None


@dataclass(frozen=True, slots=True)
class WantBegun:
    """D accepted a request whose KV somebody else holds."""

    request_id: RequestId
    intent: WantIntent


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """D reserved blocks for positions `span`; they are ours until released."""

    request_id: RequestId
    block_ids: BlockGroups
    span: TokenSpan


@dataclass(frozen=True, slots=True)
class BlocksRecalled:
    """D needs the blocks of a request for another one: RECALLED will follow, unless its prompt is
    finished and comes all the same."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class WantDeclined:
    """D needs nothing after all (full prefix hit, request refused)."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The engine has ended the request; it only wants its blocks back.

    `block_ids` are those of an unfinished prompt, from which something may be in flight: the engine
    keeps them out of use until RELEASED, which then always comes. Without them it comes only if
    blocks were handed over.
    """

    request_id: RequestId
    block_ids: BlockGroups | None = None


@dataclass(frozen=True, slots=True)
class EndpointClosing:
    """Our process is about to end. Peers are told now; nothing else is asked of this endpoint."""


# From the world.


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A decoded message, by whichever way it came."""

    message: CoreMessage


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """Answers `Connect`: the peer is checked and addressable."""

    address: InstanceAddress
    incarnation: Incarnation
    modes: frozenset[TransferMode]
    geometries: Mapping[Rank, GroupGeometries]
    gives_digests: bool = True


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """Answers `Connect`: no answer, refused, or not understood."""

    address: InstanceAddress
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """That life of that instance is over: nothing of it can touch our memory any more."""

    address: InstanceAddress
    incarnation: Incarnation
    reason: str


class Sign(enum.StrEnum):
    """What a closer look at a peer's process has found.

    GONE is no proof that its memory is out of reach: a listener can end before its process does,
    and between the two of us something else may refuse.
    """

    RUNS = "runs"
    """It answers, though its courier may not."""
    SILENT = "silent"
    """It does not: stopped, or out of reach."""
    GONE = "gone"
    """There is nobody at its address."""


@dataclass(frozen=True, slots=True)
class PeerProbed:
    """Answers `Probe`."""

    peer: PeerRank
    sign: Sign


@dataclass(frozen=True, slots=True)
class PeerReset:
    """The side channel's connection to a peer rank broke: a hint that it may be gone."""

    peer: PeerRank


@dataclass(frozen=True, slots=True)
class TransferPosted:
    """Answers PostWrite and PostRead; TransferCompleted or TransferFailed will follow.

    `num_pieces` are the descriptors, or the parcels where it goes packed. `seconds` is how long
    posting took, `thread` who did it: an engine's step must never post. `path` and `estimates_s`
    say which path was chosen and how long each was expected to take.
    """

    operation_id: OperationId
    num_pieces: int
    num_bytes: int
    seconds: float
    thread: str
    path: TransferPath = TransferPath.DIRECT
    estimates_s: Mapping[TransferPath, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PostRefused:
    """Answers PostWrite, PostRead and TakeDigest: nothing is in flight for it."""

    operation_id: OperationId
    reason: str


@dataclass(frozen=True, slots=True)
class TransferCompleted:
    """All bytes of the operation have moved."""

    operation_id: OperationId


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The operation ended without moving everything; it is quiet."""

    operation_id: OperationId
    reason: str


@dataclass(frozen=True, slots=True)
class DigestTaken:
    """Answers TakeDigest."""

    operation_id: OperationId
    digest: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened but time: deadlines may be due."""


EngineEvent = (
    HoldBegun
    | PrefillAdvanced
    | PrefillRolledBack
    | PrefillFinished
    | WantBegun
    | BlocksReserved
    | BlocksRecalled
    | WantDeclined
    | RequestAborted
)

Event = (
    EngineEvent
    | MessageReceived
    | PeerConnected
    | ConnectFailed
    | PeerLost
    | PeerProbed
    | PeerReset
    | EndpointClosing
    | TransferPosted
    | PostRefused
    | TransferCompleted
    | TransferFailed
    | DigestTaken
    | TimePassed
)
