"""The records of the holding side (P): one per prompt, one per registration, and what is
remembered of both.

Decides what is stored and how a late question about an ended hold is answered. Refuses to know
messages beyond the registration itself, and when anything is sent.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvcourier.core.events import BlockGroups
from kvcourier.core.lifecycle import (
    DELIVERY,
    HOLD,
    DeliveryEvent,
    DeliveryState,
    HoldEvent,
    HoldState,
    step,
)
from kvcourier.core.messages import HoldName, Register
from kvcourier.core.outgoing import Outgoing
from kvcourier.core.params import MAX_BINDING
from kvcourier.core.references import block_digest
from kvcourier.core.rendezvous import Claim
from kvcourier.core.workspace import Owner
from kvcourier.ids import (
    EngineId,
    HoldId,
    Incarnation,
    InstanceAddress,
    PeerRank,
    Rank,
    RequestId,
    TransferKey,
)

_MAX_REMEMBERED = 4096

DeliveryKey = tuple[PeerRank, RequestId]
"""A wanter's rank and *its* request id: what a registration is known by."""

Wanter = tuple[EngineId, Incarnation, RequestId]
"""One request of one life of one instance: the only one that may have a hold."""


@dataclass(slots=True)
class Registration:
    """What a wanter's rank asked for, from when it arrives."""

    peer: PeerRank
    message: Register

    @classmethod
    def of(cls, message: Register) -> "Registration":
        """The registration in a message."""
        return cls(message.sender.peer(), message)

    @property
    def request_id(self) -> RequestId:
        """The wanter's request."""
        return RequestId(self.message.request_id)

    @property
    def key(self) -> DeliveryKey:
        """What it is known by."""
        return self.peer, self.request_id

    @property
    def wanter(self) -> Wanter:
        """The request that it is a part of."""
        return wanter_of(self.peer, self.request_id)

    @property
    def address(self) -> InstanceAddress:
        """Where the wanter's instance can be reached."""
        return InstanceAddress(
            self.peer.engine_id, self.message.decode_host, self.message.decode_port
        )

    @property
    def claim(self) -> Claim:
        """How it names its hold."""
        return claim_of(self.message.name, self.peer, self.request_id)


@dataclass(slots=True)
class Delivery:
    """A registration that met its hold.

    Attributes:
        epoch: rises whenever the prompt is computed anew.
        outgoing: what is still to be sent in this epoch, per route; empty before the first post.
        draining: writes of an older epoch are in flight; no other is posted meanwhile.
        told_computed: the wanter was told that prefill has finished, or will be by what was posted.
        reason: why it failed; nothing more is posted then.
        is_hopeless: asking for it again would be in vain: its peer cannot be reached.
    """

    hold: "Hold"
    registration: Registration
    state: DeliveryState = DeliveryState.REGISTERED
    acknowledged: bool = False
    epoch: int = 0
    outgoing: list[Outgoing] = field(default_factory=list)
    draining: bool = False
    told_computed: bool = False
    reason: str = ""
    is_hopeless: bool = False

    @property
    def owner(self) -> Owner:
        """Under which its operations fly."""
        return "hold", self.hold.request_id, self.registration.peer

    @property
    def may_be_repeated(self) -> bool:
        """Whether it has failed, was taken back for now, or what it has brought may have been found
        wrong."""
        checked = self.state is DeliveryState.WRITTEN and self.registration.message.checks
        is_served = self.registration.peer.rank in self.hold.served
        taken_back = self.state is DeliveryState.CANCELLED and not is_served
        if self.registration.wanter in self.hold.parted:
            return False
        return checked or taken_back or self.state is DeliveryState.FAILED

    def advance(self, event: DeliveryEvent) -> None:
        """Move on by the table."""
        self.state = step(DELIVERY, self.state, event, self.registration.key)


@dataclass(slots=True)
class Hold:
    """One prompt's KV.

    Attributes:
        num_tokens: positions that `block_ids` hold for some layer at least.
        held_since: when prefill has finished.
        keep_s: how long it is kept for somebody who may come later, if for such a one; then it is
            had by its hold id alone.
        digest: of `block_ids`, once prefill has finished and somebody READs them.
        lent: `block_ids` are kept for us; the engine is owed RELEASED.
        continuation: what our engine gave for the wanter's when prefill finished.
        written: positions written of single layers, where these are ahead of `written_of_all`.
        rebindable: if that one gives up or is lost, another request may have it.
        bound: the one request that may have it.
        binding: which of the router's bindings that is; later ones take it over.
        parted: requests that have given up or lost it, and get it no more.
        needed: ranks of its instance that take something from ours.
        served: those of them that have it or want it no more, each with how.
        awaited_by: ranks that have asked to keep it, in one life each, and where they listen.
        askers: the same ranks, and the request of each, to be told when it is finished.
        asked_by: ranks that have asked what it sums up to.
        forsaken: why the one that may have it will not come any more, if so.
    """

    request_id: RequestId
    hold_id: HoldId
    key: TransferKey | None
    rebindable: bool = False
    state: HoldState = HoldState.COMPUTING
    block_ids: BlockGroups = ()
    num_tokens: int = 0
    held_since: float = 0.0
    keep_s: float | None = None
    digest: bytes | None = None
    lent: bool = False
    continuation: str | None = None
    written_of_all: int = 0
    written: dict[int, int] = field(default_factory=dict)
    deliveries: dict[DeliveryKey, Delivery] = field(default_factory=dict)
    bound: Wanter | None = None
    binding: int = 0
    parted: set[Wanter] = field(default_factory=set)
    needed: set[Rank] = field(default_factory=set)
    served: dict[Rank, str] = field(default_factory=dict)
    askers: dict[PeerRank, RequestId] = field(default_factory=dict)
    awaited_by: dict[PeerRank, InstanceAddress] = field(default_factory=dict)
    asked_by: set[PeerRank] = field(default_factory=set)
    forsaken: str = ""
    reason: str = ""

    def bind(self, peer: PeerRank, request_id: RequestId, consumers: list[tuple[int, int]]) -> bool:
        """Let this request of the peer have it; False if another one does, or it makes no sense."""
        wanter = wanter_of(peer, request_id)
        ranks = {Rank(*pair) for pair in consumers}
        if self.bound not in (None, wanter) or peer.rank not in ranks or wanter in self.parted:
            return False
        self.bound = wanter
        self.needed |= ranks
        return True

    def unbind(self, wanter: Wanter) -> None:
        """This request gets it no more; whoever comes next may."""
        self.parted.add(wanter)
        if self.bound == wanter:
            self.bound = None
            self.needed.clear()
            self.served.clear()

    def may_be_unbound(self) -> bool:
        """Whether it outlives its wanter; not for ever, as each one is remembered."""
        return self.rebindable and len(self.parted) <= MAX_BINDING

    def is_for(self, engine_id: EngineId, incarnation: Incarnation) -> bool:
        """Whether nobody but this life may have it, or has asked for it."""
        if self.bound is not None:
            return self.bound[:2] == (engine_id, incarnation)
        lives = {peer[:2] for peer in self.awaited_by}
        return lives == {(engine_id, incarnation)}

    def write(self, block_ids: BlockGroups, num_tokens: int, layers: Iterable[int] | None) -> None:
        """Positions [0, num_tokens) of these layers (None: all) are written in these blocks."""
        if num_tokens >= self.num_tokens:
            self.block_ids, self.num_tokens = block_ids, num_tokens
        if layers is None:
            self.written_of_all = max(self.written_of_all, num_tokens)
        for layer in layers or ():
            self.written[layer] = max(self.written.get(layer, 0), num_tokens)

    def roll_back(self) -> None:
        """Nothing is written any more."""
        self.block_ids, self.num_tokens = (), 0
        self.written_of_all = 0
        self.written.clear()

    def num_written(self, layer: int) -> int:
        """Positions of a layer that are written, from 0 on."""
        return max(self.written_of_all, self.written.get(layer, 0))

    def lies_in(self, blocks: bytes, num_tokens: int, *, exactly: bool) -> bool:
        """Whether so many tokens of it are in the blocks of this digest.

        `exactly`: no other number will do, as it says where a window's blocks begin.
        """
        if self.digest is None:
            self.digest = block_digest(self.block_ids)
        fewest = self.num_tokens if exactly else 1
        fits = fewest <= num_tokens <= self.num_tokens
        return fits and blocks == self.digest

    def is_meant_by(self, name: HoldName) -> bool:
        """Whether a name, by which it was found, promises this very hold and not one before it."""
        return name.hold_id == self.hold_id or (name.hold_id is None and self.keep_s is None)

    @property
    def is_asked_for(self) -> bool:
        """Whether a registration waits for it, or has got it, that was not taken back for now."""
        taken_back = (DeliveryState.CANCELLED, DeliveryState.QUARANTINED)
        return any(
            each.state not in taken_back and each.registration.wanter not in self.parted
            for each in self.deliveries.values()
        )

    @property
    def all_served(self) -> bool:
        """Whether every rank that needs something has been served."""
        return bool(self.needed) and self.needed <= self.served.keys()

    def advance(self, event: HoldEvent) -> None:
        """Move on by the table."""
        self.state = step(HOLD, self.state, event, self.request_id)


@dataclass(frozen=True, slots=True)
class EndedHold:
    """What is remembered of a hold for those who ask late."""

    hold_id: HoldId
    served: frozenset[Rank]
    bound: Wanter | None
    reason: str


class EndedHolds:
    """The latest ended holds, by request id and by transfer key."""

    def __init__(self) -> None:
        self._ended: OrderedDict[RequestId | TransferKey, EndedHold] = OrderedDict()

    def remember(self, hold: Hold) -> None:
        """A hold has ended."""
        ended = EndedHold(hold.hold_id, frozenset(hold.served), hold.bound, hold.reason)
        for name in (hold.request_id, hold.key):
            if name is not None:
                self._ended[name] = ended
                self._ended.move_to_end(name)
                forget_oldest(self._ended)

    def find(self, name: HoldName) -> EndedHold | None:
        """The ended hold that is exactly so named."""
        key = name.key()
        if key is not None and key in self._ended:
            return self._ended[key]
        return self._ended.get(RequestId(name.request_id)) if name.request_id else None

    def served(self, name: HoldName, peer: PeerRank, request_id: RequestId) -> bool:
        """Whether this rank got all its request wanted of this very hold before it ended."""
        ended = self.find(name)
        return (
            ended is not None
            and ended.bound == wanter_of(peer, request_id)
            and peer.rank in ended.served
            and name.hold_id in (None, ended.hold_id)
        )


def forget_oldest(remembered: OrderedDict[Any, Any]) -> None:
    """After each addition: who sends us names is not to fill our memory with them."""
    if len(remembered) > _MAX_REMEMBERED:
        remembered.popitem(last=False)


def claim_of(name: HoldName, peer: PeerRank, request_id: RequestId) -> Claim:
    """How a wanter's message names a hold."""
    return Claim(name, wanter_of(peer, request_id), request_id)


def wanter_of(peer: PeerRank, request_id: RequestId) -> Wanter:
    """The request behind a message of one of its ranks."""
    return peer.engine_id, peer.incarnation, request_id
