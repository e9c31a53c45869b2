"""One rank's part in all its transfers: events in, commands out.

Decides which side an event belongs to, when time-outs are due and when to send heartbeats.
Refuses to know threads, sockets and clocks: the same endpoint runs under the courier, under
tests and under a simulator.

Use: `commands = endpoint.handle(event, now)`, do them in order, answer each that asks for an
answer; call again with `TimePassed` at `next_deadline()`. `now` is any clock that never goes
back; only differences matter.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcourier.allow_list import AllowList
from kvcourier.config import Integrity, Limits, Timing
from kvcourier.core.commands import Command
from kvcourier.core.events import (
    BlockGroups,
    BlocksRecalled,
    BlocksReserved,
    ConnectFailed,
    DigestTaken,
    EndpointClosing,
    Event,
    HoldBegun,
    MessageReceived,
    OperationId,
    PeerConnected,
    PeerLost,
    PeerProbed,
    PeerReset,
    PostRefused,
    PrefillAdvanced,
    PrefillFinished,
    PrefillRolledBack,
    RequestAborted,
    TimePassed,
    TransferCompleted,
    TransferFailed,
    TransferPosted,
    WantBegun,
    WantDeclined,
)
from kvcourier.core.holder import Holder
from kvcourier.core.lifecycle import HoldState, WantState
from kvcourier.core.messages import (
    Beat,
    Cancel,
    Collected,
    CoreMessage,
    Digest,
    Landed,
    Register,
    Renew,
    Renewed,
)
from kvcourier.core.peers import Peer, PeerState
from kvcourier.core.receipts import WritePreference
from kvcourier.core.stories import StoryEntry
from kvcourier.core.wanter import Wanter
from kvcourier.core.wants import WriteTarget
from kvcourier.core.watch import Watch
from kvcourier.core.witness import WITNESS
from kvcourier.core.workspace import Counted, TimerKind, Workspace
from kvcourier.errors import LocalProtocolError, MappingError
from kvcourier.ids import InstanceAddress, PeerRank, Rank, RequestId
from kvcourier.layout.geometry import GroupGeometries


class Endpoint:
    """Holder and wanter of one rank, and what they share.

    Args:
        me: this rank of this life of this instance.
        address: where our instance's handshake server listens, told to peers.
        geometries: cache groups of every rank of our instance.
        timing: every duration of the protocol.
        limits: bounds on what peers may send and make us keep.
        prefers_write: whether what a READ would move should rather be written by its holder.
        allowed_peers: instances that we may have to do with; None: all.
        integrity: how much of what is received is compared with its source.
    """

    def __init__(
        self,
        me: PeerRank,
        address: InstanceAddress,
        geometries: Mapping[Rank, GroupGeometries],
        timing: Timing,
        limits: Limits,
        prefers_write: WritePreference = lambda command: False,
        allowed_peers: AllowList | None = None,
        integrity: Integrity = Integrity.OFF,
    ) -> None:
        self.me = me
        self.quarantine_limit_s = timing.quarantine_limit_s
        self._space = Workspace(me, geometries, timing, limits, allowed_peers)
        self._holder = Holder(self._space)
        self._wanter = Wanter(self._space, address, prefers_write, integrity)
        self._watch = Watch(self._space, self._needed_at, self._on_peer_silent)
        self._timer_handlers: Mapping[TimerKind, Callable[[Any], object]] = {
            **self._holder.on_timer,
            **self._wanter.on_timer,
            **self._watch.on_timer,
            TimerKind.CONNECT: self._on_connect_overdue,
            TimerKind.PEER_IDLE: self._space.forget_peer,
        }

    # The four verbs.

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; returns what to do about it, in order.

        Deadlines that are due come first, so that what arrives late is late.

        Raises:
            LocalProtocolError: the driver or the engine broke the contract.
        """
        self._space.now = now
        self._holder.expire_leases()
        self._act_on_due_timers()
        self._dispatch(event)
        # A beat asked for by this event goes out with it: the proof of a READ starts here.
        self._act_on_due_timers()
        return self._space.take_commands()

    def next_deadline(self) -> float | None:
        """When `handle(TimePassed(), ...)` is due at the latest; None if nothing waits."""
        deadlines = (self._space.timers.next(), self._holder.next_expiry())
        return min((at for at in deadlines if at is not None), default=None)

    def story(self, name: str) -> list[StoryEntry] | None:
        """What happened to a transfer, by request id or transfer id."""
        return self._space.stories.story(name)

    def check(self) -> None:
        """Assert the endpoint's own invariants; for tests and for idle moments in production."""
        space = self._space
        for hold in self._holder.holds:
            assert hold.state is not HoldState.RELEASED
            leased = self._holder.next_expiry() is not None
            assert hold.state is not HoldState.HELD or leased, f"{hold.request_id}: no lease"
        for want in self._wanter.wants:
            waits_by_time = want.state is not WantState.QUEUED
            timed = (TimerKind.WANT, want.request_id) in space.timers
            assert timed or not waits_by_time, f"{want.request_id} waits in {want.state} for ever"
        if self.idle:
            assert not len(space.flights), "operations in flight without an owner"

    # Questions.

    @property
    def idle(self) -> bool:
        """Whether there is no hold, no want and no waiting registration."""
        waiting = self._holder.registrations.num_waiting
        return not (self._holder.holds or self._wanter.wants or waiting)

    def is_awaited(self, request_id: RequestId) -> bool:
        """Whether somebody has registered for this prompt; may be asked from any thread."""
        return self._holder.is_awaited(request_id)

    def partners(self, address: InstanceAddress) -> frozenset[Rank]:
        """Ranks of a connected peer that we move bytes to or from."""
        peer = self._space.peers.get(address)
        if peer is None:
            return frozenset()
        return frozenset(peer.routes_to_us) | frozenset(peer.routes_from_us)

    def write_target(self, message: Landed) -> WriteTarget | None:
        """Where a tile that a peer announces goes; None unless all of it is expected now.

        One of a newer epoch than before voids what has landed of the older ones.
        """
        return self._wanter.answers.write_target(message)

    @property
    def counts(self) -> Mapping[Counted, int]:
        """Everything counted so far."""
        return self._space.counts

    def gauges(self) -> dict[str, int]:
        """Sizes of the tables, by name."""
        holds, wants = self._holder.holds, self._wanter.wants
        quarantined = [hold.block_ids for hold in holds if hold.state is HoldState.QUARANTINED]
        quarantined += [want.block_ids for want in wants if want.state is WantState.QUARANTINED]
        return {
            "holds": len(holds),
            "wants": len(wants),
            "waiting_registrations": self._holder.registrations.num_waiting,
            "operations_in_flight": len(self._space.flights),
            "peers": len(self._space.peers),
            "watched_peers": len(self._watch),
            "quarantined_blocks": sum(len(group) for groups in quarantined for group in groups),
            "quarantined_bytes": sum(map(self._bytes_of, quarantined)),
        }

    def _bytes_of(self, block_ids: BlockGroups) -> int:
        """How much of this rank's memory these blocks are."""
        groups = self._space.geometries[self.me.rank]
        return sum(
            len(group) * geometry.block_bytes_of_all_layers
            for group, geometry in zip(block_ids, groups, strict=False)
        )

    # Dispatch.

    def _act_on_due_timers(self) -> None:
        timers = self._space.timers
        while (timer := timers.pop_due(self._space.now)) is not None:
            kind, name = timer
            self._timer_handlers[kind](name)

    def _dispatch(self, event: Event) -> None:
        match event:
            case TimePassed():
                pass
            case HoldBegun():
                self._holder.begin(event)
            case PrefillAdvanced():
                self._holder.advance_prefill(event)
            case PrefillRolledBack(request_id):
                self._holder.roll_back(request_id)
            case PrefillFinished():
                self._holder.finish_prefill(event)
            case WantBegun():
                self._wanter.begin(event)
            case BlocksReserved():
                self._wanter.reserve(event)
            case BlocksRecalled(request_id):
                self._wanter.recall(request_id)
            case WantDeclined(request_id):
                self._wanter.decline(request_id)
            case RequestAborted(request_id, block_ids):
                if not self._holder.abort(request_id, block_ids):
                    self._wanter.abort(request_id)
            case MessageReceived(message):
                self._on_message(message)
            case PeerConnected():
                self._on_peer_connected(event)
            case ConnectFailed(address, reason):
                self._on_connect_failed(address, reason)
            case PeerLost():
                self._on_peer_lost(event)
            case PeerProbed(peer, sign):
                self._watch.on_probed(peer, sign)
            case EndpointClosing():
                self._holder.close()
                self._wanter.close()
            case PeerReset(peer):
                self._watch.on_reset(peer)
            case TransferPosted():
                self._on_posted(event)
            case PostRefused(operation_id, reason) | TransferFailed(operation_id, reason):
                self._on_operation_ended(operation_id, reason)
            case TransferCompleted(operation_id):
                self._on_operation_ended(operation_id, None)
            case DigestTaken(operation_id, digest):
                self._on_digest_taken(operation_id, digest)

    def _on_message(self, message: CoreMessage) -> None:
        self._watch.heard(message.sender.peer())
        match message:
            case Register():
                self._replace_if_restarted(message)
                self._holder.registrations.on_register(message)
            case Cancel():
                self._holder.on_cancel(message)
            case Collected():
                self._holder.on_collected(message)
            case Digest():
                self._holder.on_digest(message)
            case Renew():
                self._holder.renewals.on_renew(message)
            case Renewed():
                self._wanter.heartbeats.on_renewed(message)
            case Beat():
                self._watch.on_beat(message)
            case _:
                self._wanter.answers.take(message)

    # Peers.

    def _on_peer_connected(self, event: PeerConnected) -> None:
        space = self._space
        peer = space.peers.get(event.address)
        if peer is not None and peer.incarnation not in (None, event.incarnation):
            self._on_peer_replaced(peer)
            peer = space.peers.get(event.address)
        if peer is None:
            return
        if peer.state is PeerState.CONNECTING:
            space.cancel_timer(TimerKind.CONNECT, event.address)
            try:
                peer.connected(
                    event.incarnation,
                    event.modes,
                    event.geometries,
                    space.geometries,
                    space.me.rank,
                )
                peer.gives_digests = event.gives_digests
            except MappingError as error:
                self._on_connect_failed(event.address, str(error))
                return
            if not peer.users:
                space.set_timer(TimerKind.PEER_IDLE, event.address, space.timing.peer_idle_s)
        self._holder.on_peer_connected(peer)
        self._wanter.on_peer_connected(peer)

    def _on_peer_replaced(self, peer: Peer) -> None:
        """Another life answers at a connected peer's address: the old one is over.

        Who waits for a connection keeps waiting, now for the new one, which has just answered.
        """
        assert peer.incarnation is not None
        address, users = peer.address, set(peer.users)
        self._space.counts[Counted.PEERS_LOST] += 1
        self._space.peers.remove(address)
        successor = self._space.peers.add(address)
        reason = f"{address} was restarted"
        self._holder.on_peer_lost(address, peer.incarnation, reason)
        self._wanter.on_peer_lost(address, reason)
        if successor is not None:
            successor.users |= users

    def _on_connect_failed(self, address: InstanceAddress, reason: str) -> None:
        peer = self._space.peers.get(address)
        if peer is None:
            return
        if peer.state is PeerState.CONNECTED:
            # Only a second handshake failed; what is connected stays.
            self._wanter.on_peer_failed(address, reason)
            return
        self._space.forget_peer(address)
        self._holder.on_peer_failed(address, reason)
        self._wanter.on_peer_failed(address, reason)

    def _on_connect_overdue(self, address: InstanceAddress) -> None:
        self._on_connect_failed(address, f"no answer from {address} to the handshake in time")

    def _on_peer_lost(self, event: PeerLost) -> None:
        peer = self._space.peers.get(event.address)
        if peer is None or peer.incarnation != event.incarnation:
            return
        self._space.counts[Counted.PEERS_LOST] += 1
        self._space.forget_peer(event.address)
        self._holder.on_peer_lost(event.address, event.incarnation, event.reason)
        self._wanter.on_peer_lost(event.address, event.reason)

    def _on_peer_silent(self, address: InstanceAddress, reason: str) -> None:
        """Nobody waits for it any longer, but what it may touch stays out of use."""
        self._holder.on_peer_silent(address, reason)
        self._wanter.on_peer_silent(address, reason)

    def _needed_at(self, address: InstanceAddress) -> set[PeerRank]:
        """Ranks of a connected peer, in its present life, that a transfer waits for."""
        peer = self._space.peers.get(address)
        if peer is None or peer.state is not PeerState.CONNECTED:
            return set()
        needed = self._holder.needed_at(address) | self._wanter.needed_at(address)
        return {rank for rank in needed if rank.incarnation == peer.incarnation}

    def _replace_if_restarted(self, message: Register) -> None:
        """A registration from a new life at a known address means that the old one is over."""
        sender = message.sender.peer()
        address = InstanceAddress(sender.engine_id, message.decode_host, message.decode_port)
        peer = self._space.peers.get(address)
        if peer is not None and peer.incarnation not in (None, sender.incarnation):
            assert peer.incarnation is not None
            reason = f"{address} was restarted"
            self._on_peer_lost(PeerLost(address, peer.incarnation, reason))

    # Operations.

    def _on_posted(self, event: TransferPosted) -> None:
        owner = self._space.flights.owner(event.operation_id)
        if owner is None:
            return
        side, request_id, peer = owner
        self._space.note(
            request_id,
            "posted",
            id=event.operation_id,
            operation="WRITE" if side == "hold" else "READ",
            peer=str(peer),
            pieces=event.num_pieces,
            bytes=event.num_bytes,
            post_s=event.seconds,
            posting_thread=event.thread,
            path=event.path.value,
            **{f"{path}_estimate_s": round(s, 6) for path, s in event.estimates_s.items()},
        )

    def _on_operation_ended(self, operation_id: OperationId, reason: str | None) -> None:
        if self._space.flights.owner(operation_id) is None:
            # Abandoned before: its answer was already on the way.
            return
        owner = self._space.flights.land(operation_id)
        match owner[0]:
            case "hold":
                self._note_end(owner[1], operation_id, reason)
                self._holder.on_landed(owner, reason)
            case "want":
                self._note_end(owner[1], operation_id, reason)
                self._wanter.on_operation_ended(owner, reason)
            case _ if reason is None:
                raise LocalProtocolError(f"operation {operation_id}: a digest was expected")
            case witness if witness == WITNESS:
                self._holder.witness.on_refused(owner, reason)
            case _:
                self._wanter.on_digest_refused(owner, reason)

    def _note_end(
        self, request_id: RequestId, operation_id: OperationId, reason: str | None
    ) -> None:
        if reason is None:
            self._space.note(request_id, "completed", id=operation_id)
        else:
            self._space.note(request_id, "operation_failed", id=operation_id, reason=reason)

    def _on_digest_taken(self, operation_id: OperationId, digest: int) -> None:
        if self._space.flights.owner(operation_id) is None:
            # Dropped before: it was already on the way.
            return
        owner = self._space.flights.land(operation_id)
        if owner[0] == WITNESS:
            self._holder.witness.on_taken(owner, operation_id, digest)
        else:
            self._wanter.on_digest_taken(owner, operation_id, digest)
