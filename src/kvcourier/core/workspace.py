"""What the two sides of an endpoint share.

Decides nothing about transfers: it holds the endpoint's identity and settings, the clock value of
the event in hand, the tables both sides use, and the commands that have piled up. Refuses to know
holds and wants.
"""

import enum
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvcourier.allow_list import AllowList
from kvcourier.config import Limits, Timing, TransferMode
from kvcourier.core.commands import Command, Connect, Disconnect, SendMessage, Tell
from kvcourier.core.deadlines import Deadlines
from kvcourier.core.events import BlockGroups
from kvcourier.core.flights import FlightTable
from kvcourier.core.messages import AnyMessage, SenderFields, sender_fields
from kvcourier.core.outcomes import Cause, Outcome, Report, Side
from kvcourier.core.peers import Peer, PeerState, PeerTable
from kvcourier.core.stories import StoryBook
from kvcourier.ids import InstanceAddress, PeerRank, Rank, RequestId
from kvcourier.layout.geometry import GroupGeometries


class Counted(enum.StrEnum):
    """What an endpoint counts; the runtime shows each as a metric."""

    LEASES_EXPIRED = "leases_expired"
    HISTORIES_EXPIRED = "histories_expired"
    REGISTRATIONS_EXPIRED = "registrations_expired"
    REGISTRATIONS_REFUSED = "registrations_refused"
    REGISTRATIONS_RESENT = "registrations_resent"
    REPAIRS = "repairs"
    STALE_REFUSED = "stale_refused"
    INTEGRITY_FAILURES = "integrity_failures"
    INTEGRITY_CHECKS = "integrity_checks"
    REFERENCES_REFUSED = "references_refused"
    MESSAGES_IGNORED = "messages_ignored"
    QUARANTINES_EXPIRED = "quarantines_expired"
    PEERS_LOST = "peers_lost"
    PEERS_SILENT = "peers_silent"
    PEERS_PROBED = "peers_probed"
    PEERS_NOT_ALLOWED = "peers_not_allowed"


class TimerKind(enum.Enum):
    """What a deadline is for; with a name, it is one timer."""

    CONNECT = "connect"
    PEER_IDLE = "peer_idle"
    HEARTBEAT = "heartbeat"
    ASK = "ask"
    WATCH = "watch"
    REGISTRATION = "registration"
    DELIVERY = "delivery"
    HOLD_QUARANTINE = "hold_quarantine"
    WANT = "want"
    RESEND = "resend"


Owner = tuple[str, RequestId, PeerRank]
"""Whose operation: which side, its request, and the rank at the other end."""


class Workspace:
    """State shared by `Holder` and `Wanter`; `now` is set by the endpoint for each event."""

    def __init__(
        self,
        me: PeerRank,
        geometries: Mapping[Rank, GroupGeometries],
        timing: Timing,
        limits: Limits,
        allowed_peers: AllowList | None = None,
    ) -> None:
        self.me = me
        self.sender: SenderFields = sender_fields(me)
        self.geometries = geometries
        self.timing = timing
        self.limits = limits
        self._allowed_peers = allowed_peers
        self.now = 0.0
        self.timers: Deadlines[tuple[TimerKind, Any]] = Deadlines()
        self.flights: FlightTable[Owner] = FlightTable()
        self.peers = PeerTable(limits.max_peers)
        self.stories = StoryBook(limits)
        self.counts: Counter[Counted] = Counter()
        self._commands: list[Command] = []

    def emit(self, command: Command) -> None:
        """Ask the driver to do something, after all asked so far."""
        self._commands.append(command)

    def take_commands(self) -> list[Command]:
        """Everything asked since the last time."""
        commands, self._commands = self._commands, []
        return commands

    def tell(
        self,
        side: Side,
        request_id: RequestId,
        outcome: Outcome,
        reason: str = "",
        block_ids: BlockGroups = (),
        continuation: str | None = None,
        cause: Cause | None = None,
    ) -> None:
        """Report to the engine."""
        report = Report(request_id, outcome, reason, side, block_ids, continuation, cause)
        self.emit(Tell(report))
        details: dict[str, Any] = {"reason": reason} if reason else {}
        if continuation is not None:
            details["continuation"] = continuation
        self.note(request_id, outcome.value, **details)

    def send(self, peer: PeerRank, message: AnyMessage) -> None:
        """Send over the side channel."""
        self.emit(SendMessage(peer, message))

    def note(self, request_id: RequestId, what: str, **details: Any) -> None:
        """Add to a request's story."""
        self.stories.note(request_id, self.now, what, **details)

    def set_timer(self, kind: TimerKind, name: Any, after_s: float) -> None:
        """Have the endpoint act on this name after a while, in place of any earlier time."""
        self.timers.set((kind, name), self.now + after_s)

    def cancel_timer(self, kind: TimerKind, name: Any) -> None:
        """No need to act on this name any more."""
        self.timers.cancel((kind, name))

    def use_peer(
        self, address: InstanceAddress, user: RequestId, mode: TransferMode
    ) -> Peer | None:
        """The peer at this address, connecting if it is new; None if it is not allowed, or the
        table is full. Nothing else begins a connection."""
        peer = self.peers.get(address)
        if peer is None:
            if not self.allows(address):
                return None
            peer = self.peers.add(address)
            if peer is None:
                return None
            self.emit(Connect(address, mode))
            self.set_timer(TimerKind.CONNECT, address, self.timing.handshake_timeout_s)
        peer.users.add(user)
        self.cancel_timer(TimerKind.PEER_IDLE, address)
        return peer

    def allows(self, address: InstanceAddress) -> bool:
        """Whether we may have to do with whoever listens there."""
        allowed = self._allowed_peers
        return allowed is None or allowed.allows(address.host, address.port)

    def refuse_peer(self, address: InstanceAddress) -> str:
        """Why `use_peer` gives none, counted."""
        if self.allows(address):
            return "too many peers"
        self.counts[Counted.PEERS_NOT_ALLOWED] += 1
        return f"{address} is not among the peers that {self.me.engine_id} allows"

    def watch(self, address: InstanceAddress) -> None:
        """Some transfer waits for this peer from now on; see `core.watch`."""
        peer = self.peers.get(address)
        if peer is not None and peer.was_reset:
            self.set_timer(TimerKind.WATCH, address, 0.0)
        elif (TimerKind.WATCH, address) not in self.timers:
            self.set_timer(TimerKind.WATCH, address, self.timing.beat_s)

    def shake_again(self, address: InstanceAddress, mode: TransferMode) -> None:
        """Ask a connected peer who it is; whoever needs the answer has a deadline of its own."""
        self.emit(Connect(address, mode))

    def leave_peer(self, address: InstanceAddress, user: RequestId) -> None:
        """This request needs the peer no more; an unused peer is forgotten after a while."""
        peer = self.peers.get(address)
        if peer is None:
            return
        peer.users.discard(user)
        if not peer.users and peer.state is PeerState.CONNECTED:
            self.set_timer(TimerKind.PEER_IDLE, address, self.timing.peer_idle_s)

    def forget_peer(self, address: InstanceAddress) -> Peer | None:
        """Drop the entry with its timers and have the driver drop the connection."""
        for kind in (TimerKind.CONNECT, TimerKind.PEER_IDLE, TimerKind.HEARTBEAT):
            self.cancel_timer(kind, address)
        peer = self.peers.remove(address)
        if peer is not None:
            self.emit(Disconnect(address))
        return peer
