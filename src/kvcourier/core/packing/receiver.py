"""The receiving side of the packed path.

Decides who may write which slot of the ring, which parcel is believed, and when a slot comes back.
Refuses to know what a parcel holds and where it goes.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcourier.core.deadlines import Deadlines
from kvcourier.core.packing.actions import (
    NO_STAGING,
    ReceiverAction,
    RingSlot,
    Scatter,
    SendGrant,
    SendRefusal,
    StreamId,
    StreamLanded,
)
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import PeerRank, RequestId

MAX_REMEMBERED = 4096
"""How many ended streams are remembered, for messages that come twice."""

StreamKey = tuple[PeerRank, StreamId]
"""A stream as its receiver knows it: each sender names its own."""


@dataclass(slots=True)
class _Stream:
    """One stream, from its opening until none of its slots is in use.

    `granted` slots may be written by the peer, `scattering` ones are read by us; both by parcel.
    Parcels get their slots in order. Once it is not `live`, nothing more is granted or scattered.
    """

    owner: RequestId
    num_parcels: int
    live: bool = True
    num_granted: int = 0
    granted: dict[int, RingSlot] = field(default_factory=dict)
    scattering: dict[int, RingSlot] = field(default_factory=dict)

    @property
    def wants(self) -> bool:
        """Whether parcels are left that have had no slot."""
        return self.live and self.num_granted < self.num_parcels

    @property
    def arrived(self) -> bool:
        """Whether every parcel is in the ring or in its blocks."""
        return self.live and not self.wants and not self.granted

    @property
    def num_slots(self) -> int:
        """Slots of the ring that it has."""
        return len(self.granted) + len(self.scattering)


class Receiver:
    """All streams that one rank takes, and the slots of its staging ring.

    Each call returns what is to be done, in order. `on_scattered` must come exactly once for each
    Scatter; what comes from a peer may be late, doubled, reordered, or nonsense. A live stream
    whose peer is silent for `slot_limit_s` while it may write is dropped.

    Attributes:
        counts: what was ignored, refused or given up, by name.
    """

    def __init__(self, num_slots: int, max_streams: int, slot_limit_s: float) -> None:
        """`slot_limit_s` is the longest that a granted slot can still be written by a peer of
        which nothing is heard; after it, the slot is granted again."""
        if num_slots < 1:
            raise LocalProtocolError(f"num_slots: expected at least 1, found {num_slots}")
        self.counts: Counter[str] = Counter()
        self._num_slots = num_slots
        self._max_streams = max_streams
        self._slot_limit_s = slot_limit_s
        self._free = deque(RingSlot(slot) for slot in range(num_slots))
        self._streams: dict[StreamKey, _Stream] = {}
        # Peers with streams that want slots, and these streams; the first of each is served next.
        self._turns: OrderedDict[PeerRank, OrderedDict[StreamId, None]] = OrderedDict()
        # Of streams with granted slots: these are the ones that may wait for a silent peer.
        self._deadlines: Deadlines[StreamKey] = Deadlines()
        self._ended: OrderedDict[StreamKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_free(self) -> int:
        """Slots of the ring that nobody may write and nothing reads."""
        return len(self._free)

    def next_deadline(self) -> float | None:
        """When `on_time` has something to do at the latest; None if never."""
        return self._deadlines.next()

    def is_live(self, peer: PeerRank, stream: StreamId) -> bool:
        """Whether parcels of the stream may still be scattered."""
        record = self._streams.get((peer, stream))
        return record is not None and record.live

    def scattering(self, owner: RequestId) -> bool:
        """Whether a scatter into the owner's blocks is running; none begins after `forget`."""
        return any(each.owner == owner and each.scattering for each in self._streams.values())

    # From the core.

    def forget(self, owner: RequestId, now: float) -> list[ReceiverAction]:
        """Scatter nothing more for the owner: its blocks go back to the engine.

        They are quiet once `scattering(owner)` is false. Slots that the peer may still write stay
        out of the ring until they are known to be quiet, too.
        """
        keys = [key for key, record in self._streams.items() if record.owner == owner]
        return self.drop(keys, "the request is over", now)

    def drop(self, keys: Iterable[StreamKey], reason: str, now: float) -> list[ReceiverAction]:
        """Scatter nothing more of these streams; what is being scattered goes on."""
        actions: list[ReceiverAction] = []
        for key in keys:
            record = self._streams.get(key)
            if record is not None and record.live:
                self._end(key, record)
                actions.append(SendRefusal(*key, reason))
        return actions + self._grant(now)

    # From peers.

    def on_open(
        self, peer: PeerRank, stream: StreamId, owner: RequestId, num_parcels: int, now: float
    ) -> list[ReceiverAction]:
        """A peer has a stream for this request, whose blocks the caller has reserved."""
        key = peer, stream
        if key in self._streams or key in self._ended:
            self.counts["repeated_opens"] += 1
            return []
        live = sum(each.live for each in self._streams.values())
        problem = ""
        if num_parcels < 1:
            problem = f"expected at least 1 parcel, found {num_parcels}"
        elif live >= self._max_streams:
            problem = f"{live} streams are open, at most {self._max_streams} are taken"
        if problem:
            self.counts["refused_streams"] += 1
            return [SendRefusal(peer, stream, f"{NO_STAGING}: {problem}")]
        self._streams[key] = _Stream(owner, num_parcels)
        self._turns.setdefault(peer, OrderedDict())[stream] = None
        return self._grant(now)

    def on_parcel(
        self, peer: PeerRank, stream: StreamId, parcel: int, slot: RingSlot, now: float
    ) -> list[ReceiverAction]:
        """The notice of a write: this parcel is in this slot, if we let the peer put it there."""
        key = peer, stream
        record = self._streams.get(key)
        if record is None or record.granted.get(parcel) != slot:
            self.counts["stale_parcels"] += 1
            return []
        if not record.live:
            self._free_granted(key, record, [parcel])
            return self._grant(now)
        del record.granted[parcel]
        record.scattering[parcel] = slot
        self._watch(key, record, now)
        return [Scatter(peer, stream, parcel, slot)]

    def on_close(
        self, peer: PeerRank, stream: StreamId, unused_slots: Iterable[RingSlot], now: float
    ) -> list[ReceiverAction]:
        """The peer has ended the stream; these slots it will not write.

        Of other slots it has written the notice is on its way, and they wait for it.
        """
        key, unused = (peer, stream), set(unused_slots)
        record = self._streams.get(key)
        granted = record.granted if record is not None else {}
        returned = [parcel for parcel, slot in granted.items() if slot in unused]
        self.counts["wrong_unused_slots"] += len(unused) - len(returned)
        if record is None or record.arrived:
            return []
        self._free_granted(key, record, returned)
        self._end(key, record)
        return self._grant(now)

    def on_peer_lost(self, peer: PeerRank, now: float) -> list[ReceiverAction]:
        """That life of the peer is over: it writes no more. What has arrived is still landed."""
        for key, record in list(self._streams.items()):
            if key[0] == peer and not record.arrived:
                self._free_granted(key, record, list(record.granted))
                self._end(key, record)
        return self._grant(now)

    # From the driver.

    def on_scattered(
        self, peer: PeerRank, stream: StreamId, parcel: int, now: float
    ) -> list[ReceiverAction]:
        """The parcel is in its blocks.

        Raises:
            LocalProtocolError: it was not being scattered.
        """
        key = peer, stream
        record = self._streams.get(key)
        if record is None or parcel not in record.scattering:
            raise LocalProtocolError(
                f"stream {stream} of {peer}: parcel {parcel} is not being scattered"
            )
        self._free.append(record.scattering.pop(parcel))
        landed: list[ReceiverAction] = []
        if record.arrived and not record.scattering:
            landed = [StreamLanded(peer, stream)]
            record.live = False
        self._drop_if_empty(key, record)
        return landed + self._grant(now)

    def on_time(self, now: float) -> list[ReceiverAction]:
        """Take slots back from peers that were silent for too long."""
        actions: list[ReceiverAction] = []
        while (key := self._deadlines.pop_due(now)) is not None:
            record = self._streams[key]
            self.counts["expired_slots"] += len(record.granted)
            if record.live:
                actions.append(
                    SendRefusal(*key, f"nothing was written within {self._slot_limit_s:g} s")
                )
            self._free_granted(key, record, list(record.granted))
            self._end(key, record)
        return actions + self._grant(now)

    def check(self) -> None:
        """Every slot is in one place, and none is free that could be granted.

        Raises:
            AssertionError: it is not so; a bug in this class.
        """
        slots = list(self._free)
        for key, record in self._streams.items():
            slots += [*record.granted.values(), *record.scattering.values()]
            assert record.num_granted <= record.num_parcels, f"{key}: too many grants"
            assert record.live or record.num_slots, f"{key} is over and still known"
            assert not record.granted.keys() & record.scattering.keys(), f"{key}: a parcel twice"
            assert (key in self._deadlines) == bool(record.granted), f"{key}: wrong deadline"
        assert sorted(slots) == list(range(self._num_slots)), f"ring: {sorted(slots)}"
        turns = {(peer, stream) for peer, streams in self._turns.items() for stream in streams}
        wanting = {key for key, record in self._streams.items() if record.wants}
        assert turns == wanting, f"turns {turns}, wanting {wanting}"
        assert all(self._turns.values()), "a peer without streams has a turn"
        assert sum(record.live for record in self._streams.values()) <= self._max_streams
        assert len(self._deadlines) <= len(self._streams)
        assert not (self._free and self._next_peer()), "a stream waits while a slot is free"

    def _share(self) -> int:
        """How many slots a peer may have and be granted no more: all, or its part of them."""
        num_peers = len({peer for (peer, _), record in self._streams.items() if record.live})
        return -(-self._num_slots // max(num_peers, 1))

    def _next_peer(self) -> PeerRank | None:
        """The peer whose turn it is to be granted a slot; None if no stream may have one."""
        held: Counter[PeerRank] = Counter()
        for (peer, _), record in self._streams.items():
            held[peer] += record.num_slots
        share = self._share()
        return next((peer for peer in self._turns if held[peer] < share), None)

    def _grant(self, now: float) -> list[ReceiverAction]:
        """Give free slots to the streams that want some: peers in turn, and each one's streams."""
        granted: dict[StreamKey, int] = {}
        while self._free and (peer := self._next_peer()) is not None:
            streams = self._turns[peer]
            stream, _ = streams.popitem(last=False)
            key = peer, stream
            record = self._streams[key]
            granted.setdefault(key, record.num_granted)
            record.granted[record.num_granted] = self._free.popleft()
            record.num_granted += 1
            if record.wants:
                streams[stream] = None
            self._turns.move_to_end(peer)
            if not streams:
                del self._turns[peer]
        actions: list[ReceiverAction] = []
        for key, first in granted.items():
            record = self._streams[key]
            self._watch(key, record, now)
            slots = tuple(record.granted[parcel] for parcel in range(first, record.num_granted))
            actions.append(SendGrant(*key, first, slots))
        return actions

    def _watch(self, key: StreamKey, record: _Stream, now: float) -> None:
        """Something was heard of the peer, or granted to it."""
        if record.granted:
            self._deadlines.set(key, now + self._slot_limit_s)
        else:
            self._deadlines.cancel(key)

    def _free_granted(self, key: StreamKey, record: _Stream, parcels: Iterable[int]) -> None:
        """The peer will not write these (any more)."""
        for parcel in parcels:
            self._free.append(record.granted.pop(parcel))
        if not record.granted:
            self._deadlines.cancel(key)
        self._drop_if_empty(key, record)

    def _end(self, key: StreamKey, record: _Stream) -> None:
        """Grant and scatter nothing more for it."""
        peer, stream = key
        record.live = False
        streams = self._turns.get(peer, OrderedDict())
        streams.pop(stream, None)
        if not streams:
            self._turns.pop(peer, None)
        self._drop_if_empty(key, record)

    def _drop_if_empty(self, key: StreamKey, record: _Stream) -> None:
        """A stream that is over is known until its last slot is back."""
        if record.live or record.num_slots or key not in self._streams:
            return
        del self._streams[key]
        self._ended[key] = None
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
