"""A prefill and a decode instance joined in memory, on virtual time, moving real bytes.

Everything in transit is an `Item` in `Pair.items`; nothing moves until the test delivers it. The
invariants of the style guide are checked after every step.

S1  no block is released while a posted operation on it is not terminal
S2  "received" means every byte came from the matched source, and so did the continuation
S3  a tile is posted once an epoch, and only when all of it is written
S4  each request gets at most one terminal report per side, and one release if it gave blocks
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kv_content import group_of, write_prompt, wrong_cells
from kvcourier.config import Integrity, Limits, Timing, TransferMode
from kvcourier.core.commands import (
    Abandon,
    Connect,
    Disconnect,
    PostRead,
    PostWrite,
    Probe,
    SendMessage,
    SendNotification,
    TakeDigest,
    Tell,
)
from kvcourier.core.endpoint import Endpoint
from kvcourier.core.events import (
    BlockGroups,
    BlocksRecalled,
    BlocksReserved,
    DigestTaken,
    Event,
    HoldBegun,
    MessageReceived,
    PeerConnected,
    PeerLost,
    PeerProbed,
    PostRefused,
    PrefillAdvanced,
    PrefillFinished,
    PrefillRolledBack,
    RequestAborted,
    Sign,
    TimePassed,
    TransferCompleted,
    TransferFailed,
    TransferPosted,
    WantBegun,
    WantDeclined,
)
from kvcourier.core.messages import Landed, decode, encode
from kvcourier.core.outcomes import Outcome
from kvcourier.core.params import HolderAddress, PullIntent, PushIntent
from kvcourier.errors import MappingError
from kvcourier.ids import (
    EngineId,
    HoldId,
    Incarnation,
    InstanceAddress,
    PeerRank,
    Rank,
    RequestId,
    TransferId,
    TransferKey,
    hold_id_of,
)
from kvcourier.layout import (
    CacheGeometry,
    GroupGeometries,
    MemoryKind,
    Parcel,
    Region,
    TokenSpan,
    added,
    bind,
    block_run,
    cells_of,
    instance_geometries,
    plan_mapping,
)
from kvcourier.transport.copying import digester_for
from layout_builders import Buffer, copy_pieces, make_rank, model_cache

LIMITS = Limits()
_PARALLEL = ("tp_size", "pp_size", "layers", "groups")
TERMINAL = frozenset({Outcome.RECEIVED, Outcome.RECEIVE_FAILED, Outcome.SENT, Outcome.SEND_FAILED})


@dataclass(eq=False)
class Item:
    """One thing in transit; `deliver` makes it arrive."""

    kind: str
    sender: PeerRank
    target: PeerRank | InstanceAddress
    deliver: Callable[[], None]
    fail: Callable[[], None] | None = None
    touches: tuple[tuple[str, int], ...] = ()
    """(side, block) that it reads or writes on arrival."""
    notice: Landed | None = None
    """What a WRITE brings along."""
    message: object = None
    """What a message or a notification says."""
    spoils: bool = False
    """Whether one bit of what an operation brings comes out wrong, and nobody is told."""

    def __repr__(self) -> str:
        return f"{self.kind} {self.sender} -> {self.target}"


@dataclass
class Side:
    """One instance: a core per rank, its memory, and what its engine knows.

    `shape` has changes to `model_cache`, parallel sizes, other layers of a rank, and `groups`:
    (layers, window) of each cache group. With groups, block 0 is nobody's, as in vLLM.
    """

    name: str
    address: InstanceAddress
    timing: Timing
    shape: dict[str, object]
    skew: float = 0.0
    rate: float = 1.0
    life: int = 0
    is_written_to: bool = False
    integrity: Integrity = Integrity.OFF
    gives_digests: bool = True
    modes: frozenset[TransferMode] = frozenset(TransferMode)
    endpoints: dict[Rank, Endpoint] = field(default_factory=dict)
    reports: dict[RequestId, dict[Rank, list[Outcome]]] = field(default_factory=dict)
    reasons: dict[RequestId, set[str]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    lent: dict[RequestId, list[int]] = field(default_factory=dict)
    held: set[RequestId] = field(default_factory=set)
    """D: requests of which it was told that their prompt is finished."""
    recalled: dict[RequestId, set[Rank]] = field(default_factory=dict)
    """D: ranks that have given a request's blocks back, where others have not yet."""

    given_back: set[RequestId] = field(default_factory=set)
    """D: requests that wait for other blocks."""

    def start(self) -> None:
        """Begin a (new) life with empty memory."""
        self.life += 1
        model = {k: v for k, v in self.shape.items() if k not in _PARALLEL}
        geometries = instance_geometries(
            model_cache(**model), self.shape.get("tp_size", 1), self.shape.get("pp_size", 1)
        )
        for rank, layers in self.shape.get("layers", {}).items():
            geometries[rank] = dataclasses.replace(geometries[rank], layers=layers)
        self.geometries = {rank: self._groups(each) for rank, each in geometries.items()}
        self.caches = {
            rank: make_rank(groups, rank=rank) for rank, groups in self.geometries.items()
        }
        self.incarnation = Incarnation(f"{self.name}-life{self.life}")
        self.endpoints = {
            rank: Endpoint(
                self.rank(rank),
                self.address,
                self.geometries,
                self.timing,
                LIMITS,
                lambda command: self.is_written_to,
                integrity=self.integrity,
            )
            for rank in geometries
        }
        self.reports, self.reasons, self.lent = {}, {}, {}
        self.held, self.recalled, self.given_back = set(), {}, set()
        self.free = list(self.pool)

    def _groups(self, whole: CacheGeometry) -> GroupGeometries:
        """A rank's layers in the groups of the shape; all in one without any."""
        if "groups" not in self.shape:
            return (whole,)
        return tuple(
            dataclasses.replace(
                whole,
                layers=tuple(layer for layer in whole.layers if layer in layers),
                window=window,
                num_reserved_blocks=1,
            )
            for layers, window in self.shape["groups"]
        )

    @property
    def groups(self) -> GroupGeometries:
        """Any rank's; they have the same blocks."""
        return next(iter(self.geometries.values()))

    @property
    def pool(self) -> range:
        """Every block that a request can have."""
        return range(self.groups[0].num_reserved_blocks, self.groups[0].num_blocks)

    def rank(self, rank: Rank) -> PeerRank:
        return PeerRank(self.address.engine_id, self.incarnation, rank)

    def clock(self, now: float) -> float:
        return self.skew + self.rate * now

    @property
    def block_size(self) -> int:
        return self.groups[0].block_size

    def counts(self, span: TokenSpan) -> list[int]:
        """Blocks that each group needs for a span."""
        return [
            -(-len(span.needed(group.window, self.block_size)) // self.block_size)
            for group in self.groups
        ]

    def fits(self, num_tokens: int) -> bool:
        """Whether a prompt's blocks are free."""
        return sum(self.counts(TokenSpan(0, num_tokens))) <= len(self.free)

    def take(self, request_id: str, span: TokenSpan) -> BlockGroups | None:
        """Lend each group blocks for what it needs of the span, from the end of the free list;
        None if short."""
        counts = self.counts(span)
        if sum(counts) > len(self.free):
            return None
        taken = [[self.free.pop() for _ in range(count)] for count in counts]
        self.lent[RequestId(request_id)] = [block for blocks in taken for block in blocks]
        return tuple(map(tuple, taken))

    def write(self, prompt: str, block_ids: BlockGroups, span: TokenSpan) -> None:
        """Compute a prompt; what has left a group's window is not there any more."""
        for index, (group, blocks) in enumerate(zip(self.groups, block_ids, strict=True)):
            kept = span.needed(group.window, self.block_size)
            write_prompt(group_of(self.caches, index), prompt, blocks, kept, kept.start)

    def take_whole(self, request_id: str, num_tokens: int) -> BlockGroups | None:
        """Lend each group blocks for all positions of a prompt, as while it is computed."""
        count = -(-num_tokens // self.block_size)
        if count * len(self.groups) > len(self.free):
            return None
        taken = tuple(tuple(self.free.pop() for _ in range(count)) for _ in self.groups)
        self.lent[RequestId(request_id)] = [block for blocks in taken for block in blocks]
        return taken

    def wrong(self, rank: Rank, prompt: str, block_ids: BlockGroups, span: TokenSpan) -> list[str]:
        """Cells of a rank that a later query looks at and that are not the prompt's."""
        wrong = []
        for index, (group, blocks) in enumerate(zip(self.groups, block_ids, strict=True)):
            own = {rank: group_of(self.caches, index)[rank]}
            first = span.needed(group.window, self.block_size).start
            # In plain words, as this is the oracle: the token at `stop` looks back over its window.
            oldest = span.start if group.window is None else span.stop - group.window + 1
            looked_at = TokenSpan(max(span.start, oldest), span.stop)
            wrong += wrong_cells(own, prompt, blocks, looked_at, first)
        return wrong

    def outcomes(self, request_id: str) -> set[Outcome]:
        """What every rank has reported of a request, as one set."""
        ranks = self.reports.get(RequestId(request_id), {})
        return {outcome for told in ranks.values() for outcome in told}

    def wrong_to_send(self, rank: Rank, prompt: str, command: PostWrite) -> list[str]:
        """Cells of a tile that are not the prompt's, or not yet."""
        index = command.route.source_group
        group = self.groups[index]
        first = TokenSpan(0, command.num_held).needed(group.window, group.block_size).start
        return wrong_cells(
            {rank: group_of(self.caches, index)[rank]},
            prompt,
            command.own_block_ids[index],
            command.moved,
            first,
            command.notice.layers or command.route.layers,
        )

    def is_over(self, request_id: str) -> bool:
        """Whether every rank has released the request, or given its blocks back before."""
        ranks = self.reports.get(RequestId(request_id), {})
        back = self.recalled.get(RequestId(request_id), set())
        return all(r in back or Outcome.RELEASED in ranks.get(r, ()) for r in self.endpoints)


@dataclass
class Prompt:
    """A prompt that P computes bit by bit, in blocks for all of its positions."""

    name: str
    num_tokens: int
    blocks: BlockGroups

    def held(self, side: Side, num_written: int) -> BlockGroups:
        """The blocks that P's engine names when so many positions are written."""
        named = []
        for group, blocks in zip(side.groups, self.blocks, strict=True):
            first = TokenSpan(0, num_written).needed(group.window, group.block_size).start
            named.append(blocks[first // group.block_size : -(-num_written // group.block_size)])
        return tuple(named)


class Pair:
    """Two sides and what is between them."""

    def __init__(
        self,
        prefill: dict[str, object] | None = None,
        decode: dict[str, object] | None = None,
        timing: Timing | None = None,
        *,
        written_pulls: bool = False,
        continues: bool = True,
        integrity: Integrity = Integrity.OFF,
    ) -> None:
        self.now = 0.0
        self.continues = continues
        self.items: list[Item] = []
        self._lost_some = False
        self.prompts: dict[RequestId, tuple[str, TokenSpan, BlockGroups]] = {}
        """Per D request: the prompt it must get, where, in which blocks."""
        self.computing: dict[str, Prompt] = {}
        """Per P request, what it computes bit by bit and has not finished."""
        self._anew: Counter[str] = Counter()
        self._sent: set[tuple] = set()
        self._names = itertools.count(1)
        timing = timing or Timing()
        self.prefill = Side("p", _address("p", 1), timing, prefill or {})
        self.decode = Side("d", _address("d", 2), timing, decode or {})
        self.decode.is_written_to = written_pulls
        self.decode.integrity = integrity
        self.sides = {"p": self.prefill, "d": self.decode}
        self._lost: dict[Incarnation, InstanceAddress] = {}
        self._hold_ids: dict[str, HoldId] = {}
        self._num_held: dict[str, int] = {}
        self._continuations: dict[str, str | None] = {}
        for side in self.sides.values():
            side.start()

    # What an engine does.

    def hold(
        self, request_id: str, transfer_id: str | None = None, *, rebindable: bool = False
    ) -> None:
        """P accepts a prompt."""
        key = TransferKey(TransferId(transfer_id), 0) if transfer_id else None
        hold_id = hold_id_of(self.prefill.incarnation, next(self._names))
        self.note_hold_id(request_id, hold_id)
        self.engine(self.prefill, HoldBegun(RequestId(request_id), hold_id, key, rebindable))

    def advance_prefill(
        self,
        request_id: str,
        name: str,
        num_tokens: int,
        num_written: int,
        layers: tuple[int, ...] | None = None,
    ) -> bool:
        """P computes a prompt up to a position, in some layers only; False if it has too few
        blocks."""
        prompt = self.computing.get(request_id)
        if prompt is None:
            blocks = self.prefill.take_whole(request_id, num_tokens)
            if blocks is None:
                return False
            prompt = self.computing[request_id] = Prompt(name, num_tokens, blocks)
        self._compute(prompt, num_written, layers)
        held = prompt.held(self.prefill, num_written)
        event = PrefillAdvanced(RequestId(request_id), held, num_written, layers)
        self.engine(self.prefill, event)
        return True

    def _compute(self, prompt: Prompt, num_written: int, layers: tuple[int, ...] | None) -> None:
        for index, (group, blocks) in enumerate(
            zip(self.prefill.groups, prompt.blocks, strict=True)
        ):
            kept = TokenSpan(0, num_written).needed(group.window, group.block_size)
            content, cache = self.content(prompt.name), group_of(self.prefill.caches, index)
            write_prompt(cache, "left the window", blocks, TokenSpan(0, kept.start))
            write_prompt(cache, content, blocks, kept, 0, layers)

    def roll_back(self, request_id: str) -> None:
        """P preempts a prompt: its blocks are free at once, and it will be computed anew."""
        prompt = self.computing.pop(request_id)
        blocks = self.prefill.lent.pop(RequestId(request_id))
        self._anew[prompt.name] += 1
        for item in self.items:
            # What still reads them moves nothing that counts.
            own = {("p", block) for block in blocks}
            item.touches = tuple(each for each in item.touches if each not in own)
        self.prefill.free += blocks
        self.engine(self.prefill, PrefillRolledBack(RequestId(request_id)))

    def content(self, name: str) -> str:
        """What stands for a prompt's KV: each computation of it has its own."""
        return f"{name}/{self._anew[name]}" if self._anew[name] else name

    def finish(self, request_id: str, prompt: str, num_tokens: int) -> BlockGroups:
        """P computes the prompt, or what is left of it, and hands its blocks over; returns them."""
        span = TokenSpan(0, num_tokens)
        begun = self.computing.pop(request_id, None)
        if begun is None:
            blocks = self.prefill.take(request_id, span)
            assert blocks is not None
            self.prefill.write(self.content(prompt), blocks, span)
        else:
            self._compute(begun, num_tokens, None)
            blocks = begun.held(self.prefill, num_tokens)
        self.note_held(request_id, num_tokens)
        # Of a prompt as of a request: any of a prompt's holds may be the one that is got.
        told = f"after {self.content(prompt)}" if self.continues else None
        for name in (request_id, prompt):
            self._continuations[name] = told
        self.engine(self.prefill, PrefillFinished(RequestId(request_id), blocks, num_tokens, told))
        return blocks

    def note_hold_id(self, request_id: str, hold_id: HoldId) -> None:
        """What P's answer will call its promise."""
        self._hold_ids[request_id] = hold_id

    def note_held(self, request_id: str, num_tokens: int) -> None:
        """What P's answer will say of its tokens."""
        self._num_held[request_id] = num_tokens

    def want_push(
        self,
        request_id: str,
        transfer_id: str | None,
        holder_request_id: str | None = None,
        *,
        reads: bool = False,
        binding: int | None = None,
    ) -> None:
        """D accepts a request that P writes or, with `reads`, tells D to read."""
        intent = PushIntent(
            self.holder(),
            RequestId(holder_request_id) if holder_request_id else None,
            TransferId(transfer_id) if transfer_id else None,
            reads=reads,
            binding=binding,
        )
        self.engine(self.decode, WantBegun(RequestId(request_id), intent))

    def want_pull(
        self,
        request_id: str,
        holder_request_id: str,
        blocks: BlockGroups,
        binding: int | None = None,
    ) -> None:
        """D accepts a request that it READs; the params come from P's answer."""
        self.want(request_id, self.pull_intent(holder_request_id, blocks, binding))

    def pull_intent(
        self, holder_request_id: str, blocks: BlockGroups, binding: int | None = None
    ) -> PullIntent:
        """What P's answer for a prompt asks of D."""
        hold_id = self._hold_ids[holder_request_id]
        return PullIntent(
            self.holder(),
            RequestId(holder_request_id),
            blocks,
            self._num_held[holder_request_id],
            hold_id,
            Incarnation(hold_id.split(":")[0]),
            None,
            continuation=self._continuations.get(holder_request_id),
            binding=binding,
        )

    def want(self, request_id: str, intent: PullIntent | PushIntent) -> None:
        """D accepts a request whose KV somebody holds."""
        self.engine(self.decode, WantBegun(RequestId(request_id), intent))

    def reserve(self, request_id: str, prompt: str, start: int, stop: int) -> bool:
        """D reserves blocks for what it misses; False if it has too few."""
        span = TokenSpan(start, stop)
        blocks = self.decode.take(request_id, span)
        if blocks is None:
            return False
        self.prompts[RequestId(request_id)] = (prompt, span, blocks)
        self.decode.given_back.discard(RequestId(request_id))
        self.engine(self.decode, BlocksReserved(RequestId(request_id), blocks, span))
        return True

    def recall(self, request_id: str) -> None:
        """D's engine wants the blocks back."""
        self.engine(self.decode, BlocksRecalled(RequestId(request_id)))

    def abort(self, side: Side, request_id: str) -> None:
        """The engine ends a request early."""
        prompt = self.computing.pop(request_id, None)
        blocks = None if prompt is None else prompt.blocks
        self.engine(side, RequestAborted(RequestId(request_id), blocks))

    def decline(self, request_id: str) -> None:
        """D needs nothing after all."""
        self.engine(self.decode, WantDeclined(RequestId(request_id)))

    def holder(self) -> HolderAddress:
        """P's coordinates as a router gives them."""
        address = self.prefill.address
        return HolderAddress(
            address.engine_id,
            address.host,
            address.port,
            self.prefill.shape.get("tp_size", 1),
            self.prefill.shape.get("pp_size", 1),
        )

    # What the world does.

    def deliver(self, item: Item) -> None:
        """Let one thing arrive."""
        self.items.remove(item)
        item.deliver()
        self.check()

    def deliver_all(self, limit: int = 10_000) -> None:
        """Let everything arrive, in order, and what follows from it."""
        for _ in range(limit):
            if not self.items:
                return
            self.deliver(self.items[0])
        raise AssertionError(f"no end of messages: {self.items[:5]}")

    def deliver_kind(self, *kinds: str) -> None:
        """Let everything of these kinds arrive that is in transit now."""
        for item in [each for each in self.items if each.kind in kinds]:
            if item in self.items:
                self.deliver(item)

    def drop(self, item: Item) -> None:
        """Lose one thing; an operation fails instead, as a transport must say how it ended."""
        self._lost_some = True
        self.items.remove(item)
        if item.fail is not None:
            item.fail()
        self.check()

    def duplicate(self, item: Item) -> None:
        """Let a message arrive once more, later."""
        assert item.fail is None
        self.items.append(Item(item.kind, item.sender, item.target, item.deliver))

    def advance(self, seconds: float) -> None:
        """Let time pass, stopping at every deadline on the way."""
        until = self.now + seconds
        while True:
            due = [at for at in self._deadlines() if at <= until]
            self.now = max(self.now, min(due, default=until))
            for side in self.sides.values():
                for rank in list(side.endpoints):
                    self._handle(side, rank, TimePassed())
            self.check()
            if not due:
                return

    def restart(self, side: Side) -> None:
        """The process dies and another takes its place at the same address."""
        old = {side.rank(rank) for rank in side.endpoints}
        incarnation = side.incarnation
        for item in [each for each in self.items if each.sender in old]:
            # What a dead process has sent may still be on its way, but its operations are over.
            if item.fail is not None:
                self.items.remove(item)
        side.start()
        if side is self.prefill:
            self.computing.clear()
        for item in [each for each in self.items if each.target in old and each.fail is not None]:
            self.items.remove(item)
            item.fail()
        self._lost[incarnation] = side.address
        self.check()

    def tell_of_lost_lives(self) -> None:
        """Everybody learns, by whatever sign, which lives are over."""
        for side in self.sides.values():
            for rank in list(side.endpoints):
                for incarnation, address in self._lost.items():
                    self._handle(side, rank, PeerLost(address, incarnation, "gone"))
        self.check()

    def settle(self) -> None:
        """No more faults: everything arrives, all deadlines pass. Whoever gives its blocks back
        meanwhile gets no others any more, and is ended."""
        for _ in range(200):
            self.deliver_all()
            for request_id in sorted(self.decode.given_back):
                self.abort(self.decode, request_id)
            self.tell_of_lost_lives()
            if all(
                endpoint.idle
                for side in self.sides.values()
                for endpoint in side.endpoints.values()
            ):
                return
            self.advance(10.0)
        raise AssertionError(
            "never idle: "
            + str({s.name: [e.gauges() for e in s.endpoints.values()] for s in self.sides.values()})
        )

    # Inside.

    def engine(self, side: Side, event: Event) -> None:
        """An engine's event reaches every rank."""
        for rank in list(side.endpoints):
            self._handle(side, rank, event)
        self.check()

    def _deadlines(self) -> Iterator[float]:
        for side in self.sides.values():
            for endpoint in side.endpoints.values():
                deadline = endpoint.next_deadline()
                if deadline is not None:
                    # A touch later, so that rounding does not stop time just before it.
                    yield (deadline - side.skew) / side.rate + 1e-6

    def _handle(self, side: Side, rank: Rank, event: Event) -> None:
        endpoint = side.endpoints[rank]
        for command in endpoint.handle(event, side.clock(self.now)):
            self._do(side, rank, command)
        endpoint.check()

    def _do(self, side: Side, rank: Rank, command) -> None:
        me = side.rank(rank)
        match command:
            case SendMessage(peer, message):
                self._send(me, peer, encode(message), "message")
            case SendNotification(peer, address, message):
                if self._side_of(peer) is None:
                    self._handle(side, rank, PeerLost(address, peer.incarnation, "gone"))
                else:
                    self._send(me, peer, encode(message), "notification")
            case Connect(address):
                self.items.append(
                    Item("handshake", me, address, lambda: self._shake(side, me, address))
                )
            case Probe(peer):
                self._probe(side, rank, peer)
            case PostWrite() | PostRead():
                self._post(side, rank, command)
            case TakeDigest():
                self._take_digest(side, rank, command)
            case Tell(report):
                self._report(side, rank, report)
            case Abandon() | Disconnect():
                pass

    def _send(self, me: PeerRank, peer: PeerRank, payload: bytes, kind: str) -> None:
        def arrive() -> None:
            side = self._side_of(peer)
            if side is not None:
                self._handle(side, peer.rank, MessageReceived(decode(payload, LIMITS)))

        self.items.append(Item(kind, me, peer, arrive, message=decode(payload, LIMITS)))

    def _probe(self, side: Side, rank: Rank, peer: PeerRank) -> None:
        """A look at the peer's process; lost, it finds it silent."""
        me = side.rank(rank)

        def tell(sign: Sign) -> None:
            if self._side_of(me) is not None:
                self._handle(side, rank, PeerProbed(peer, sign))

        def arrive() -> None:
            tell(Sign.GONE if self._side_of(peer) is None else Sign.RUNS)

        self.items.append(Item("probe", me, peer, arrive, lambda: tell(Sign.SILENT)))

    def _shake(self, side: Side, me: PeerRank, address: InstanceAddress) -> None:
        asked = self.sides[address.engine_id]
        if self._side_of(me) is not None and address == asked.address:
            self._handle(
                side,
                me.rank,
                PeerConnected(
                    address,
                    asked.incarnation,
                    asked.modes,
                    asked.geometries,
                    asked.gives_digests,
                ),
            )

    def _post(self, side: Side, rank: Rank, command: PostWrite | PostRead) -> None:
        me, other = side.rank(rank), self._side_of(command.peer)
        if other is None:
            self._handle(side, rank, PostRefused(command.operation_id, "peer is gone"))
            self._handle(side, rank, PeerLost(command.address, command.peer.incarnation, "gone"))
            return
        own, peer = side.caches[rank], other.caches[command.peer.rank]
        own_ids, peer_ids = command.own_block_ids, command.peer_block_ids
        writes, route = isinstance(command, PostWrite), command.route
        source, target = (own, peer) if writes else (peer, own)
        source_ids, target_ids = (own_ids, peer_ids) if writes else (peer_ids, own_ids)
        held = TokenSpan(0, command.num_held)
        from_group = (source[0].groups[route.source_group], source[1])
        to_group = (target[0].groups[route.target_group], target[1])
        try:
            pieces = bind(
                plan_mapping(from_group[0].geometry, to_group[0].geometry, route),
                from_group[0],
                to_group[0],
                block_run("source", source[0], route.source_group, source_ids, held),
                block_run("target", target[0], route.target_group, target_ids, command.span),
                command.moved,
                command.notice.layers if writes else None,
            )
        except MappingError as error:
            self._handle(side, rank, PostRefused(command.operation_id, str(error)))
            return

        if writes:
            self._check_tile(side, rank, command)

        def land() -> None:
            copy_pieces(pieces, from_group, to_group)
            if item.spoils:
                spoil(to_group[1], to_group[0].regions, *pieces.target_table[0, :2].tolist())
            if self._side_of(me) is None:
                return
            self._handle(side, rank, TransferCompleted(command.operation_id))
            if writes:
                self._send(me, command.peer, encode(command.notice), "notice")

        def fail() -> None:
            if self._side_of(me) is not None:
                self._handle(side, rank, TransferFailed(command.operation_id, "it broke"))

        touches = [(side.name, block) for group in own_ids for block in group]
        if writes:
            touches += [(other.name, block) for group in peer_ids for block in group]
        kind, notice = ("write", command.notice) if writes else ("read", None)
        item = Item(kind, me, command.peer, land, fail, tuple(touches), notice)
        self.items.append(item)
        self._handle(
            side,
            rank,
            TransferPosted(command.operation_id, len(pieces), pieces.num_bytes, 0.0, "test"),
        )

    def _take_digest(self, side: Side, rank: Rank, command: TakeDigest) -> None:
        """Of what the blocks hold when it arrives."""
        me, cache = side.rank(rank), side.caches[rank][0]

        def take() -> None:
            if self._side_of(me) is None:
                return
            group = command.group
            blocks = block_run("digest", cache, group, command.block_ids, command.held)
            cells = cells_of(
                cache.groups[group], blocks, command.share, command.integrity, command.seed
            )
            digester = digester_for(MemoryKind.DRAM, 0, cache.regions)
            loaded = digester.load(cells)
            sums = [
                digester.start(loaded, Parcel(number, 0, each.side.num_pieces)).value()
                for number, each in enumerate(cells)
            ]
            self._handle(side, rank, DigestTaken(command.operation_id, added(sums)))

        def refuse() -> None:
            if self._side_of(me) is not None:
                self._handle(side, rank, PostRefused(command.operation_id, "it broke"))

        self.items.append(Item("digest", me, me, take, refuse))

    def _check_tile(self, side: Side, rank: Rank, command: PostWrite) -> None:
        """S3: it is written, and was not posted before."""
        notice = command.notice
        name = self.prompts[RequestId(notice.request_id)][0]
        wrong = side.wrong_to_send(rank, self.content(name), command)
        assert not wrong, f"S3: {notice} is posted before it is written: {wrong[:3]}"
        for layer in notice.layers or command.route.layers:
            for position in range(command.moved.start, command.moved.stop):
                tile = (side.rank(rank), command.peer, notice.request_id, notice.route)
                cell = (*tile, notice.epoch, layer, position)
                assert cell not in self._sent, f"S3: {notice} is posted again"
                self._sent.add(cell)

    def _on_recalled(self, side: Side, rank: Rank, report) -> None:
        """Blocks are back when all ranks have let go; where some have received, all are to."""
        back = side.recalled.setdefault(report.request_id, set())
        assert rank not in back, f"S4: {report.request_id} is recalled twice"
        back.add(rank)
        if back == side.endpoints.keys():
            self._require_quiet(side, side.lent[report.request_id])
            side.free += side.lent.pop(report.request_id)
            del side.recalled[report.request_id]
            side.given_back.add(report.request_id)
        elif side.is_over(report.request_id):
            self._end(side, report.request_id)

    def _end(self, side: Side, request_id: RequestId) -> None:
        back = side.recalled.pop(request_id, set())
        received = any(Outcome.RECEIVED in told for told in side.reports[request_id].values())
        failed = Outcome.RECEIVE_FAILED in side.outcomes(request_id)
        if back and received and not failed:
            _, span, blocks = self.prompts[request_id]
            for other in back:
                self._handle(side, other, BlocksReserved(request_id, blocks, span))
        else:
            self._require_quiet(side, side.lent.get(request_id, []))
            side.free += side.lent.pop(request_id, [])

    def _require_quiet(self, side: Side, blocks: list[int]) -> None:
        """S1: nothing in transit touches them any more."""
        for item in self.items:
            touched = {block for name, block in item.touches if name == side.name} & set(blocks)
            assert not touched, f"S1: {item} touches {touched}, which are given back"

    def _report(self, side: Side, rank: Rank, report) -> None:
        if report.outcome is Outcome.HELD:
            side.held.add(report.request_id)
            return
        if report.outcome is Outcome.RECALLED:
            self._on_recalled(side, rank, report)
            return
        told = side.reports.setdefault(report.request_id, {}).setdefault(rank, [])
        told.append(report.outcome)
        if report.reason:
            side.reasons.setdefault(report.request_id, set()).add(report.reason)
        terminal = [outcome for outcome in told if outcome in TERMINAL]
        assert len(terminal) <= 1, f"S4: {report.request_id} at {side.name} got {told}"
        assert told.count(Outcome.RELEASED) <= 1, f"S4: {report.request_id} released twice"
        if report.outcome is Outcome.RECEIVED:
            prompt, span, blocks = self.prompts[report.request_id]
            wrong = side.wrong(rank, self.content(prompt), blocks, span)
            assert not wrong, f"S2: {report.request_id} received, but {wrong[:3]}"
            # It may have been on a message that got lost; D does without it then.
            lost = self._lost_some and report.continuation is None
            assert lost or report.continuation == self._continuations.get(prompt), f"S2: {report}"
        if side.is_over(report.request_id):
            self._end(side, report.request_id)

    def _side_of(self, peer: PeerRank) -> Side | None:
        """The side that lives this life, if any does."""
        side = self.sides[peer.engine_id]
        return side if side.incarnation == peer.incarnation else None

    def check(self) -> None:
        """S1: what is in flight touches no free block."""
        free = {(side.name, block) for side in self.sides.values() for block in side.free}
        for item in self.items:
            if self._side_of(item.sender) is not None:
                touched = free.intersection(item.touches)
                assert not touched, f"S1: {item} is in flight over free blocks {touched}"


def spoil(buffers: Sequence[Buffer], regions: Sequence[Region], address: int, size: int) -> None:
    """Flip one bit in the middle of a range of addresses."""
    for buffer, region in zip(buffers, regions, strict=True):
        at = address + size // 2 - region.address
        if 0 <= at < region.size_bytes:
            buffer[at] ^= 1
            return
    raise AssertionError(f"{address:#x} is in no region")


def _address(name: str, port: int) -> InstanceAddress:
    return InstanceAddress(EngineId(name), "host", port)
