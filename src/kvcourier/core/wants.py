"""The records of the wanting side (D): one per request, and one per source rank of each.

Decides what is stored and what follows from it alone: what is covered, quiet, acknowledged and
proven. Refuses to know messages and when anything is sent.
"""

import math
from dataclasses import dataclass, field

from kvcourier.config import TransferMode
from kvcourier.core.coverage import Coverage
from kvcourier.core.events import BlockGroups
from kvcourier.core.lifecycle import WANT, WantEvent, WantState, step
from kvcourier.core.params import PullIntent, WantIntent
from kvcourier.core.workspace import Owner
from kvcourier.ids import HoldId, InstanceAddress, PeerRank, Rank, RequestId
from kvcourier.layout.geometry import TokenSpan
from kvcourier.layout.routes import Route

_NOTHING = TokenSpan(0, 0)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a holder keeps for us to READ.

    `num_tokens` is None where it has not said; then it is at least what we want.
    """

    hold_id: HoldId | None
    block_ids: BlockGroups
    num_tokens: int | None

    def why_unusable(self, span: TokenSpan, routes: tuple[Route, ...]) -> str:
        """Why this span cannot be READ from there by these routes, or nothing."""
        if self.num_tokens is None and any(route.window for route in routes):
            return "remote_num_tokens: needed to know where a window's blocks begin, found none"
        if self.num_tokens is not None and span.stop > self.num_tokens:
            return f"{span.stop} tokens are wanted, {self.num_tokens} were computed"
        return ""


@dataclass(slots=True)
class Check:
    """What a source rank's KV sums up to, there and here: a digest per route.

    Attributes:
        seed: of the question; answers to others mean nothing.
    """

    seed: int
    theirs: list[int] | None = None
    ours: list[int] | None = None

    @property
    def is_over(self) -> bool:
        """Whether both are known."""
        return self.theirs is not None and self.ours is not None

    @property
    def agrees(self) -> bool:
        """Whether they are equal."""
        return self.is_over and self.theirs == self.ours


@dataclass(slots=True)
class Link:
    """One source rank of a request.

    Attributes:
        peer: the source rank, in the life we matched.
        routes: what we take from it; none for a rank we only have to free.
        consumers: ranks of our instance that take from it.
        offer: what it holds, once that is known: from the request's params, or told.
        coverage: what has landed, per route (push).
        computed: prefill has finished there, so that what has landed is final (push).
        epoch: how often the prompt was computed anew there, as its writes say.
        asked_epoch: epoch of our latest registration; answers to earlier ones mean nothing.
        fenced: it has nothing of our latest registration any more.
        may_write: whether it may still write into our blocks (push): from our registration until
            all has landed, it is fenced, or it is gone.
        acknowledged: it has our registration.
        check: whether what has come is what it holds; None before that is asked.
        proven_until: until when, on our clock, it certainly keeps the hold (pull).
        blocks: the digest of what is offered, once it was needed.
        shown_at: since when it is asked about the very blocks that we READ.
        confirmed: it has said that these are the hold's.
        refused: it has said that they are not.
    """

    peer: PeerRank
    routes: tuple[Route, ...]
    consumers: tuple[Rank, ...]
    offer: Offer | None = None
    coverage: list[Coverage] = field(default_factory=list)
    computed: bool = False
    epoch: int = 0
    asked_epoch: int = 0
    may_write: bool = False
    acknowledged: bool = False
    check: Check | None = None
    fenced: bool = False
    proven_until: float = -math.inf
    blocks: bytes | None = None
    shown_at: float = math.inf
    confirmed: bool = False
    refused: bool = False

    def expect(self, span: TokenSpan) -> None:
        """Nothing has landed, and all that is needed of `span` is to come."""
        self.computed = False
        self.check = None
        self.coverage = [Coverage(each.layers, each.needed(span)) for each in self.routes]

    def is_earlier(self, epoch: int) -> bool:
        """Whether an answer of this epoch is to an earlier registration than our latest."""
        return epoch < self.asked_epoch

    @property
    def covered(self) -> bool:
        """Whether everything wanted of this rank has landed."""
        return all(part.complete for part in self.coverage)

    @property
    def received(self) -> bool:
        """Whether it has landed for good."""
        return self.computed and self.covered


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """Blocks of a registered request that a tile of one route goes to.

    Attributes:
        wanted: positions that `block_ids` were reserved for.
        span: positions of the tile.
    """

    request_id: RequestId
    route: Route
    block_ids: BlockGroups
    wanted: TokenSpan
    span: TokenSpan


@dataclass(slots=True)
class Want:
    """One request whose KV somebody else holds.

    Attributes:
        is_finished: its holder has finished the prompt, as far as we know.
        continuation: what the holder's engine gave for ours, once that is known.
        gave_up: our request has ended without it.
    """

    request_id: RequestId
    intent: WantIntent
    state: WantState = WantState.QUEUED
    links: dict[Rank, Link] = field(default_factory=dict)
    block_ids: BlockGroups = ()
    span: TokenSpan = _NOTHING
    written_to: bool = False
    num_connects: int = 0
    num_repairs: int = 0
    reads_instead: bool = False
    rechecked: bool = False
    is_finished: bool = False
    registered_at: float = 0.0
    read_completed_at: float = 0.0
    continuation: str | None = None
    gave_up: bool = False

    @property
    def may_be_followed(self) -> bool:
        """Whether the router may send another for what we give up."""
        return self.intent.binding is not None

    @property
    def address(self) -> InstanceAddress:
        """Where the holder's instance listens."""
        holder = self.intent.holder
        return InstanceAddress(holder.engine_id, holder.host, holder.port)

    @property
    def mode(self) -> TransferMode:
        """Who is asked to move it."""
        intent = self.intent
        reads = not intent.is_written if isinstance(intent, PullIntent) else intent.reads
        return TransferMode.PULL if reads else TransferMode.PUSH

    @property
    def offer(self) -> Offer | None:
        """What is held for us, if the request came with it."""
        intent = self.intent
        if not isinstance(intent, PullIntent):
            return None
        return Offer(intent.hold_id, intent.block_ids, intent.num_tokens)

    @property
    def reads(self) -> bool:
        """Whether we READ; else we are written to, in a pull as well if `written_to`."""
        if self.reads_instead:
            return True
        return self.mode is TransferMode.PULL and not self.written_to

    @property
    def registered(self) -> bool:
        """Whether holders have, or get, our registration and have not served it."""
        return self.state in (WantState.REGISTERING, WantState.REGISTERED)

    @property
    def may_be_served(self) -> bool:
        """Whether what comes for our registration counts: also while we take it back."""
        return self.registered or self.state is WantState.RECALLING

    @property
    def sources(self) -> list[Link]:
        """The source ranks we take something from."""
        return [link for link in self.links.values() if link.routes]

    @property
    def quiet_remotely(self) -> bool:
        """Whether no peer can write into our blocks any more."""
        return not any(link.may_write for link in self.links.values())

    def unreserve(self) -> None:
        """Its blocks are gone, with what has landed in them; the next registration is a new one."""
        self.block_ids, self.span, self.written_to = (), _NOTHING, False
        for link in self.links.values():
            link.asked_epoch = link.epoch = max(link.epoch, link.asked_epoch) + 1
            link.coverage, link.computed, link.check = [], False, None
            link.acknowledged = link.fenced = link.may_write = False

    def owner(self, link: Link) -> Owner:
        """Under which its READs from this rank fly."""
        return "want", self.request_id, link.peer

    def advance(self, event: WantEvent) -> None:
        """Move on by the table."""
        self.state = step(WANT, self.state, event, self.request_id)
