"""What an endpoint asks its driver to do: outputs of `Endpoint.handle`.

Decides the closed list and, for each, the events that may answer it. Silence is never an answer:
where nothing comes, a deadline inside the core does.
"""

from dataclasses import dataclass

from kvcourier.config import Integrity, TransferMode
from kvcourier.core.events import BlockGroups, OperationId
from kvcourier.core.messages import AnyMessage, Beat, Cancel, Computed, Landed, Register, span_of
from kvcourier.core.outcomes import Report
from kvcourier.ids import InstanceAddress, PeerRank
from kvcourier.layout.digests import Share
from kvcourier.layout.geometry import TokenSpan
from kvcourier.layout.routes import Route


@dataclass(frozen=True, slots=True)
class Connect:
    """Shake hands and load the peer's agents.

    Answered by PeerConnected or ConnectFailed; dropped by Disconnect.
    """

    address: InstanceAddress
    mode: TransferMode


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Forget a peer, also while `Connect` is under way. Not answered."""

    address: InstanceAddress


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send over the side channel. Not answered: what matters is resent by deadline."""

    peer: PeerRank
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class SendNotification:
    """Send over the data path. Not answered, but a dead peer is: PeerLost."""

    peer: PeerRank
    address: InstanceAddress
    message: Register | Cancel | Computed | Beat


@dataclass(frozen=True, slots=True)
class Probe:
    """Look whether the process of a connected peer's rank is there and runs.

    Answered by PeerProbed, a little after `timeout_s` at the latest.
    """

    peer: PeerRank
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PostWrite:
    """WRITE a tile from our blocks, which hold the first `num_held` tokens, into a peer's.

    Answered by TransferPosted or PostRefused; after TransferPosted, by TransferCompleted or
    TransferFailed. `span` is what the peer's blocks are for, `notice` names the tile and arrives
    with it.
    """

    operation_id: OperationId
    peer: PeerRank
    address: InstanceAddress
    route: Route
    own_block_ids: BlockGroups
    num_held: int
    peer_block_ids: BlockGroups
    span: TokenSpan
    notice: Landed

    @property
    def moved(self) -> TokenSpan:
        """Positions of the tile."""
        return span_of(self.notice)


@dataclass(frozen=True, slots=True)
class PostRead:
    """READ a peer's blocks, which hold the first `num_held` tokens, into ours.

    Answered like PostWrite. `span` is what the reading side wants, in both; the route says how
    much of it moves.
    """

    operation_id: OperationId
    peer: PeerRank
    address: InstanceAddress
    route: Route
    own_block_ids: BlockGroups
    peer_block_ids: BlockGroups
    num_held: int
    span: TokenSpan

    @property
    def moved(self) -> TokenSpan:
        """Positions that move."""
        return self.route.needed(self.span)


@dataclass(frozen=True, slots=True)
class TakeDigest:
    """Sum up a share of a prompt where it lies in our own blocks, which hold the positions `held`.

    Answered by DigestTaken or PostRefused. It only reads, so that nothing waits for it: blocks may
    be given back after an Abandon.
    """

    operation_id: OperationId
    group: int
    block_ids: BlockGroups
    held: TokenSpan
    share: Share
    integrity: Integrity
    seed: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Stop polling an operation: its peer is gone, or its quarantine is over; or nobody needs the
    digest. Not answered."""

    operation_id: OperationId


@dataclass(frozen=True, slots=True)
class Tell:
    """Give the engine a report. Not answered."""

    report: Report


Command = (
    Connect
    | Disconnect
    | SendMessage
    | SendNotification
    | Probe
    | PostWrite
    | PostRead
    | TakeDigest
    | Abandon
    | Tell
)
