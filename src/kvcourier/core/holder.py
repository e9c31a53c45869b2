"""The side that has the KV (P): holds it under a lease until everybody who wants it has it.

Decides which hold a message means, how long it is kept, when everybody is served and when the
blocks go back. Refuses to know how a registered rank is served (`deliveries`) and what a wanter
does (`wanter`).

Blocks go back in exactly one place, `_release`, and only when nothing of the hold is in flight.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from kvcourier.config import TransferMode
from kvcourier.core.bindings import binding_of
from kvcourier.core.commands import Abandon
from kvcourier.core.deliveries import Deliveries
from kvcourier.core.events import (
    BlockGroups,
    HoldBegun,
    OperationId,
    PrefillAdvanced,
    PrefillFinished,
)
from kvcourier.core.holds import (
    Delivery,
    DeliveryKey,
    EndedHolds,
    Hold,
    Registration,
    Wanter,
    claim_of,
    wanter_of,
)
from kvcourier.core.leases import LeaseTable
from kvcourier.core.lifecycle import HOLD, DeliveryState, HoldEvent, HoldState, step
from kvcourier.core.messages import (
    UNASKED,
    Cancel,
    Collected,
    Digest,
    Fenced,
    HoldName,
    Register,
    Renew,
    Renewed,
    RenewItem,
)
from kvcourier.core.outcomes import NOT_HELD, Outcome, Side
from kvcourier.core.partings import CANCELLED, Parting, Partings, how
from kvcourier.core.peers import Peer, PeerState
from kvcourier.core.rendezvous import Rendezvous
from kvcourier.core.witness import Witness
from kvcourier.core.workspace import Counted, Owner, TimerKind, Workspace
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import (
    Incarnation,
    InstanceAddress,
    PeerRank,
    RequestId,
    hold_serial,
)

_MAX_REMEMBERED = 4096
_GRACE_RESENDS = 2
_TAKEN_BACK = frozenset({DeliveryState.CANCELLED, DeliveryState.QUARANTINED})
_SERVED = frozenset({DeliveryState.OFFERED, DeliveryState.WRITTEN})


class Holder:
    """All holds of one rank, and the registrations that wait for theirs."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._deliveries = Deliveries(space)
        self._witness = Witness(space)
        self._holds: dict[RequestId, Hold] = {}
        self._by_delivery: dict[DeliveryKey, Delivery] = {}
        self._waiting: dict[DeliveryKey, Registration] = {}
        self._newest_hold = 0
        self._rendezvous: Rendezvous[DeliveryKey] = Rendezvous()
        self._leases = LeaseTable()
        self._ended = EndedHolds(_MAX_REMEMBERED)
        self._partings = Partings(space, self._rendezvous, self._ended)
        self._cancelled: OrderedDict[DeliveryKey, Cancel] = OrderedDict()
        self._foretold: OrderedDict[str, float] = OrderedDict()
        self._askers: OrderedDict[object, dict[PeerRank, RequestId]] = OrderedDict()
        self.on_timer: Mapping[TimerKind, Callable[[Any], None]] = {
            TimerKind.REGISTRATION: self._on_registration_expired,
            TimerKind.DELIVERY: self._on_delivery_overdue,
            TimerKind.HOLD_QUARANTINE: self._on_quarantine_over,
        }

    @property
    def holds(self) -> list[Hold]:
        """Every hold that is not released."""
        return list(self._holds.values())

    @property
    def num_waiting(self) -> int:
        """Registrations for prompts not seen yet."""
        return len(self._waiting)

    def is_awaited(self, request_id: RequestId) -> bool:
        """Whether somebody has registered for this prompt."""
        hold = self._holds.get(request_id)
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
        self._rendezvous.open(event.request_id, event.key)
        hold = Hold(event.request_id, event.hold_id, event.key, event.rebindable)
        self._holds[event.request_id] = hold
        if event.key is not None:
            self._space.stories.alias(event.key.transfer_id, event.request_id)
        self._space.note(event.request_id, "hold_begun")
        serial = hold_serial(event.hold_id, self._space.me.incarnation)
        self._newest_hold = max(self._newest_hold, serial or 0)
        self._foretold.pop(event.hold_id, None)
        for name in (event.hold_id, event.key):
            hold.askers |= self._askers.pop(name, {})
        for key in self._rendezvous.meet(event.request_id):
            self._space.cancel_timer(TimerKind.REGISTRATION, key)
            if key in self._partings:
                self._serve_parting(hold, self._partings.take(key))
            else:
                self._attach(hold, self._waiting.pop(key))

    def advance_prefill(self, event: PrefillAdvanced) -> None:
        """More KV of a prompt is written; nothing to do if its hold is over, or has finished."""
        hold = self._holds.get(event.request_id)
        if hold is None or hold.state is not HoldState.COMPUTING:
            return
        hold.write(event.block_ids, event.num_tokens, event.layers)
        for delivery in hold.deliveries.values():
            self._deliveries.advance(delivery)

    def roll_back(self, request_id: RequestId) -> None:
        """A prompt will be computed anew; nothing to do if its hold is over."""
        hold = self._holds.get(request_id)
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
        hold = self._holds.get(event.request_id)
        if hold is None:
            raise LocalProtocolError(f"{event.request_id} is not held")
        hold.state = step(HOLD, hold.state, HoldEvent.PREFILL_FINISHED, event.request_id)
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
        lease_s = self._lease_s if event.keep_s is None else event.keep_s
        self._leases.grant(event.request_id, self._space.now, lease_s)
        for delivery in list(hold.deliveries.values()):
            self._deliveries.advance(delivery)
        self._settle(hold)
        self._tell_finished(hold)

    def abort(self, request_id: RequestId, block_ids: BlockGroups | None) -> bool:
        """The engine ended the request; False if it is none of ours.

        `block_ids`, if given, are kept out of use until RELEASED is told.
        """
        hold = self._holds.get(request_id)
        if hold is None:
            if block_ids is not None:
                # Whatever became of it, nothing is in flight from them.
                self._space.tell(Side.HOLD, request_id, Outcome.RELEASED, block_ids=block_ids)
            return block_ids is not None
        if block_ids is not None and not hold.lent:
            hold.block_ids, hold.lent = block_ids, True
        if hold.state is not HoldState.QUARANTINED:
            self._end(hold, None, "the prefill instance ended the request")
        return True

    def close(self) -> None:
        """Our process ends: whoever waits for us need not find out by itself."""
        reason = "the prefill instance is shutting down"
        for key, registration in list(self._waiting.items()):
            self._drop_waiting(key)
            self._deliveries.refuse(registration, reason)
        for hold in self.holds:
            if hold.state is not HoldState.QUARANTINED:
                self._end(hold, None, reason)

    # From wanters.

    def on_register(self, message: Register) -> None:
        """A wanter's rank reserved blocks. Idempotent: it is sent again until acknowledged."""
        registration = Registration.of(message)
        known = self._by_delivery.get(registration.key)
        if known is not None and message.epoch > known.registration.message.epoch:
            self._serve_again(known, registration)
            return
        if known is not None:
            self._deliveries.repeat_answer(known)
            return
        problem = _problem(message)
        if not self._space.allows(registration.address):
            problem = self._space.refuse_peer(registration.address)
        cancelled = self._cancelled.get(registration.key)
        if cancelled is not None and cancelled.epoch >= message.epoch:
            # The two come by different ways, so a cancel can overtake what it cancels; its
            # blocks are somebody else's by now.
            if cancelled.for_now:
                self._space.counts[Counted.MESSAGES_IGNORED] += 1
                return
            problem = "the registration was cancelled before it came"
        if problem:
            self._deliveries.refuse(registration, problem)
            return
        request_id = self._rendezvous.find(registration.claim)
        if request_id is not None and not self._holds[request_id].is_meant_by(message.name):
            self._deliveries.refuse(registration, NOT_HELD)
        elif request_id is not None:
            self._attach(self._holds[request_id], registration)
        else:
            self._wait(registration)

    def on_cancel(self, message: Cancel) -> None:
        """A wanter's rank wants no more writes; answered at once unless something is in flight."""
        peer = message.sender.peer()
        key = (peer, RequestId(message.request_id))
        delivery = self._by_delivery.get(key)
        newest = self._waiting.get(key) or (delivery.registration if delivery is not None else None)
        if newest is not None and newest.message.epoch > message.epoch:
            self._space.counts[Counted.STALE_REFUSED] += 1
            return
        if message.for_now and self._is_being_served(message, key, delivery):
            self._tell(peer, finished=[message.request_id])
            return
        self._drop_waiting(key)
        self._remember_cancelled(key, message)
        if delivery is not None:
            self._deliveries.end(delivery)
        if delivery is None or delivery.state is not DeliveryState.QUARANTINED:
            self._space.send(peer, Fenced(self._space.sender, message.request_id, message.epoch))
        hold = self._find(message.name, peer, RequestId(message.request_id))
        if message.for_now:
            if hold is not None:
                self._note_asker(hold, peer, key[1])
                self._tell_finished(hold)
        elif hold is not None:
            self._serve(hold, message, CANCELLED)
        else:
            self._partings.wait(key, message)

    def on_collected(self, message: Collected) -> None:
        """A wanter's rank has read the KV, or does not need it."""
        peer = message.sender.peer()
        key = (peer, RequestId(message.request_id))
        self._drop_waiting(key)
        if key in self._by_delivery:
            self._deliveries.end(self._by_delivery[key])
        hold = self._find(message.name, peer, RequestId(message.request_id))
        if hold is not None:
            self._serve(hold, message, how(message))
        elif not self._ended.served(message.name, peer, RequestId(message.request_id)):
            self._partings.wait(key, message)

    def on_digest(self, message: Digest) -> None:
        """A wanter's rank has what it wanted, or soon will, and asks what it sums up to."""
        hold = self._find(message.name, message.sender.peer(), RequestId(message.request_id))
        if hold is not None and hold.state is HoldState.HELD:
            self._witness.ask(hold, message)
        elif not (hold or self._may_begin(message.name)):
            # Otherwise it is asked again.
            self._witness.refuse(message, "the prefill instance does not hold this KV any more")

    def on_renew(self, message: Renew) -> None:
        """A heartbeat: extend the leases it names and say which of them still stand."""
        peer = message.sender.peer()
        known: list[str] = []
        served: list[str] = []
        unknown: list[str] = []
        refused: list[str] = []
        finished: list[str] = []
        for item in message.items:
            request_id = RequestId(item.request_id)
            hold = self._find(item.name, peer, request_id)
            # Whoever says what it READs does so now: what became of a write before that is past.
            reads = item.blocks is not None
            delivery = None if reads else self._by_delivery.get((peer, request_id))
            if hold is not None and hold.state is HoldState.HELD:
                finished.append(item.request_id)
            self._note_asker(hold or item.name, peer, request_id)
            if delivery is not None and delivery.state is DeliveryState.FAILED:
                # Its `Fail` was lost; a wanter that was told would not ask any more.
                self._deliveries.repeat_answer(delivery)
            elif delivery is not None and delivery.state is DeliveryState.WRITTEN:
                served.append(item.request_id)
                if hold is not None and hold.state is HoldState.HELD:
                    # Until it has been checked over there.
                    self._leases.renew(hold.request_id, self._space.now, self._lease_s)
            elif hold is not None and wanter_of(peer, request_id) in hold.parted:
                unknown.append(item.request_id)
            elif hold is not None and self._is_elsewhere(hold, item):
                self._space.counts[Counted.REFERENCES_REFUSED] += 1
                self._space.note(hold.request_id, "reference_refused", by=str(peer))
                refused.append(item.request_id)
            elif hold is not None and hold.state in (HoldState.COMPUTING, HoldState.HELD):
                # No answer, once it has waited too long: what was granted before stands. None
                # either about blocks that we have not been told of: `known` would confirm them.
                if reads and hold.state is HoldState.COMPUTING:
                    self._note_awaited(hold, peer, message, item)
                elif not self._has_waited_too_long(hold):
                    self._leases.renew(hold.request_id, self._space.now, self._lease_s)
                    known.append(item.request_id)
                    self._note_awaited(hold, peer, message, item)
                offered = delivery is not None and delivery.state is DeliveryState.OFFERED
                if delivery is not None and offered and item.name.hold_id is None:
                    self._deliveries.offer(delivery)
            elif (peer, request_id) in self._waiting:
                known.append(item.request_id)
            elif self._may_begin(item.name):
                continue
            elif self._ended.served(item.name, peer, request_id):
                served.append(item.request_id)
            else:
                unknown.append(item.request_id)
        self._space.send(
            peer,
            Renewed(
                self._space.sender,
                message.serial,
                self._lease_s,
                known,
                served,
                unknown,
                refused,
                finished,
            ),
        )

    # From the world.

    def on_peer_connected(self, peer: Peer) -> None:
        """Registrations that waited for this peer can be acknowledged and served."""
        for registration in list(self._waiting.values()):
            if registration.address == peer.address:
                self._acknowledge_waiting(registration, peer)
        for delivery in self._deliveries_to(peer.address):
            self._deliveries.advance(delivery)

    def on_peer_failed(self, address: InstanceAddress, reason: str) -> None:
        """A peer could not be connected, or is gone: nothing more can be posted to it."""
        for key, registration in list(self._waiting.items()):
            if registration.address == address:
                self._drop_waiting(key)
                self._deliveries.refuse(registration, reason)
        for delivery in self._deliveries_to(address):
            delivery.is_hopeless = True
            self._deliveries.fail(delivery, reason)

    def on_peer_lost(self, address: InstanceAddress, incarnation: Incarnation, reason: str) -> None:
        """That life is over, and nobody else may have what was promised to it."""
        self.on_peer_failed(address, reason)
        for hold in self.holds:
            if not hold.is_for(address.engine_id, incarnation):
                continue
            if hold.may_be_unbound():
                if hold.bound is not None:
                    self._unbind(hold, hold.bound, reason)
                self._stop_awaiting(hold, address)
            else:
                hold.forsaken = hold.forsaken or reason
                self._settle(hold)

    def on_peer_silent(self, address: InstanceAddress, reason: str) -> None:
        """Nothing more is posted to it. Its prompts are kept, for it may still ask."""
        for delivery in self._deliveries_to(address):
            self._deliveries.fail(delivery, reason)
        for hold in self.holds:
            if address in hold.awaited_by.values():
                self._space.note(hold.request_id, "wanter_silent", reason=reason)

    def needed_at(self, address: InstanceAddress) -> set[PeerRank]:
        """The ranks there that are written to, or will be, or for which something is kept."""
        written_to = {
            delivery.registration.peer
            for delivery in self._deliveries_to(address)
            if self._deliveries.is_alive(delivery)
        }
        return written_to | {
            peer
            for hold in self._holds.values()
            if hold.state in (HoldState.COMPUTING, HoldState.HELD) and not hold.forsaken
            for peer, listens_at in hold.awaited_by.items()
            if listens_at == address and peer.rank not in hold.served
        }

    def on_landed(self, owner: Owner, reason: str | None) -> None:
        """A write is terminal; `reason` says why it failed, None that it did not."""
        _, request_id, peer = owner
        hold = self._holds[request_id]
        for delivery in hold.deliveries.values():
            if delivery.registration.peer == peer and delivery.state in (
                DeliveryState.WRITING,
                DeliveryState.QUARANTINED,
            ):
                self._deliveries.on_landed(delivery, reason)
        if hold.state is HoldState.QUARANTINED and self._is_quiet(hold):
            self._release(hold, HoldEvent.QUIESCED)
        else:
            self._settle(hold)

    def on_digest_taken(self, owner: Owner, operation_id: OperationId, digest: int) -> None:
        """One of the digests that a wanter has asked for is there."""
        self._witness.on_taken(owner, operation_id, digest)

    def on_digest_refused(self, owner: Owner, reason: str) -> None:
        """One of them cannot be taken."""
        self._witness.on_refused(owner, reason)

    def expire_leases(self) -> None:
        """End every hold whose lease has run out."""
        for request_id in self._leases.take_expired(self._space.now):
            hold = self._holds[request_id]
            if hold.keep_s is not None and hold.bound is None:
                # Nobody has come for it, which is no failure.
                self._space.counts[Counted.HISTORIES_EXPIRED] += 1
                self._end(hold, None, "it was kept as long as agreed")
                continue
            self._space.counts[Counted.LEASES_EXPIRED] += 1
            reason = "the lease ran out before the KV was collected"
            self._end(hold, Outcome.SEND_FAILED, reason)

    def _on_registration_expired(self, key: DeliveryKey) -> None:
        if key in self._partings:
            self._partings.expire(key)
            return
        registration = self._waiting[key]
        self._space.counts[Counted.REGISTRATIONS_EXPIRED] += 1
        self._drop_waiting(key)
        self._deliveries.refuse(registration, "no such prompt came to the prefill instance in time")

    def _on_delivery_overdue(self, key: DeliveryKey) -> None:
        self._deliveries.on_overdue(self._by_delivery[key])

    def _on_quarantine_over(self, request_id: RequestId) -> None:
        """The longest any write can take is over: stop waiting for its end."""
        hold = self._holds[request_id]
        self._space.counts[Counted.QUARANTINES_EXPIRED] += 1
        for delivery in hold.deliveries.values():
            for operation_id in self._space.flights.of(delivery.owner):
                self._space.emit(Abandon(operation_id))
                self._space.flights.land(operation_id)
        self._release(hold, HoldEvent.QUIESCED)

    # Registrations.

    def _attach(self, hold: Hold, registration: Registration) -> None:
        """A registration meets its hold."""
        message = registration.message
        self._supersede(hold, registration)
        if not hold.bind(registration.peer, registration.request_id, message.consumers):
            self._space.leave_peer(registration.address, registration.request_id)
            self._deliveries.refuse(registration, "this prompt's KV is promised to another request")
            return
        hold.binding = binding_of(message.epoch)
        delivery = Delivery(hold, registration, epoch=message.epoch)
        hold.deliveries[registration.key] = delivery
        self._by_delivery[registration.key] = delivery
        self._space.stories.alias(registration.request_id, hold.request_id)
        self._space.note(
            hold.request_id,
            "registered",
            by=str(registration.peer),
            first_token=message.first_token,
            while_computing=hold.state is HoldState.COMPUTING,
        )
        peer = self._use_peer(registration)
        if peer is None:
            self._deliveries.fail(delivery, self._space.refuse_peer(registration.address))
        else:
            self._space.watch(registration.address)
            self._deliveries.advance(delivery)

    def _supersede(self, hold: Hold, registration: Registration) -> None:
        """The router has bound the prompt to another wanter: the one before gets it no more.

        It may not have heard of that yet, and its good-bye may come after this, or never.
        """
        former, binding = hold.bound, binding_of(registration.message.epoch)
        if former in (None, registration.wanter) or binding <= hold.binding:
            return
        if not hold.may_be_unbound():
            return
        reason = "the router has bound this prompt to another request"
        for delivery in hold.deliveries.values():
            if delivery.registration.wanter == former:
                self._deliveries.end_with_hold(delivery, reason)
        self._unbind(hold, former, reason)

    def _serve_again(self, failed: Delivery, registration: Registration) -> None:
        """What has failed is asked for once more."""
        hold, message = failed.hold, registration.message
        alive = hold.state in (HoldState.COMPUTING, HoldState.HELD)
        if not failed.may_be_repeated or not alive:
            self._deliveries.refuse(registration, failed.reason or "it is not served again")
            return
        epoch = max(message.epoch, failed.epoch + 1)
        delivery = Delivery(hold, registration, epoch=epoch)
        hold.deliveries[registration.key] = self._by_delivery[registration.key] = delivery
        self._space.note(hold.request_id, "registered_again", by=str(registration.peer))
        if self._use_peer(registration) is None:
            self._deliveries.fail(delivery, self._space.refuse_peer(registration.address))
        else:
            self._space.watch(registration.address)
            self._deliveries.advance(delivery)

    def _wait(self, registration: Registration) -> None:
        """Keep a registration for a prompt that has not come yet."""
        ended = self._ended.find(registration.message.name)
        if ended is not None:
            self._deliveries.refuse(registration, f"{NOT_HELD}: {ended.reason}")
            return
        name = registration.message.name
        if name.hold_id is not None and not self._may_begin(name):
            self._deliveries.refuse(registration, NOT_HELD)
            return
        full = len(self._waiting) >= self._space.limits.max_waiting_registrations
        if full and registration.key not in self._waiting:
            self._deliveries.refuse(registration, "too many registrations wait for prompts")
            return
        peer = self._use_peer(registration)
        if peer is None:
            self._deliveries.refuse(registration, self._space.refuse_peer(registration.address))
            return
        if registration.key not in self._waiting:
            self._space.set_timer(
                TimerKind.REGISTRATION, registration.key, self._space.timing.registration_ttl_s
            )
        self._waiting[registration.key] = registration
        self._rendezvous.wait(registration.key, registration.claim)
        self._acknowledge_waiting(registration, peer)

    def _acknowledge_waiting(self, registration: Registration, peer: Peer) -> None:
        if peer.state is PeerState.CONNECTED and registration.peer.incarnation == peer.incarnation:
            self._deliveries.acknowledge(registration)

    def _serve_parting(self, hold: Hold, message: Parting) -> None:
        if hold.is_meant_by(message.name):
            self._serve(hold, message, how(message))

    def _note_awaited(self, hold: Hold, peer: PeerRank, message: Renew, item: RenewItem) -> None:
        """Somebody wants this: find out when it dies, so that nothing is kept for the dead."""
        if message.host is None or message.port is None or peer in hold.awaited_by:
            return
        address = InstanceAddress(peer.engine_id, message.host, message.port)
        mode = TransferMode.PULL if item.reads else TransferMode.PUSH
        if self._space.use_peer(address, hold.request_id, mode) is not None:
            hold.awaited_by[peer] = address
            self._space.watch(address)
        elif not self._space.allows(address):
            self._space.refuse_peer(address)

    def _note_asker(self, hold: Hold | HoldName, peer: PeerRank, request_id: RequestId) -> None:
        """Whom to tell when a prompt is finished for which nobody has registered."""
        if isinstance(hold, Hold):
            asked_by = hold.askers
        elif (exact := hold.hold_id or hold.key()) is not None:
            asked_by = self._askers.setdefault(exact, {})
        else:
            return
        if peer in asked_by or len(asked_by) < self._space.limits.max_ranks:
            asked_by[peer] = request_id
        _forget_oldest(self._askers)

    def _tell_finished(self, hold: Hold) -> None:
        """Those who wait for the prompt without a registration may reserve their blocks now."""
        if hold.state is not HoldState.HELD:
            return
        for peer, request_id in hold.askers.items():
            delivery = hold.deliveries.get((peer, request_id))
            if delivery is None or delivery.state in _TAKEN_BACK:
                self._tell(peer, finished=[request_id])

    def _tell(self, peer: PeerRank, finished: list[str]) -> None:
        """Say what nobody has asked."""
        sender = self._space.sender
        self._space.send(peer, Renewed(sender, UNASKED, 0.0, [], [], [], finished=finished))

    def _is_being_served(
        self, message: Cancel, key: DeliveryKey, delivery: Delivery | None
    ) -> bool:
        """Whether what is taken back comes all the same: nothing stands in its way any more."""
        if delivery is None:
            return self._ended.served(message.name, *key)
        if delivery.hold.state is not HoldState.HELD:
            return False
        return self._deliveries.is_alive(delivery) or delivery.state in _SERVED

    def _may_begin(self, name: HoldName) -> bool:
        """Whether it names a hold of this life that our engine may tell us of in a moment.

        An engine in another process tells us by a way of its own. That takes no longer than a few
        messages: who has made a name up gets no more time.
        """
        serial = hold_serial(name.hold_id, self._space.me.incarnation)
        if name.hold_id is None or serial is None or serial <= self._newest_hold:
            return False
        asked_at = self._foretold.setdefault(name.hold_id, self._space.now)
        _forget_oldest(self._foretold)
        return self._space.now - asked_at <= _GRACE_RESENDS * self._space.timing.resend_s

    def _is_elsewhere(self, hold: Hold, item: RenewItem) -> bool:
        """Whether somebody was sent to blocks that are not this hold's."""
        if hold.state is not HoldState.HELD or item.blocks is None:
            return False
        own = self._space.geometries[self._space.me.rank]
        windowed = any(group.window is not None for group in own)
        return not hold.lies_in(item.blocks, item.num_tokens or 0, exactly=windowed)

    def _remember_cancelled(self, key: DeliveryKey, message: Cancel) -> None:
        before = self._cancelled.get(key)
        if before is None or before.epoch < message.epoch or not message.for_now:
            self._cancelled[key] = message
        _forget_oldest(self._cancelled)

    def _drop_waiting(self, key: DeliveryKey) -> None:
        registration = self._waiting.pop(key, None)
        if registration is not None:
            self._rendezvous.withdraw(key)
            self._space.cancel_timer(TimerKind.REGISTRATION, key)
            self._space.leave_peer(registration.address, registration.request_id)

    def _use_peer(self, registration: Registration) -> Peer | None:
        mode = TransferMode.PULL if registration.message.reads else TransferMode.PUSH
        return self._space.use_peer(registration.address, registration.request_id, mode)

    def _deliveries_to(self, address: InstanceAddress) -> list[Delivery]:
        return [each for each in self._by_delivery.values() if each.registration.address == address]

    # Holds.

    def _find(self, name: HoldName, peer: PeerRank, request_id: RequestId) -> Hold | None:
        """The hold a message means; a hold id that does not match means: not this one."""
        delivery = self._by_delivery.get((peer, request_id))
        if delivery is not None:
            return delivery.hold
        found = self._rendezvous.find(claim_of(name, peer, request_id))
        hold = self._holds.get(found) if found is not None else None
        return hold if hold is not None and hold.is_meant_by(name) else None

    def _serve(self, hold: Hold, message: Cancel | Collected, how: str) -> None:
        """One of the wanter's ranks needs nothing more from us."""
        peer = message.sender.peer()
        wanter = wanter_of(peer, RequestId(message.request_id))
        if how == CANCELLED and hold.may_be_unbound():
            self._unbind(hold, wanter, "it gave up")
            return
        if not hold.bind(peer, wanter[2], message.consumers):
            self._space.counts[Counted.STALE_REFUSED] += 1
            return
        hold.served.setdefault(peer.rank, how)
        self._space.note(hold.request_id, how, by=str(peer))
        self._settle(hold)

    def _unbind(self, hold: Hold, wanter: Wanter, reason: str) -> None:
        """A request gets this KV no more; it is kept for another, at most for its lease."""
        if wanter not in hold.parted:
            self._space.note(hold.request_id, "unbound", by=wanter[2], reason=reason)
        hold.unbind(wanter)
        for delivery in hold.deliveries.values():
            if delivery.registration.wanter == wanter:
                self._deliveries.end(delivery)

    def _stop_awaiting(self, hold: Hold, address: InstanceAddress) -> None:
        """Who listens there has gone, and is not waited for."""
        for peer in [each for each, at in hold.awaited_by.items() if at == address]:
            del hold.awaited_by[peer]
        self._space.leave_peer(address, hold.request_id)

    def _settle(self, hold: Hold) -> None:
        """End a finished hold when every rank that needs it is served, or has gone."""
        if hold.state is not HoldState.HELD:
            return
        if not hold.all_served:
            if hold.forsaken:
                self._end(hold, Outcome.SEND_FAILED, hold.forsaken)
        elif CANCELLED in hold.served.values():
            self._end(hold, Outcome.SEND_FAILED, "the decode instance cancelled it")
        else:
            self._end(hold, Outcome.SENT, "served")

    def _end(self, hold: Hold, outcome: Outcome | None, reason: str) -> None:
        """Nobody gets this KV from now on; None where the engine needs no outcome."""
        self._leases.end(hold.request_id)
        self._witness.end(hold, "the prefill instance does not hold this KV any more")
        self._rendezvous.close(hold.request_id)
        hold.reason = reason
        self._ended.remember(hold)
        for delivery in hold.deliveries.values():
            self._deliveries.end_with_hold(delivery, reason)
        if outcome is not None:
            told = "" if outcome is Outcome.SENT else reason
            self._space.tell(Side.HOLD, hold.request_id, outcome, told)
        if self._is_quiet(hold):
            self._release(hold, HoldEvent.ENDED_QUIET)
        else:
            hold.state = step(HOLD, hold.state, HoldEvent.ENDED_IN_FLIGHT, hold.request_id)
            self._space.note(hold.request_id, "quarantined")
            self._space.set_timer(
                TimerKind.HOLD_QUARANTINE, hold.request_id, self._space.timing.quarantine_limit_s
            )

    def _release(self, hold: Hold, event: HoldEvent) -> None:
        """Give the blocks back: the only place where a holder does."""
        hold.state = step(HOLD, hold.state, event, hold.request_id)
        del self._holds[hold.request_id]
        self._space.cancel_timer(TimerKind.HOLD_QUARANTINE, hold.request_id)
        for key, delivery in hold.deliveries.items():
            del self._by_delivery[key]
            self._space.cancel_timer(TimerKind.DELIVERY, key)
            self._space.leave_peer(delivery.registration.address, delivery.registration.request_id)
        for address in hold.awaited_by.values():
            self._space.leave_peer(address, hold.request_id)
        self._ended.remember(hold)
        if hold.lent:
            self._space.tell(Side.HOLD, hold.request_id, Outcome.RELEASED, block_ids=hold.block_ids)
        else:
            self._space.note(hold.request_id, "dropped")

    def _has_waited_too_long(self, hold: Hold) -> bool:
        """Whether nobody has asked for its KV for so long that its lease is renewed no more."""
        if hold.state is not HoldState.HELD or hold.is_asked_for:
            return False
        limit_s = self._space.timing.hold_limit_s + (hold.keep_s or 0.0)
        return self._space.now - hold.held_since > limit_s

    def _is_quiet(self, hold: Hold) -> bool:
        return all(
            self._space.flights.quiet(delivery.owner) for delivery in hold.deliveries.values()
        )

    @property
    def _lease_s(self) -> float:
        return self._space.timing.kv_lease_duration


def _forget_oldest(remembered: OrderedDict[Any, Any]) -> None:
    """After each addition: who sends us names is not to fill our memory with them."""
    if len(remembered) > _MAX_REMEMBERED:
        remembered.popitem(last=False)


def _problem(message: Register) -> str:
    """What is wrong with a registration by itself, or nothing."""
    if message.num_tokens == 0:
        return "num_tokens: expected at least 1, found 0"
    if tuple(message.sender.rank) not in {tuple(pair) for pair in message.consumers}:
        return "consumers: the sender's own rank is missing"
    return ""
