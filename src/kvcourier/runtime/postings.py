"""Posted operations of one rank: which path each takes, and what became of it.

Decides between the direct and the packed path, and falls back to the direct one where a peer has
no staging to spare. Refuses to know why an operation is wanted. Used on the courier's thread only.
"""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvcourier.config import PathPolicy, TransferPath
from kvcourier.core.commands import PostRead, PostWrite
from kvcourier.core.events import (
    Event,
    OperationId,
    PeerLost,
    PostRefused,
    TransferCompleted,
    TransferFailed,
    TransferPosted,
)
from kvcourier.core.handshake import StagingOffer
from kvcourier.core.messages import GrantSlots, RefuseStream, encode
from kvcourier.core.packing import NO_STAGING
from kvcourier.errors import MappingError, PostFailed, RemoteProtocolError
from kvcourier.errors import PeerLost as PeerLostError
from kvcourier.ids import PeerRank
from kvcourier.runtime.attention import NUDGE_AGAIN_S
from kvcourier.runtime.contacts import Contact, Contacts
from kvcourier.runtime.metrics import CourierObserver
from kvcourier.runtime.packed_sender import PackedSender, StreamResult
from kvcourier.runtime.path_choice import PathChooser
from kvcourier.transport.interface import (
    Operation,
    TransferHandle,
    TransferState,
    Transport,
)

_log = logging.getLogger(__name__)
Command = PostWrite | PostRead
_REFUSALS = (MappingError, PostFailed, RemoteProtocolError, PeerLostError)


@dataclass(frozen=True, slots=True)
class _Flight:
    """One direct operation as the transport knows it."""

    command: Command
    handle: TransferHandle
    operation: Operation
    num_pieces: int
    num_bytes: int
    posted_at: float
    post_s: float


class Postings:
    """Everything in flight that this rank has posted."""

    def __init__(
        self,
        contacts: Contacts,
        transport: Transport,
        packed: PackedSender,
        policy: PathPolicy,
        observer: CourierObserver,
        nudge: Callable[[PeerRank], None],
        clock: Callable[[], float],
    ) -> None:
        self._contacts = contacts
        self._transport = transport
        self._packed = packed
        self._policy = policy
        self._observer = observer
        self._nudge = nudge
        self._clock = clock
        self._flights: dict[OperationId, _Flight] = {}
        self._nudged_at = -math.inf
        self._choosers: dict[PeerRank, PathChooser] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._flights) or self.streaming

    @property
    def streaming(self) -> bool:
        """Whether something goes packed at the moment."""
        return self._packed.busy

    @property
    def num_slots_used(self) -> int:
        """Staging slots that something goes packed from; from any thread."""
        return self._packed.num_slots_used

    def next_deadline(self) -> float | None:
        """When `poll` is due at the latest."""
        return self._packed.next_deadline()

    def start(self, command: Command) -> list[Event]:
        """Post it; the answer to the core's command, and a lost peer if that was the reason."""
        try:
            contact = self._contacts.get(command.address, command.peer)
            if isinstance(command, PostWrite):
                return self._start_write(command, contact)
            return self._post(command, contact, {})
        except _REFUSALS as error:
            return self._refused(command, error)

    def prefers_write(self, command: PostRead, staging: StagingOffer) -> bool:
        """Whether what this would READ comes faster packed, into our staging memory."""
        if self._policy is PathPolicy.DIRECT:
            return False
        try:
            contact = self._contacts.get(command.address, command.peer)
            if not contact.packs(command.peer.rank):
                return False
            mapping = contact.mapping(command.peer.rank)
            pieces, num_bytes = mapping.estimate_pieces(command), mapping.num_bytes(command)
        except _REFUSALS:
            # The READ will say what is wrong with it.
            return False
        num_parcels = -(-num_bytes // staging.slot_bytes)
        path, _ = self._chooser(command).choose(pieces, num_parcels, num_bytes)
        return path is TransferPath.PACKED

    def abandon(self, operation_id: OperationId) -> None:
        """Stop polling an operation."""
        flight = self._flights.pop(operation_id, None)
        if flight is not None:
            self._transport.release(flight.handle)
        else:
            self._packed.abandon(operation_id)

    def on_message(self, message: GrantSlots | RefuseStream) -> None:
        """A receiver's answer to a packed WRITE."""
        self._packed.on_message(message)

    def lose(self, peer: PeerRank, reason: str) -> None:
        """A peer's life is over."""
        self._choosers.pop(peer, None)
        self._packed.lose(peer, self._contacts.agent_name(peer), reason)

    def poll(self) -> list[Event]:
        """What has ended since the last time."""
        events: list[Event] = []
        if self._flights and self._clock() >= self._nudged_at + NUDGE_AGAIN_S:
            self._nudged_at = self._clock()
            for peer in {flight.command.peer for flight in self._flights.values()}:
                self._nudge(peer)
        for operation_id, flight in list(self._flights.items()):
            events += self._poll_flight(operation_id, flight)
        for result in self._packed.poll():
            events += self._on_stream_ended(result)
        return events

    # Direct.

    def _post(
        self, command: Command, contact: Contact, estimates_s: dict[TransferPath, float]
    ) -> list[Event]:
        rank = command.peer.rank
        agent, mapping = contact.agent(rank), contact.mapping(rank)
        notice = b""
        if isinstance(command, PostWrite):
            operation, sides = Operation.WRITE, mapping.for_write(command)
            notice = encode(command.notice)
        else:
            operation, sides = Operation.READ, mapping.for_read(command)
        started = self._clock()
        handle = self._transport.post(
            operation, agent, local=sides.local, remote=sides.remote, notice=notice
        )
        seconds = self._clock() - started
        flight = _Flight(
            command, handle, operation, len(sides.local), sides.num_bytes, started, seconds
        )
        self._flights[command.operation_id] = flight
        self._nudge(command.peer)
        self._observer.posted(operation, seconds, flight.num_bytes, flight.num_pieces)
        return [
            TransferPosted(
                command.operation_id,
                flight.num_pieces,
                flight.num_bytes,
                seconds,
                threading.current_thread().name,
                TransferPath.DIRECT,
                estimates_s,
            )
        ]

    def _refused(self, command: Command, error: Exception) -> list[Event]:
        self._observer.failed(_operation(command))
        # Why comes before what follows from it: the want's reason is that its peer is gone.
        is_lost = isinstance(error, PeerLostError)
        events: list[Event] = [_lost(command, str(error))] if is_lost else []
        return [*events, PostRefused(command.operation_id, str(error))]

    def _poll_flight(self, operation_id: OperationId, flight: _Flight) -> list[Event]:
        status = self._transport.poll(flight.handle)
        if status.state is TransferState.IN_FLIGHT:
            return []
        del self._flights[operation_id]
        self._transport.release(flight.handle)
        if status.state is TransferState.DONE:
            seconds = self._clock() - flight.posted_at
            self._observer.completed(flight.operation, seconds)
            self._chooser(flight.command).learn_direct(
                flight.num_pieces, flight.num_bytes, flight.post_s, seconds
            )
            return [TransferCompleted(operation_id)]
        self._observer.failed(flight.operation)
        return _failure(flight.command, status.reason, status.peer_lost)

    # Packed.

    def _start_write(self, command: PostWrite, contact: Contact) -> list[Event]:
        staging = contact.staging(command.peer.rank)
        if not self._packed.can_send or staging is None or self._policy is PathPolicy.DIRECT:
            return self._post(command, contact, {})
        mapping = contact.mapping(command.peer.rank)
        segments = mapping.pack_source(command)
        num_bytes = sum(segment.num_bytes for segment in segments)
        try:
            parts = self._packed.parcels(segments, staging)
        except MappingError:
            # A piece that is larger than a slot gains nothing by packing.
            return self._post(command, contact, {})
        path, estimates_s = self._chooser(command).choose(
            mapping.estimate_pieces(command), len(parts), num_bytes
        )
        if path is TransferPath.DIRECT and not _is_anew(command):
            return self._post(command, contact, estimates_s)
        began = self._clock()
        agent = contact.agent(command.peer.rank)
        self._packed.open(command, agent, staging, segments, parts)
        return [
            TransferPosted(
                command.operation_id,
                len(parts),
                num_bytes,
                self._clock() - began,
                threading.current_thread().name,
                TransferPath.PACKED,
                estimates_s,
            )
        ]

    def _on_stream_ended(self, result: StreamResult) -> list[Event]:
        command = result.command
        if result.reason is None:
            self._observer.posted(
                Operation.WRITE, result.post_s, result.num_bytes, result.num_parcels
            )
            self._observer.completed(Operation.WRITE, result.seconds)
            if result.alone:
                self._chooser(command).learn_packed(
                    result.num_parcels, result.num_bytes, result.seconds
                )
            return [TransferCompleted(command.operation_id)]
        if result.reason.startswith(NO_STAGING) and not _is_anew(command):
            _log.info("%s: %s; the direct path is taken", command.peer, result.reason)
            try:
                contact = self._contacts.get(command.address, command.peer)
                return self._post(command, contact, {})
            except _REFUSALS as error:
                self._observer.failed(Operation.WRITE)
                lost = isinstance(error, PeerLostError)
                return _failure(command, str(error), lost)
        self._observer.failed(Operation.WRITE)
        return _failure(command, result.reason, result.peer_lost)

    def _chooser(self, command: Command) -> PathChooser:
        peer = command.peer
        if peer not in self._choosers:
            memory = self._contacts.memory
            self._choosers[peer] = PathChooser(self._policy, memory)
        return self._choosers[peer]


def _is_anew(command: PostWrite) -> bool:
    """Whether the prompt was computed anew since something of it was sent.

    Parcels of before may still be on their way into the blocks over there. The peer drops them when
    a stream is opened, of which a direct WRITE says nothing.
    """
    return command.notice.epoch > 0


def _operation(command: Command) -> Operation:
    return Operation.WRITE if isinstance(command, PostWrite) else Operation.READ


def _failure(command: Command, reason: str, peer_lost: bool) -> list[Event]:
    events: list[Event] = [_lost(command, reason)] if peer_lost else []
    return [*events, TransferFailed(command.operation_id, reason)]


def _lost(command: Command, reason: str) -> PeerLost:
    peer = command.peer
    return PeerLost(command.address, peer.incarnation, f"{peer} is gone: {reason}")
