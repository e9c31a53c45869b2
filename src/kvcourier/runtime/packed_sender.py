"""Sending packed: gathers blocks into staging slots and writes each slot in one piece.

Decides nothing about slots, which `core.packing.Sender` does; it turns its actions into gathers,
WRITEs and messages, and their ends back into its events. Used on the courier's thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvcourier.core.commands import PostWrite
from kvcourier.core.events import OperationId
from kvcourier.core.handshake import StagingOffer
from kvcourier.core.messages import (
    CloseStream,
    GrantSlots,
    OpenStream,
    Parcel,
    RefuseStream,
    SenderFields,
    encode,
)
from kvcourier.core.packing import (
    Gather,
    OwnSlot,
    RingSlot,
    SendClose,
    Sender,
    SenderAction,
    SendOpen,
    StreamEnded,
    StreamId,
    Write,
)
from kvcourier.errors import PeerLost, PostFailed
from kvcourier.ids import AgentName, PeerRank
from kvcourier.layout import PackedSide, parcels
from kvcourier.layout import Parcel as ParcelRange
from kvcourier.runtime.staging import Staging
from kvcourier.transport.copying import LoadedTables, Ticket
from kvcourier.transport.interface import (
    Descriptors,
    Operation,
    TransferHandle,
    TransferState,
    Transport,
)


@dataclass(frozen=True, slots=True)
class StreamResult:
    """How a packed WRITE ended.

    Attributes:
        reason: why it failed; None if all bytes are in the peer's staging memory.
        peer_lost: the failure means that the peer is gone.
        seconds: from opening the stream to its end.
        post_s: seconds spent in the transport's post calls.
        num_parcels: of the whole transfer.
        num_bytes: of the whole transfer.
        alone: no other stream of ours was open meanwhile, so the time is its own.
    """

    command: PostWrite
    reason: str | None
    peer_lost: bool
    seconds: float
    post_s: float
    num_parcels: int
    num_bytes: int
    alone: bool


class _SlotPair(NamedTuple):
    """A slot of ours and one of an agent's, and how many bytes go from one to the other."""

    agent: AgentName
    slot: OwnSlot
    peer_slot: RingSlot
    num_bytes: int


class _Writing(NamedTuple):
    handle: TransferHandle
    slots: _SlotPair


@dataclass(slots=True)
class _Stream:
    command: PostWrite
    agent: AgentName
    peer_staging: StagingOffer
    parcels: tuple[ParcelRange, ...]
    piece_bytes: tuple[int, ...]
    parcel_bytes: int
    opened_at: float
    tables: LoadedTables | None = None
    post_s: float = 0.0
    alone: bool = True
    gathers: dict[int, Ticket] = field(default_factory=dict)
    writes: dict[int, _Writing] = field(default_factory=dict)

    def size_of(self, number: int) -> int:
        """Bytes of a parcel."""
        part = self.parcels[number]
        return (part.stop - part.start) * self.piece_bytes[part.segment]

    @property
    def num_bytes(self) -> int:
        return sum(map(self.size_of, range(len(self.parcels))))


class PackedSender:
    """All packed WRITEs of one rank.

    Args:
        staging: our slots, which the transport has registered; None: nothing can be opened.
        sender: how messages name us.
        send: sends a message over the side channel; False if there is no way.
        patience_s: see `StagingConfig`.
        write_limit_s: the longest any write can take.
    """

    def __init__(
        self,
        staging: Staging | None,
        transport: Transport,
        sender: SenderFields,
        send: Callable[[PeerRank, bytes], bool],
        patience_s: float,
        write_limit_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._staging = staging
        self._transport = transport
        self._sender = sender
        self._send = send
        self._clock = clock
        # Without staging memory nothing is ever opened.
        self._core = Sender(
            1 if staging is None else staging.num_slots, patience_s, write_limit_s=write_limit_s
        )
        self._streams: dict[StreamId, _Stream] = {}
        # Finished WRITEs from a whole slot of ours into one of a peer's, to be posted again.
        self._ready: dict[_SlotPair, TransferHandle] = {}
        self._results: list[StreamResult] = []

    @property
    def can_send(self) -> bool:
        """Whether there is staging memory to send from."""
        return self._staging is not None

    @property
    def busy(self) -> bool:
        """Whether anything is under way, so that polling pays."""
        return bool(self._streams)

    @property
    def num_slots_used(self) -> int:
        """Slots that are being gathered or written; from any thread."""
        return 0 if self._staging is None else self._staging.num_slots - self._core.num_free

    def next_deadline(self) -> float | None:
        """When `poll` is due at the latest."""
        return self._core.next_deadline()

    def parcels(
        self, segments: list[PackedSide], peer_staging: StagingOffer
    ) -> tuple[ParcelRange, ...]:
        """The parcels in which a WRITE would go; raises MappingError if a piece is too large."""
        sizes = [(segment.num_pieces, segment.piece_bytes) for segment in segments]
        return parcels(sizes, self._parcel_bytes(peer_staging))

    def open(
        self,
        command: PostWrite,
        agent: AgentName,
        peer_staging: StagingOffer,
        segments: list[PackedSide],
        parts: tuple[ParcelRange, ...],
    ) -> None:
        """Start a packed WRITE in these parcels, which `parcels` gave."""
        stream = StreamId(command.operation_id)
        record = _Stream(
            command,
            agent,
            peer_staging,
            parts,
            tuple(segment.piece_bytes for segment in segments),
            self._parcel_bytes(peer_staging),
            self._clock(),
        )
        self._streams[stream] = record
        if len(self._streams) > 1:
            for each in self._streams.values():
                each.alone = False
        self._do(
            self._core.open(stream, command.peer, len(parts), peer_staging.num_slots, self._clock())
        )
        # While the peer does the same for its side.
        record.tables = self._own_staging.copier.load(segments)

    def on_message(self, message: GrantSlots | RefuseStream) -> None:
        """A receiver's answer."""
        peer, stream = message.sender.peer(), StreamId(message.stream)
        if isinstance(message, GrantSlots):
            slots = [RingSlot(slot) for slot in message.slots]
            actions = self._core.on_granted(
                peer, stream, message.first_parcel, slots, self._clock()
            )
            self._do(actions)
        else:
            self._do(self._core.on_refused(peer, stream, message.reason, self._clock()))

    def abandon(self, operation_id: OperationId) -> None:
        """Start nothing more for it; unknown ones are fine."""
        self._do(self._core.abandon(StreamId(operation_id), "abandoned", self._clock()))

    def lose(self, peer: PeerRank, agent: AgentName | None, reason: str) -> None:
        """A peer's life is over; `agent` was its name, if it had one."""
        if agent is not None:
            self._forget(agent)
        self._do(self._core.on_peer_lost(peer, reason, self._clock()))

    def poll(self) -> list[StreamResult]:
        """Look at what is under way; returns what has ended."""
        for name, stream in list(self._streams.items()):
            for number, ticket in list(stream.gathers.items()):
                if self._own_staging.copier.done(ticket):
                    del stream.gathers[number]
                    self._do(self._core.on_gathered(name, number))
            for number, writing in list(stream.writes.items()):
                self._poll_write(name, stream, number, writing)
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= self._clock():
            self._do(self._core.on_time(self._clock()))
        results, self._results = self._results, []
        return results

    @property
    def _own_staging(self) -> Staging:
        assert self._staging is not None, "a stream without staging memory"
        return self._staging

    def _parcel_bytes(self, peer_staging: StagingOffer) -> int:
        return min(self._own_staging.slot_bytes, peer_staging.slot_bytes)

    def _poll_write(self, name: StreamId, stream: _Stream, number: int, writing: _Writing) -> None:
        status = self._transport.poll(writing.handle)
        if status.state is TransferState.IN_FLIGHT:
            return
        del stream.writes[number]
        if status.state is TransferState.DONE:
            self._keep(stream, writing)
            self._do(self._core.on_written(name, number))
        else:
            self._transport.release(writing.handle)
            reason, lost = status.reason, status.peer_lost
            self._do(self._core.on_write_failed(name, number, reason, lost, self._clock()))

    def _keep(self, stream: _Stream, writing: _Writing) -> None:
        """Most parcels fill a slot, so the same WRITE comes again; others are rarely the same."""
        if writing.slots.num_bytes == stream.parcel_bytes:
            self._ready[writing.slots] = writing.handle
        else:
            self._transport.release(writing.handle)

    def _forget(self, agent: AgentName) -> None:
        for slots in [each for each in self._ready if each.agent == agent]:
            self._transport.release(self._ready.pop(slots))

    def _do(self, actions: list[SenderAction]) -> None:
        for action in actions:
            match action:
                case SendOpen(peer, stream):
                    self._send_open(peer, stream)
                case Gather(stream, number, slot):
                    self._gather(self._streams[stream], number, slot)
                case Write(stream, number, slot, peer_slot):
                    self._write(stream, number, slot, peer_slot)
                case SendClose(peer, stream, slots):
                    self._send(peer, encode(CloseStream(self._sender, stream, list(slots))))
                case StreamEnded():
                    self._end(action)

    def _send_open(self, peer: PeerRank, name: StreamId) -> None:
        stream = self._streams[name]
        message = OpenStream(
            self._sender,
            name,
            stream.command.notice,
            stream.parcel_bytes,
            len(stream.parcels),
        )
        # If it gets lost, the sender's patience runs out and the direct path is taken.
        self._send(peer, encode(message))

    def _gather(self, stream: _Stream, number: int, slot: int) -> None:
        staging = self._own_staging
        assert stream.tables is not None, "granted before it was opened"
        ticket = staging.copier.gather(
            stream.tables, stream.parcels[number], staging.address_of(slot)
        )
        stream.gathers[number] = ticket

    def _write(self, name: StreamId, number: int, slot: OwnSlot, peer_slot: RingSlot) -> None:
        stream = self._streams[name]
        slots = _SlotPair(stream.agent, slot, peer_slot, stream.size_of(number))
        notice = encode(Parcel(self._sender, name, number, peer_slot))
        began = self._clock()
        try:
            handle = self._post(slots, stream.peer_staging, notice)
            stream.writes[number] = _Writing(handle, slots)
        except (PostFailed, PeerLost) as error:
            lost = isinstance(error, PeerLost)
            self._do(self._core.on_write_failed(name, number, str(error), lost, self._clock()))
        stream.post_s += self._clock() - began

    def _post(self, slots: _SlotPair, theirs: StagingOffer, notice: bytes) -> TransferHandle:
        handle = self._ready.pop(slots, None)
        if handle is not None:
            try:
                self._transport.post_again(handle, notice)
            except (PostFailed, PeerLost):
                self._transport.release(handle)
                raise
            return handle
        staging, size = self._own_staging, slots.num_bytes
        local = [[staging.address_of(slots.slot), size, staging.region.device_id]]
        remote = [[theirs.address + slots.peer_slot * theirs.slot_bytes, size, theirs.device_id]]
        return self._transport.post(
            Operation.WRITE,
            slots.agent,
            local=Descriptors(np.array(local, np.int64), staging.region.memory),
            remote=Descriptors(np.array(remote, np.int64), theirs.memory),
            notice=notice,
        )

    def _end(self, ended: StreamEnded) -> None:
        stream = self._streams.pop(ended.stream)
        for writing in stream.writes.values():
            # Given up: nothing proves that it has ended.
            self._transport.release(writing.handle)
        self._results.append(
            StreamResult(
                stream.command,
                ended.reason,
                ended.peer_lost,
                self._clock() - stream.opened_at,
                stream.post_s,
                len(stream.parcels),
                stream.num_bytes,
                stream.alone,
            )
        )
