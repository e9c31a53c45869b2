"""What is answered to the heartbeats of wanters.

Decides whose lease is extended, and what is said of each hold: whether it stands, in the blocks
that are READ, is served, or is not known. Refuses to know what a wanter makes of that, and when
leases end.
"""

import enum

from kvcourier.config import TransferMode
from kvcourier.core.askers import Askers
from kvcourier.core.deliveries import Deliveries
from kvcourier.core.hold_table import HoldTable
from kvcourier.core.holds import Delivery, DeliveryKey, Hold, wanter_of
from kvcourier.core.leases import LeaseTable
from kvcourier.core.lifecycle import DeliveryState, HoldState
from kvcourier.core.messages import Renew, Renewed, RenewItem
from kvcourier.core.registrations import Registrations
from kvcourier.core.workspace import Counted, Workspace
from kvcourier.ids import InstanceAddress, PeerRank, RequestId


class _Standing(enum.Enum):
    """What is said of one hold; see `Renewed`."""

    KNOWN = "known"
    SERVED = "served"
    UNKNOWN = "unknown"
    REFUSED = "refused"


class Renewals:
    """The answers of one rank to `Renew`."""

    def __init__(
        self,
        space: Workspace,
        holds: HoldTable,
        leases: LeaseTable,
        deliveries: Deliveries,
        registrations: Registrations,
        askers: Askers,
    ) -> None:
        self._space = space
        self._holds = holds
        self._leases = leases
        self._deliveries = deliveries
        self._registrations = registrations
        self._askers = askers

    def on_renew(self, message: Renew) -> None:
        """Extend the leases it names and say which of them still stand."""
        peer = message.sender.peer()
        said: dict[_Standing, list[str]] = {standing: [] for standing in _Standing}
        finished: list[str] = []
        for item in message.items:
            key = peer, RequestId(item.request_id)
            hold = self._holds.find(item.name, *key)
            if hold is not None and hold.state is HoldState.HELD:
                finished.append(item.request_id)
            self._askers.note(hold or item.name, *key)
            standing = self._standing(hold, key, message, item)
            if standing is not None:
                said[standing].append(item.request_id)
        self._space.send(
            peer,
            Renewed(
                self._space.sender,
                message.serial,
                self._space.timing.kv_lease_duration,
                said[_Standing.KNOWN],
                said[_Standing.SERVED],
                said[_Standing.UNKNOWN],
                said[_Standing.REFUSED],
                finished,
            ),
        )

    def _standing(
        self, hold: Hold | None, key: DeliveryKey, message: Renew, item: RenewItem
    ) -> _Standing | None:
        """Of the hold that an item means, if there is one; None where nothing can be said yet."""
        # Whoever says what it READs does so now: what became of a write before that is past.
        delivery = self._holds.delivery(key) if item.blocks is None else None
        if delivery is not None and delivery.state is DeliveryState.FAILED:
            # Its `Fail` was lost; a wanter that was told would not ask any more.
            self._deliveries.repeat_answer(delivery)
            return None
        if delivery is not None and delivery.state is DeliveryState.WRITTEN:
            if delivery.hold.state is HoldState.HELD:
                # Until it has been checked over there.
                self._extend(delivery.hold)
            return _Standing.SERVED
        if hold is not None and wanter_of(*key) in hold.parted:
            return _Standing.UNKNOWN
        if hold is not None and self._is_elsewhere(hold, item):
            self._space.counts[Counted.REFERENCES_REFUSED] += 1
            self._space.note(hold.request_id, "reference_refused", by=str(key[0]))
            return _Standing.REFUSED
        if hold is not None and hold.state in (HoldState.COMPUTING, HoldState.HELD):
            return self._keep(hold, delivery, message, item)
        if self._registrations.waits(key):
            return _Standing.KNOWN
        if self._holds.foretold.may_begin(item.name):
            return None
        served = self._holds.ended.served(item.name, *key)
        return _Standing.SERVED if served else _Standing.UNKNOWN

    def _keep(
        self, hold: Hold, delivery: Delivery | None, message: Renew, item: RenewItem
    ) -> _Standing | None:
        """Of a hold that is there for whoever asks."""
        standing = None
        # No answer, once it has waited too long: what was granted before stands. None either about
        # blocks that we have not been told of: `known` would confirm them.
        if item.blocks is not None and hold.state is HoldState.COMPUTING:
            self._note_awaited(hold, message, item)
        elif not self._has_waited_too_long(hold):
            self._extend(hold)
            standing = _Standing.KNOWN
            self._note_awaited(hold, message, item)
        offered = delivery is not None and delivery.state is DeliveryState.OFFERED
        if delivery is not None and offered and item.name.hold_id is None:
            self._deliveries.offer(delivery)
        return standing

    def _extend(self, hold: Hold) -> None:
        duration_s = self._space.timing.kv_lease_duration
        self._leases.renew(hold.request_id, self._space.now, duration_s)

    def _is_elsewhere(self, hold: Hold, item: RenewItem) -> bool:
        """Whether somebody was sent to blocks that are not this hold's."""
        if hold.state is not HoldState.HELD or item.blocks is None:
            return False
        own = self._space.geometries[self._space.me.rank]
        windowed = any(group.window is not None for group in own)
        return not hold.lies_in(item.blocks, item.num_tokens or 0, exactly=windowed)

    def _has_waited_too_long(self, hold: Hold) -> bool:
        """Whether nobody has asked for its KV for so long that its lease is renewed no more."""
        if hold.state is not HoldState.HELD or hold.is_asked_for:
            return False
        limit_s = self._space.timing.hold_limit_s + (hold.keep_s or 0.0)
        return self._space.now - hold.held_since > limit_s

    def _note_awaited(self, hold: Hold, message: Renew, item: RenewItem) -> None:
        """Somebody wants this: find out when it dies, so that nothing is kept for the dead."""
        peer: PeerRank = message.sender.peer()
        if message.host is None or message.port is None or peer in hold.awaited_by:
            return
        address = InstanceAddress(peer.engine_id, message.host, message.port)
        mode = TransferMode.PULL if item.reads else TransferMode.PUSH
        if self._space.use_peer(address, hold.request_id, mode) is not None:
            hold.awaited_by[peer] = address
            self._space.watch(address)
        elif not self._space.allows(address):
            self._space.refuse_peer(address)
