"""The side that has the KV (P): holds it under a lease until everybody who wants it has it.

Decides which holds an event is about, and what a good-bye means for one. Refuses to know what a
wanter does (`wanter`), and each step on a hold's way: `registrations` (who wants it), `deliveries`
(how a registered rank is served), `renewals` (what keeps it), `hold_endings` (when its blocks go
back).
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcourier.core.askers import Askers
from kvcourier.core.deliveries import Deliveries
from kvcourier.core.events import (
    BlockGroups,
    HoldBegun,
    PrefillAdvanced,
    PrefillFinished,
)
from kvcourier.core.hold_endings import HoldEndings
from kvcourier.core.hold_table import HoldTable
from kvcourier.core.holds import Delivery, DeliveryKey, Hold
from kvcourier.core.leases import LeaseTable
from kvcourier.core.lifecycle import DeliveryState, HoldEvent, HoldState
from kvcourier.core.messages import Cancel, Collected, Digest, Fenced
from kvcourier.core.outcomes import Outcome, Side
from kvcourier.core.partings import Partings
from kvcourier.core.peers import Peer
from kvcourier.core.registrations import Registrations
from kvcourier.core.renewals import Renewals
from kvcourier.core.witness import Witness
from kvcourier.core.workspace import Counted, Owner, TimerKind, Workspace
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import Incarnation, InstanceAddress, PeerRank, RequestId

_SERVED = frozenset({DeliveryState.OFFERED, DeliveryState.WRITTEN})


class Holder:
    """All holds of one rank.

    Attributes:
        holds: every hold that is not released.
        registrations: told what wanters want.
        renewals: told what they still want, in their heartbeats.
        witness: told of the digests that it has asked for.
    """

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self.holds = HoldTable(space)
        self._leases = LeaseTable()
        self.witness = Witness(space)
        self._askers = Askers(space)
        self._partings = Partings(space, self.holds.rendezvous, self.holds.ended)
        self._deliveries = deliveries = Deliveries(space)
        self._endings = HoldEndings(space, self.holds, self._leases, deliveries, self.witness)
        self.registrations = Registrations(space, self.holds, deliveries, self._endings)
        self.renewals = Renewals(
            space, self.holds, self._leases, deliveries, self.registrations, self._askers
        )
        self.on_timer: Mapping[TimerKind, Callable[[Any], None]] = {
            TimerKind.REGISTRATION: self._on_registration_expired,
            TimerKind.DELIVERY: self._on_delivery_overdue,
            TimerKind.HOLD_QUARANTINE: self._on_quarantine_over,
        }

    def is_awaited(self, request_id: RequestId) -> bool:
        """Whether somebody has registered for this prompt."""
        hold = self.holds.get(request_id)
        return hold is not None and bool(hold.deliveries)

    def next_expiry(self) -> float | None:
        """When the next lease runs out."""
        return self._leases.next_expiry()

    # From the engine.

    def begin(self, event: HoldBegun) -> None:
        """A prompt that somebody wants was accepted.

        Raises:
            LocalProtocolError: the request or its transfer key is held already.
        """
        hold = Hold(event.request_id, event.hold_id, event.key, event.rebindable)
        self.holds.begin(hold)
        if event.key is not None:
            self._space.stories.alias(event.key.transfer_id, event.request_id)
        self._space.note(event.request_id, "hold_begun")
        self._askers.meet(hold)
        for key in self.holds.rendezvous.meet(event.request_id):
            if key in self._partings:
                parting = self._partings.take(key)
                if hold.is_meant_by(parting.name):
                    self._endings.part(hold, parting)
            else:
                self.registrations.meet(hold, key)

    def advance_prefill(self, event: PrefillAdvanced) -> None:
        """More KV of a prompt is written; nothing to do if its hold is over, or has finished."""
        hold = self.holds.get(event.request_id)
        if hold is None or hold.state is not HoldState.COMPUTING:
            return
        hold.write(event.block_ids, event.num_tokens, event.layers)
        for delivery in hold.deliveries.values():
            self._deliveries.advance(delivery)

    def roll_back(self, request_id: RequestId) -> None:
        """A prompt will be computed anew; nothing to do if its hold is over."""
        hold = self.holds.get(request_id)
        if hold is None or hold.state is not HoldState.COMPUTING:
            return
        hold.roll_back()
        self._space.note(request_id, "rolled_back", num_registered=len(hold.deliveries))
        for delivery in hold.deliveries.values():
            self._deliveries.roll_back(delivery)

    def finish_prefill(self, event: PrefillFinished) -> None:
        """All KV of a prompt is written.

        Raises:
            LocalProtocolError: no such hold, or its prefill had finished before.
        """
        hold = self.holds.get(event.request_id)
        if hold is None:
            raise LocalProtocolError(f"{event.request_id} is not held")
        hold.advance(HoldEvent.PREFILL_FINISHED)
        hold.block_ids, hold.num_tokens, hold.lent = event.block_ids, event.num_tokens, True
        hold.held_since, hold.keep_s = self._space.now, event.keep_s
        hold.write(event.block_ids, event.num_tokens, None)
        hold.continuation = event.continuation
        self._space.note(
            event.request_id,
            "prefill_finished",
            num_tokens=event.num_tokens,
            num_registered=len(hold.deliveries),
        )
        lease_s = self._space.timing.kv_lease_duration if event.keep_s is None else event.keep_s
        self._leases.grant(event.request_id, self._space.now, lease_s)
        for delivery in list(hold.deliveries.values()):
            self._deliveries.advance(delivery)
        self._endings.settle(hold)
        self._askers.tell_all(hold)

    def abort(self, request_id: RequestId, block_ids: BlockGroups | None) -> bool:
        """The engine ended the request; False if it is none of ours.

        `block_ids`, if given, are kept out of use until RELEASED is told.
        """
        hold = self.holds.get(request_id)
        if hold is None:
            if block_ids is not None:
                # Whatever became of it, nothing is in flight from them.
                self._space.tell(Side.HOLD, request_id, Outcome.RELEASED, block_ids=block_ids)
            return block_ids is not None
        if block_ids is not None and not hold.lent:
            hold.block_ids, hold.lent = block_ids, True
        if hold.state is not HoldState.QUARANTINED:
            self._endings.end(hold, None, "the prefill instance ended the request")
        return True

    def close(self) -> None:
        """Our process ends: whoever waits for us need not find out by itself."""
        reason = "the prefill instance is shutting down"
        self.registrations.refuse_waiting(reason)
        for hold in self.holds:
            if hold.state is not HoldState.QUARANTINED:
                self._endings.end(hold, None, reason)

    # From wanters.

    def on_cancel(self, message: Cancel) -> None:
        """A wanter's rank wants no more writes; answered at once unless something is in flight."""
        peer, request_id = message.sender.peer(), RequestId(message.request_id)
        key = (peer, request_id)
        newest = self.registrations.newest(key)
        if newest is not None and newest.message.epoch > message.epoch:
            self._space.counts[Counted.STALE_REFUSED] += 1
            return
        delivery = self.holds.delivery(key)
        if message.for_now and self._is_being_served(message, key, delivery):
            self._askers.tell(peer, request_id)
            return
        self.registrations.cancel(key, message)
        if delivery is not None:
            self._deliveries.end(delivery)
        if delivery is None or delivery.state is not DeliveryState.QUARANTINED:
            self._space.send(peer, Fenced(self._space.sender, message.request_id, message.epoch))
        hold = self.holds.find(message.name, peer, request_id)
        if message.for_now:
            if hold is not None:
                self._askers.note(hold, peer, request_id)
                self._askers.tell_all(hold)
        elif hold is not None:
            self._endings.part(hold, message)
        else:
            self._partings.wait(key, message)

    def on_collected(self, message: Collected) -> None:
        """A wanter's rank has read the KV, or does not need it."""
        key = message.sender.peer(), RequestId(message.request_id)
        self.registrations.withdraw(key)
        delivery = self.holds.delivery(key)
        if delivery is not None:
            self._deliveries.end(delivery)
        hold = self.holds.find(message.name, *key)
        if hold is not None:
            self._endings.part(hold, message)
        elif not self.holds.ended.served(message.name, *key):
            self._partings.wait(key, message)

    def on_digest(self, message: Digest) -> None:
        """A wanter's rank has what it wanted, or soon will, and asks what it sums up to."""
        hold = self.holds.find(message.name, message.sender.peer(), RequestId(message.request_id))
        if hold is not None and hold.state is HoldState.HELD:
            self.witness.ask(hold, message)
        elif not (hold or self.holds.foretold.may_begin(message.name)):
            # Otherwise it is asked again.
            self.witness.refuse(message, "the prefill instance does not hold this KV any more")

    # From the world.

    def on_peer_connected(self, peer: Peer) -> None:
        """Registrations that waited for this peer can be acknowledged and served."""
        self.registrations.on_connected(peer)
        for delivery in self.holds.deliveries_to(peer.address):
            self._deliveries.advance(delivery)

    def on_peer_failed(self, address: InstanceAddress, reason: str) -> None:
        """A peer could not be connected, or is gone: nothing more can be posted to it."""
        self.registrations.refuse_waiting(reason, at=address)
        for delivery in self.holds.deliveries_to(address):
            delivery.is_hopeless = True
            self._deliveries.fail(delivery, reason)

    def on_peer_lost(self, address: InstanceAddress, incarnation: Incarnation, reason: str) -> None:
        """That life is over."""
        self.on_peer_failed(address, reason)
        for hold in self.holds:
            if hold.is_for(address.engine_id, incarnation):
                self._endings.on_wanter_lost(hold, address, reason)

    def on_peer_silent(self, address: InstanceAddress, reason: str) -> None:
        """Nothing more is posted to it. Its prompts are kept, for it may still ask."""
        for delivery in self.holds.deliveries_to(address):
            self._deliveries.fail(delivery, reason)
        for hold in self.holds:
            if address in hold.awaited_by.values():
                self._space.note(hold.request_id, "wanter_silent", reason=reason)

    def needed_at(self, address: InstanceAddress) -> set[PeerRank]:
        """The ranks there that are written to, or will be, or for which something is kept."""
        written_to = {
            delivery.registration.peer
            for delivery in self.holds.deliveries_to(address)
            if self._deliveries.is_alive(delivery)
        }
        return written_to | {
            peer
            for hold in self.holds
            if hold.state in (HoldState.COMPUTING, HoldState.HELD) and not hold.forsaken
            for peer, listens_at in hold.awaited_by.items()
            if listens_at == address and peer.rank not in hold.served
        }

    def on_landed(self, owner: Owner, reason: str | None) -> None:
        """A write is terminal; `reason` says why it failed, None that it did not."""
        _, request_id, peer = owner
        hold = self.holds[request_id]
        for delivery in hold.deliveries.values():
            if delivery.registration.peer == peer and delivery.state in (
                DeliveryState.WRITING,
                DeliveryState.QUARANTINED,
            ):
                self._deliveries.on_landed(delivery, reason)
        self._endings.on_landed(hold)

    # Time.

    def expire_leases(self) -> None:
        """End every hold whose lease has run out."""
        for request_id in self._leases.take_expired(self._space.now):
            self._endings.expire(self.holds[request_id])

    def _on_registration_expired(self, key: DeliveryKey) -> None:
        waiting = self._partings if key in self._partings else self.registrations
        waiting.expire(key)

    def _on_delivery_overdue(self, key: DeliveryKey) -> None:
        delivery = self.holds.delivery(key)
        assert delivery is not None, "its timer ends with it"
        self._deliveries.on_overdue(delivery)

    def _on_quarantine_over(self, request_id: RequestId) -> None:
        self._endings.abandon(self.holds[request_id])

    def _is_being_served(
        self, message: Cancel, key: DeliveryKey, delivery: Delivery | None
    ) -> bool:
        """Whether what is taken back comes all the same: nothing stands in its way any more."""
        if delivery is None:
            return self.holds.ended.served(message.name, *key)
        if delivery.hold.state is not HoldState.HELD:
            return False
        return self._deliveries.is_alive(delivery) or delivery.state in _SERVED
