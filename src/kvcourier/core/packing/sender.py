"""The sending side of the packed path.

Decides which parcel gets an own slot, when it is written, and when a stream has ended. Refuses to
know what a parcel holds.
"""

import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcourier.core.deadlines import Deadlines
from kvcourier.core.packing.actions import (
    NO_STAGING,
    Gather,
    OwnSlot,
    RingSlot,
    SendClose,
    SenderAction,
    SendOpen,
    StreamEnded,
    StreamId,
    Write,
)
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import PeerRank

MAX_REMEMBERED = 4096
"""How many streams that ended well are remembered, for grants that come twice."""


class Stage(enum.Enum):
    """How far a parcel is that has a slot of the peer's."""

    GRANTED = enum.auto()
    GATHERING = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    FAILED = enum.auto()
    ABANDONED = enum.auto()


_AT_WORK = frozenset({Stage.GATHERING, Stage.WRITING})
_UNWRITTEN = frozenset({Stage.GRANTED, Stage.GATHERING})
_UNUSED = frozenset({Stage.GRANTED, Stage.FAILED})


@dataclass(slots=True)
class _Parcel:
    """`slot` is an own one, held while the parcel is at work."""

    peer_slot: RingSlot
    stage: Stage = Stage.GRANTED
    slot: OwnSlot | None = None


@dataclass(slots=True)
class _Stream:
    """`parcels` are those that were granted a slot, in the order of the grants. It has begun with
    its first own slot."""

    peer: PeerRank
    num_parcels: int
    peer_num_slots: int
    parcels: dict[int, _Parcel] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    at_work: int = 0
    num_written: int = 0
    has_begun: bool = False
    reason: str | None = None
    peer_lost: bool = False


class Sender:
    """All streams that one rank sends, and the slots of its staging memory.

    Each call returns what is to be done, in order. Calls that answer an action must come exactly
    once; what comes from a peer may be late, doubled, reordered, or nonsense.

    Attributes:
        counts: what was ignored or returned, by name.
    """

    def __init__(
        self,
        num_slots: int,
        patience_s: float,
        stall_limit_s: float = 60.0,
        write_limit_s: float = 300.0,
    ) -> None:
        """`patience_s` is for the first grant and the first own slot, `stall_limit_s` for each
        further grant.

        `write_limit_s` is the longest any write can take: so long after a stream has failed, its
        own slots are used again, whatever is still in flight from them.

        The peer's `slot_limit_s` must be longer than a stream can last here: these two and the
        longest gather and write.
        """
        if num_slots < 1:
            raise LocalProtocolError(f"num_slots: expected at least 1, found {num_slots}")
        self.counts: Counter[str] = Counter()
        self._num_slots = num_slots
        self._patience_s = patience_s
        self._stall_limit_s = stall_limit_s
        self._write_limit_s = write_limit_s
        self._free = deque(OwnSlot(slot) for slot in range(num_slots))
        self._streams: dict[StreamId, _Stream] = {}
        # Streams with a parcel that waits for an own slot; the first one is served next.
        self._turns: OrderedDict[StreamId, None] = OrderedDict()
        # Slots of peers that are ours to write and not yet posted. Once a write is posted, its
        # notice may come, and the slot be granted anew, before we learn that the write has ended.
        self._held: dict[tuple[PeerRank, RingSlot], StreamId] = {}
        self._deadlines: Deadlines[StreamId] = Deadlines()
        self._written: OrderedDict[StreamId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_free(self) -> int:
        """Own slots that nothing uses."""
        return len(self._free)

    def next_deadline(self) -> float | None:
        """When `on_time` has something to do at the latest; None if never."""
        return self._deadlines.next()

    # From the core.

    def open(
        self, stream: StreamId, peer: PeerRank, num_parcels: int, peer_num_slots: int, now: float
    ) -> list[SenderAction]:
        """Begin a stream. `peer_num_slots` is the size of the peer's ring, from the handshake.

        Raises:
            LocalProtocolError: the stream's name was used before, or a number is below 1.
        """
        if stream in self._streams or stream in self._written:
            raise LocalProtocolError(f"stream {stream} was opened before")
        if num_parcels < 1 or peer_num_slots < 1:
            raise LocalProtocolError(
                f"stream {stream}: expected at least 1 parcel and 1 slot, "
                f"found {num_parcels} and {peer_num_slots}"
            )
        self._streams[stream] = _Stream(peer, num_parcels, peer_num_slots)
        self._deadlines.set(stream, now + self._patience_s)
        return [SendOpen(peer, stream)]

    def abandon(self, stream: StreamId, reason: str, now: float) -> list[SenderAction]:
        """Write nothing more of it; StreamEnded follows. A stream that has ended is fine."""
        return self._fail(stream, reason, now) if stream in self._streams else []

    # From peers.

    def on_granted(
        self,
        peer: PeerRank,
        stream: StreamId,
        first_parcel: int,
        slots: Sequence[RingSlot],
        now: float,
    ) -> list[SenderAction]:
        """The peer lets us write these slots, with the parcels from `first_parcel` on."""
        record = self._of(peer, stream)
        if record is None:
            if stream in self._written:
                # All its slots are used; to return them would end the stream at the peer while
                # the last notices are still on their way.
                self.counts["repeated_grants"] += 1
                return []
            self.counts["late_grants"] += 1
            return [SendClose(peer, stream, tuple(slots))]
        grants = dict(enumerate(slots, first_parcel))
        if all(
            parcel in record.parcels and record.parcels[parcel].peer_slot == slot
            for parcel, slot in grants.items()
        ):
            self.counts["repeated_grants"] += 1
            return []
        problem = self._problem(record, grants)
        if problem:
            self.counts["wrong_grants"] += 1
            return self._fail(stream, f"{peer} granted nonsense: {problem}", now)
        for parcel, slot in grants.items():
            record.parcels[parcel] = _Parcel(slot)
            self._held[peer, slot] = stream
        if record.reason is not None:
            return []
        record.waiting.extend(grants)
        self._turns.setdefault(stream)
        actions = self._gather()
        if record.has_begun:
            self._await_grant(stream, record, now)
        else:
            self._deadlines.set(stream, now + self._patience_s)
        return actions

    def on_refused(
        self, peer: PeerRank, stream: StreamId, reason: str, now: float
    ) -> list[SenderAction]:
        """The peer does not take the stream (any more)."""
        return self._fail(stream, reason, now) if self._of(peer, stream) is not None else []

    def on_peer_lost(self, peer: PeerRank, reason: str, now: float) -> list[SenderAction]:
        """That life of the peer is over: its streams end when our own slots are quiet."""
        actions: list[SenderAction] = []
        for stream in [name for name, record in self._streams.items() if record.peer == peer]:
            self._streams[stream].peer_lost = True
            actions += self._fail(stream, reason, now)
        return actions

    # From the driver.

    def on_gathered(self, stream: StreamId, parcel: int) -> list[SenderAction]:
        """The parcel is in its own slot.

        Raises:
            LocalProtocolError: it was not being gathered.
        """
        record, each = self._at(stream, parcel, Stage.GATHERING)
        assert each.slot is not None
        if record.reason is None:
            each.stage = Stage.WRITING
            del self._held[record.peer, each.peer_slot]
            return [Write(stream, parcel, each.slot, each.peer_slot)]
        self._rest(record, each, Stage.GRANTED)
        return self._end_if_quiet(stream) + self._gather()

    def on_written(self, stream: StreamId, parcel: int) -> list[SenderAction]:
        """The parcel is in the peer's slot.

        Raises:
            LocalProtocolError: it was not being written.
        """
        record, each = self._at(stream, parcel, Stage.WRITING)
        self._rest(record, each, Stage.WRITTEN)
        record.num_written += 1
        return self._end_if_quiet(stream) + self._gather()

    def on_write_failed(
        self, stream: StreamId, parcel: int, reason: str, peer_lost: bool, now: float
    ) -> list[SenderAction]:
        """The write has ended without its notice, or could not be posted.

        Raises:
            LocalProtocolError: it was not being written.
        """
        record, each = self._at(stream, parcel, Stage.WRITING)
        self._rest(record, each, Stage.FAILED)
        if peer_lost:
            return self.on_peer_lost(record.peer, reason, now) + self._gather()
        return self._fail(stream, reason, now) + self._gather()

    def on_time(self, now: float) -> list[SenderAction]:
        """End the streams that have waited too long for a grant, or for the end of a write."""
        actions: list[SenderAction] = []
        while (stream := self._deadlines.pop_due(now)) is not None:
            record = self._streams[stream]
            if record.reason is not None:
                actions += self._give_up(stream, record, now)
                continue
            if record.has_begun and (record.waiting or record.at_work):
                # It waits for us, not for the peer.
                self._await_grant(stream, record, now)
                continue
            actions += self._fail(stream, self._why_overdue(record), now)
        return actions + self._gather()

    def check(self) -> None:
        """Every slot is in one place, and nothing waits for what is free.

        Raises:
            AssertionError: it is not so; a bug in this class.
        """
        slots = list(self._free)
        held = {}
        for stream, record in self._streams.items():
            at_work = [each for each in record.parcels.values() if each.stage in _AT_WORK]
            assert record.at_work == len(at_work), f"{stream}: {record.at_work} at work"
            slots += [each.slot for each in at_work if each.slot is not None]
            for each in record.parcels.values():
                assert (each.slot is not None) == (each.stage in _AT_WORK), f"{stream}: {each}"
                if each.stage in _UNWRITTEN:
                    held[record.peer, each.peer_slot] = stream
            granted = [
                parcel
                for parcel, each in record.parcels.items()
                if each.stage is Stage.GRANTED and record.reason is None
            ]
            assert granted == list(record.waiting), f"{stream}: {granted} wait"
            assert (stream in self._turns) == bool(granted), f"{stream}: wrong turn"
            assert record.reason is None or record.at_work, f"{stream} has not ended"
            # For a grant or an own slot, or for the end of what was at work when it failed.
            begun = record.has_begun and len(record.parcels) == record.num_parcels
            waits = record.reason is not None or not begun
            assert stream in self._deadlines or not waits, f"{stream}: no deadline"
        assert sorted(slots) == list(range(self._num_slots)), f"own slots: {sorted(slots)}"
        assert held == self._held, f"peers' slots: {held}, not {self._held}"
        assert not (self._free and self._turns), "a parcel waits while a slot is free"
        assert self._turns.keys() <= self._streams.keys()
        assert len(self._deadlines) <= len(self._streams)

    def _of(self, peer: PeerRank, stream: StreamId) -> _Stream | None:
        record = self._streams.get(stream)
        return record if record is not None and record.peer == peer else None

    def _at(self, stream: StreamId, parcel: int, stage: Stage) -> tuple[_Stream, _Parcel]:
        record = self._streams.get(stream)
        each = record.parcels.get(parcel) if record is not None else None
        if record is None or each is None or each.stage is not stage:
            raise LocalProtocolError(f"stream {stream}: parcel {parcel} is not {stage.name}")
        return record, each

    def _problem(self, record: _Stream, grants: dict[int, RingSlot]) -> str:
        if len(set(grants.values())) < len(grants):
            return "a slot is named twice"
        for parcel, slot in grants.items():
            if not 0 <= parcel < record.num_parcels:
                return f"parcel {parcel} of {record.num_parcels}"
            if not 0 <= slot < record.peer_num_slots:
                return f"slot {slot} of {record.peer_num_slots}"
            if parcel in record.parcels:
                return f"parcel {parcel} has slot {record.parcels[parcel].peer_slot} already"
            if (record.peer, slot) in self._held:
                return f"slot {slot} is granted already"
        return ""

    def _why_overdue(self, record: _Stream) -> str:
        granted = len(record.parcels)
        if not granted:
            return f"{NO_STAGING}: {record.peer} granted no slot within {self._patience_s:g} s"
        if not record.has_begun:
            # Writes to another peer may be stuck in all of them: nobody else is to wait for that.
            return f"{NO_STAGING}: no slot of our own was free within {self._patience_s:g} s"
        return (
            f"{record.peer} granted {granted} of {record.num_parcels} slots, and no further one "
            f"within {self._stall_limit_s:g} s"
        )

    def _await_grant(self, stream: StreamId, record: _Stream, now: float) -> None:
        if len(record.parcels) < record.num_parcels:
            self._deadlines.set(stream, now + self._stall_limit_s)
        else:
            self._deadlines.cancel(stream)

    def _gather(self) -> list[SenderAction]:
        """Give free slots to waiting parcels, one for each stream in turn."""
        actions: list[SenderAction] = []
        while self._free and self._turns:
            stream, _ = self._turns.popitem(last=False)
            record = self._streams[stream]
            parcel = record.waiting.popleft()
            each = record.parcels[parcel]
            each.stage, each.slot = Stage.GATHERING, self._free.popleft()
            record.at_work += 1
            record.has_begun = True
            actions.append(Gather(stream, parcel, each.slot))
            if record.waiting:
                self._turns[stream] = None
        return actions

    def _rest(self, record: _Stream, each: _Parcel, stage: Stage) -> None:
        """Nothing uses the parcel's own slot any more."""
        assert each.slot is not None
        self._free.append(each.slot)
        each.stage, each.slot = stage, None
        record.at_work -= 1

    def _fail(self, stream: StreamId, reason: str, now: float) -> list[SenderAction]:
        """Post nothing more of it; the first reason stands."""
        record = self._streams[stream]
        if record.reason is None:
            record.reason = reason
            record.waiting.clear()
            self._turns.pop(stream, None)
            self._deadlines.set(stream, now + self._write_limit_s)
        return self._end_if_quiet(stream)

    def _give_up(self, stream: StreamId, record: _Stream, now: float) -> list[SenderAction]:
        """Use the own slots of a failed stream again: no write can take so long."""
        for each in record.parcels.values():
            if each.stage is Stage.WRITING:
                self.counts["abandoned_writes"] += 1
                # Not to be returned: what is in flight may reach the peer's slot.
                self._rest(record, each, Stage.ABANDONED)
        if record.at_work:
            # Our own device gathers still.
            self._deadlines.set(stream, now + self._write_limit_s)
        return self._end_if_quiet(stream)

    def _end_if_quiet(self, stream: StreamId) -> list[SenderAction]:
        record = self._streams[stream]
        written = record.num_written == record.num_parcels
        if record.at_work or not (written or record.reason is not None):
            return []
        del self._streams[stream]
        self._deadlines.cancel(stream)
        for each in record.parcels.values():
            if each.stage in _UNWRITTEN:
                del self._held[record.peer, each.peer_slot]
        ended = StreamEnded(stream, record.reason, record.peer_lost)
        if record.reason is None:
            self._written[stream] = None
            if len(self._written) > MAX_REMEMBERED:
                self._written.popitem(last=False)
            return [ended]
        if record.peer_lost:
            return [ended]
        unused = {each.peer_slot for each in record.parcels.values() if each.stage in _UNUSED}
        return [SendClose(record.peer, stream, tuple(sorted(unused))), ended]
