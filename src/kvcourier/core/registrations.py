"""The registrations of wanters' ranks, and the holds they are for; either may come first.

Decides which of them are taken, wait for their prompt, take the place of an earlier one, or are
refused. Refuses to know how one that has met its hold is served; `deliveries` does that.
"""

from collections import OrderedDict

from kvcourier.config import TransferMode
from kvcourier.core.bindings import binding_of
from kvcourier.core.deliveries import Deliveries
from kvcourier.core.hold_endings import HoldEndings
from kvcourier.core.hold_table import HoldTable
from kvcourier.core.holds import Delivery, DeliveryKey, Hold, Registration, forget_oldest
from kvcourier.core.lifecycle import HoldState
from kvcourier.core.messages import Cancel, Register
from kvcourier.core.outcomes import NOT_HELD
from kvcourier.core.peers import Peer, PeerState
from kvcourier.core.workspace import Counted, TimerKind, Workspace
from kvcourier.ids import InstanceAddress


class Registrations:
    """All of one rank: those that wait, and what was cancelled lately."""

    def __init__(
        self, space: Workspace, holds: HoldTable, deliveries: Deliveries, endings: HoldEndings
    ) -> None:
        self._space = space
        self._holds = holds
        self._deliveries = deliveries
        self._endings = endings
        self._waiting: dict[DeliveryKey, Registration] = {}
        self._cancelled: OrderedDict[DeliveryKey, Cancel] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Those for prompts not seen yet."""
        return len(self._waiting)

    def waits(self, key: DeliveryKey) -> bool:
        """Whether this one is for a prompt not seen yet."""
        return key in self._waiting

    def newest(self, key: DeliveryKey) -> Registration | None:
        """The latest of a rank, whether it waits or has met its hold."""
        delivery = self._holds.delivery(key)
        met = delivery.registration if delivery is not None else None
        return self._waiting.get(key) or met

    def on_register(self, message: Register) -> None:
        """A wanter's rank reserved blocks. Idempotent: it is sent again until acknowledged."""
        registration = Registration.of(message)
        known = self._holds.delivery(registration.key)
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
        request_id = self._holds.rendezvous.find(registration.claim)
        if request_id is None:
            self._wait(registration)
        elif not self._holds[request_id].is_meant_by(message.name):
            self._deliveries.refuse(registration, NOT_HELD)
        else:
            self._attach(self._holds[request_id], registration)

    def meet(self, hold: Hold, key: DeliveryKey) -> None:
        """The prompt that this one waits for has come."""
        self._space.cancel_timer(TimerKind.REGISTRATION, key)
        self._attach(hold, self._waiting.pop(key))

    def withdraw(self, key: DeliveryKey) -> None:
        """It need not wait any longer, if it does."""
        registration = self._waiting.pop(key, None)
        if registration is not None:
            self._holds.rendezvous.withdraw(key)
            self._space.cancel_timer(TimerKind.REGISTRATION, key)
            self._space.leave_peer(registration.address, registration.request_id)

    def cancel(self, key: DeliveryKey, message: Cancel) -> None:
        """It need not wait any longer, nor come."""
        self.withdraw(key)
        before = self._cancelled.get(key)
        if before is None or before.epoch < message.epoch or not message.for_now:
            self._cancelled[key] = message
        forget_oldest(self._cancelled)

    def on_connected(self, peer: Peer) -> None:
        """Those that wait and could not be acknowledged can be."""
        for registration in list(self._waiting.values()):
            if registration.address == peer.address:
                self._acknowledge(registration, peer)

    def refuse_waiting(self, reason: str, at: InstanceAddress | None = None) -> None:
        """Those that wait do so in vain: all, or those of one instance."""
        for key, registration in list(self._waiting.items()):
            if at in (None, registration.address):
                self.withdraw(key)
                self._deliveries.refuse(registration, reason)

    def expire(self, key: DeliveryKey) -> None:
        """It has waited too long."""
        registration = self._waiting[key]
        self._space.counts[Counted.REGISTRATIONS_EXPIRED] += 1
        self.withdraw(key)
        self._deliveries.refuse(registration, "no such prompt came to the prefill instance in time")

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
        self._space.stories.alias(registration.request_id, hold.request_id)
        self._space.note(
            hold.request_id,
            "registered",
            by=str(registration.peer),
            first_token=message.first_token,
            while_computing=hold.state is HoldState.COMPUTING,
        )
        self._serve(delivery)

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
        self._endings.unbind(hold, former, reason)

    def _serve_again(self, failed: Delivery, registration: Registration) -> None:
        """What has failed is asked for once more."""
        hold, message = failed.hold, registration.message
        alive = hold.state in (HoldState.COMPUTING, HoldState.HELD)
        if not failed.may_be_repeated or not alive:
            self._deliveries.refuse(registration, failed.reason or "it is not served again")
            return
        epoch = max(message.epoch, failed.epoch + 1)
        self._space.note(hold.request_id, "registered_again", by=str(registration.peer))
        self._serve(Delivery(hold, registration, epoch=epoch))

    def _serve(self, delivery: Delivery) -> None:
        """Begin with what can be done at once."""
        self._holds.add_delivery(delivery)
        address = delivery.registration.address
        if self._use_peer(delivery.registration) is None:
            self._deliveries.fail(delivery, self._space.refuse_peer(address))
        else:
            self._space.watch(address)
            self._deliveries.advance(delivery)

    def _wait(self, registration: Registration) -> None:
        """Keep a registration for a prompt that has not come yet."""
        name = registration.message.name
        ended = self._holds.ended.find(name)
        if ended is not None:
            self._deliveries.refuse(registration, f"{NOT_HELD}: {ended.reason}")
            return
        if name.hold_id is not None and not self._holds.foretold.may_begin(name):
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
        self._holds.rendezvous.wait(registration.key, registration.claim)
        self._acknowledge(registration, peer)

    def _acknowledge(self, registration: Registration, peer: Peer) -> None:
        if peer.state is PeerState.CONNECTED and registration.peer.incarnation == peer.incarnation:
            self._deliveries.acknowledge(registration)

    def _use_peer(self, registration: Registration) -> Peer | None:
        mode = TransferMode.PULL if registration.message.reads else TransferMode.PUSH
        return self._space.use_peer(registration.address, registration.request_id, mode)


def _problem(message: Register) -> str:
    """What is wrong with a registration by itself, or nothing."""
    if message.num_tokens == 0:
        return "num_tokens: expected at least 1, found 0"
    if tuple(message.sender.rank) not in {tuple(pair) for pair in message.consumers}:
        return "consumers: the sender's own rank is missing"
    return ""
