"""Receiving packed: grants staging slots and scatters what lands in them into our blocks.

Decides nothing about slots, which `core.packing.Receiver` does; checks what a peer announces
against what the core expects of it. Used on the courier's thread only.

A peer writes into staging memory only, so nothing that it does late can touch a block.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcourier.config import Limits
from kvcourier.core.handshake import StagingOffer
from kvcourier.core.messages import (
    CloseStream,
    GrantSlots,
    Landed,
    OpenStream,
    Parcel,
    RefuseStream,
    SenderFields,
    encode,
)
from kvcourier.core.packing import (
    NO_STAGING,
    Receiver,
    ReceiverAction,
    RingSlot,
    Scatter,
    SendGrant,
    SendRefusal,
    StreamId,
    StreamLanded,
)
from kvcourier.core.wants import WriteTarget
from kvcourier.errors import MappingError
from kvcourier.ids import PeerRank, RequestId
from kvcourier.layout import PackedSide, parcels
from kvcourier.layout import Parcel as ParcelRange
from kvcourier.runtime.staging import Staging
from kvcourier.transport.copying import Copier, LoadedTables, Ticket

StreamKey = tuple[PeerRank, StreamId]


@dataclass(slots=True)
class _Stream:
    owner: RequestId
    landed: Landed
    parcels: tuple[ParcelRange, ...]
    tables: LoadedTables | None = None
    scatters: dict[int, Ticket] = field(default_factory=dict)


class PackedReceiver:
    """Everything that comes to one rank packed.

    Args:
        staging: our slots, which the transport has registered; None: every stream is refused.
        sender: how messages name us.
        send: sends a message over the side channel; False if there is no way.
        expects: where a tile goes; None if nobody waits for it.
        locate: our side of a tile from that peer; raises MappingError or PeerLost.
        slot_limit_s: the longest any write can take.
    """

    def __init__(
        self,
        staging: Staging | None,
        sender: SenderFields,
        send: Callable[[PeerRank, bytes], bool],
        expects: Callable[[Landed], WriteTarget | None],
        locate: Callable[[PeerRank, WriteTarget, Landed], list[PackedSide]],
        slot_limit_s: float,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._staging = staging
        self._sender = sender
        self._send = send
        self._expects = expects
        self._locate = locate
        self._clock = clock
        # Without staging memory every stream is refused before it gets there.
        self._core = Receiver(
            1 if staging is None else staging.num_slots, limits.max_streams, slot_limit_s
        )
        self._streams: dict[StreamKey, _Stream] = {}
        self._landed: list[Landed] = []

    @property
    def offer(self) -> StagingOffer | None:
        """Where peers may write parcels."""
        staging = self._staging
        if staging is None:
            return None
        region = staging.region
        return StagingOffer(
            region.address, staging.slot_bytes, staging.num_slots, region.memory, region.device_id
        )

    @property
    def busy(self) -> bool:
        """Whether parcels are awaited or scattered, so that polling pays."""
        return bool(self._streams)

    @property
    def num_slots_used(self) -> int:
        """Slots that a peer may write, or that are being scattered; from any thread."""
        return 0 if self._staging is None else self._staging.num_slots - self._core.num_free

    def next_deadline(self) -> float | None:
        """When `poll` is due at the latest."""
        return self._core.next_deadline()

    def on_message(self, message: OpenStream | CloseStream | Parcel) -> None:
        """A sender's message, which really came from whom it names."""
        peer, stream = message.sender.peer(), StreamId(message.stream)
        match message:
            case OpenStream():
                self._open(peer, stream, message)
            case CloseStream():
                unused = map(RingSlot, message.unused_slots)
                self._do(self._core.on_close(peer, stream, unused, self._clock()))
            case Parcel():
                slot = RingSlot(message.slot)
                actions = self._core.on_parcel(peer, stream, message.parcel, slot, self._clock())
                self._do(actions)

    def forget(self, owner: RequestId) -> None:
        """The request's blocks go back to the engine: nothing is scattered into them after this.

        Waits for a copy that runs, which takes a fraction of a millisecond on a GPU.
        """
        keys = [key for key, stream in self._streams.items() if stream.owner == owner]
        self._drop(keys, self._core.forget(owner, self._clock()))

    def lose(self, peer: PeerRank) -> None:
        """A peer's life is over: nothing of it can write into our slots any more."""
        self._do(self._core.on_peer_lost(peer, self._clock()))

    def poll(self) -> list[Landed]:
        """Look at the copies under way; returns the tiles that are complete now."""
        for key, stream in list(self._streams.items()):
            for number, ticket in list(stream.scatters.items()):
                if self._copier.done(ticket):
                    self._on_scattered(key, number)
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= self._clock():
            self._do(self._core.on_time(self._clock()))
        landed, self._landed = self._landed, []
        return landed

    def _drop(self, keys: list[StreamKey], actions: list[ReceiverAction]) -> None:
        """Do what ends these streams, and wait for the copies that run."""
        running = [(key, *each) for key in keys for each in self._streams[key].scatters.items()]
        self._do(actions)
        for key, number, ticket in running:
            self._copier.wait(ticket)
            self._on_scattered(key, number)

    def _drop_older(self, peer: PeerRank, owner: RequestId, epoch: int) -> None:
        """The prompt was computed anew. The peer writes nothing of it before it has our grant, so
        what is left of the older epochs is out of the way by then."""
        older = [
            key
            for key, stream in self._streams.items()
            if key[0] == peer and stream.owner == owner and stream.landed.epoch < epoch
        ]
        if older:
            reason = "the prompt is computed anew"
            self._drop(older, self._core.drop(older, reason, self._clock()))

    def _on_scattered(self, key: StreamKey, number: int) -> None:
        del self._streams[key].scatters[number]
        self._do(self._core.on_scattered(*key, number, self._clock()))

    def _open(self, peer: PeerRank, stream: StreamId, message: OpenStream) -> None:
        key = peer, stream
        problem = ""
        target = self._expects(message.landed) if message.landed.sender == message.sender else None
        if target is not None:
            self._drop_older(peer, target.request_id, message.landed.epoch)
        if self._staging is None:
            problem = f"{NO_STAGING}: this rank has none"
        elif target is None:
            problem = "nobody waits for these tiles"
        elif message.parcel_bytes > self._staging.slot_bytes:
            problem = f"parcels of {message.parcel_bytes} bytes, slots have fewer"
        elif key not in self._streams:
            problem = self._prepare(key, message, target)
        if problem:
            self._send(peer, encode(RefuseStream(self._sender, stream, problem)))

    def _prepare(self, key: StreamKey, message: OpenStream, target: WriteTarget) -> str:
        """Make a stream ready; returns what is wrong with it, or nothing."""
        peer, stream = key
        try:
            segments = self._locate(peer, target, message.landed)
            sizes = [(segment.num_pieces, segment.piece_bytes) for segment in segments]
            parts = parcels(sizes, message.parcel_bytes)
        except MappingError as error:
            return str(error)
        if len(parts) != message.num_parcels:
            return f"{message.num_parcels} parcels are announced, these tiles make {len(parts)}"
        record = _Stream(target.request_id, message.landed, parts)
        self._streams[key] = record
        self._do(self._core.on_open(peer, stream, target.request_id, len(parts), self._clock()))
        # While the peer gathers and writes the first parcels.
        record.tables = self._copier.load(segments)
        return ""

    @property
    def _copier(self) -> Copier:
        assert self._staging is not None, "a stream without staging memory"
        return self._staging.copier

    def _do(self, actions: list[ReceiverAction]) -> None:
        for action in actions:
            match action:
                case SendGrant(peer, stream, first, slots):
                    grant = GrantSlots(self._sender, stream, first, list(slots))
                    self._send(peer, encode(grant))
                case SendRefusal(peer, stream, reason):
                    self._send(peer, encode(RefuseStream(self._sender, stream, reason)))
                case Scatter(peer, stream, number, slot):
                    self._scatter((peer, stream), number, slot)
                case StreamLanded(peer, stream):
                    self._landed.append(self._streams[peer, stream].landed)
        for key, record in list(self._streams.items()):
            if not record.scatters and not self._core.is_live(*key):
                del self._streams[key]

    def _scatter(self, key: StreamKey, number: int, slot: RingSlot) -> None:
        assert self._staging is not None
        stream = self._streams[key]
        assert stream.tables is not None, "a parcel came before its stream was opened"
        address = self._staging.address_of(slot)
        stream.scatters[number] = self._copier.scatter(
            stream.tables, stream.parcels[number], address
        )
