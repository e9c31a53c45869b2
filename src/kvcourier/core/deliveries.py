"""Writing a held prompt to the ranks that registered for it (push).

Decides, for one delivery at a time, when to acknowledge, post, fail and fence, and what the
wanter is told. Refuses to know how holds are found and when they end; `holder` does that.
"""

from kvcourier.core.commands import PostWrite
from kvcourier.core.events import BlockGroups
from kvcourier.core.holds import Delivery, Registration
from kvcourier.core.lifecycle import DeliveryEvent, DeliveryState, HoldState
from kvcourier.core.messages import Fail, Fenced, Landed, Registered
from kvcourier.core.peers import Peer, PeerState
from kvcourier.core.workspace import Counted, TimerKind, Workspace
from kvcourier.ids import BlockId, Rank, RequestId
from kvcourier.layout.geometry import TokenSpan

_ENDABLE = frozenset({DeliveryState.REGISTERED, DeliveryState.WRITING, DeliveryState.FAILED})


class Deliveries:
    """What happens to one delivery; the records belong to their holds."""

    def __init__(self, space: Workspace) -> None:
        self._space = space

    def advance(self, delivery: Delivery) -> None:
        """Do what can be done: acknowledge once the peer is connected, post once KV is held."""
        if delivery.state is not DeliveryState.REGISTERED:
            return
        peer = self._space.peers.get(delivery.registration.address)
        if peer is None or peer.state is not PeerState.CONNECTED:
            return
        if delivery.registration.peer.incarnation != peer.incarnation:
            self.fail(delivery, "the decode instance was restarted")
            return
        if not delivery.acknowledged:
            delivery.acknowledged = True
            self.acknowledge(delivery.registration)
        if delivery.hold.state is not HoldState.HELD:
            return
        problem = self._problem(delivery, peer)
        if problem:
            self.fail(delivery, problem)
        else:
            self._post(delivery, peer)

    def on_landed(self, delivery: Delivery, reason: str | None) -> None:
        """One of its writes is terminal; `reason` says why it failed, None that it did not.

        The first failure is told at once, but the delivery ends only with its last write.
        """
        quiet = self._space.flights.quiet(delivery.owner)
        if reason is not None and not delivery.reason:
            delivery.reason = reason
            if delivery.state is DeliveryState.WRITING:
                self._send_fail(delivery, quiet=quiet)
        if not quiet:
            return
        self._space.cancel_timer(TimerKind.DELIVERY, delivery.registration.key)
        if delivery.state is DeliveryState.QUARANTINED:
            delivery.advance(DeliveryEvent.QUIESCED)
            self.send_fenced(delivery.registration)
        elif delivery.reason:
            delivery.advance(DeliveryEvent.FAILED)
            self.send_fenced(delivery.registration)
        else:
            delivery.advance(DeliveryEvent.COMPLETED)
            rank: Rank = delivery.registration.peer.rank
            delivery.hold.served[rank] = "written"
            self._note(delivery, "written", to=str(delivery.registration.peer))

    def on_overdue(self, delivery: Delivery) -> None:
        """A write does not end: failed for the wanter, while all memory stays untouchable."""
        if delivery.state is DeliveryState.WRITING:
            delivery.reason = delivery.reason or "the write did not end in time"
            self.end(delivery)
            self._send_fail(delivery, quiet=False)

    def fail(self, delivery: Delivery, reason: str) -> None:
        """A registration cannot be served; nothing of it is in flight."""
        delivery.reason = reason
        delivery.advance(DeliveryEvent.FAILED)
        self._send_fail(delivery, quiet=True)

    def end(self, delivery: Delivery) -> None:
        """Nothing more is posted for it; what flies is waited for."""
        if delivery.state in _ENDABLE:
            delivery.advance(DeliveryEvent.ENDED)

    def end_with_hold(self, delivery: Delivery, reason: str) -> None:
        """Its hold ends: tell the wanter, unless it has everything or knows already."""
        if delivery.state not in (DeliveryState.REGISTERED, DeliveryState.WRITING):
            return
        quiet = delivery.state is DeliveryState.REGISTERED
        delivery.reason = delivery.reason or reason
        self.end(delivery)
        self._send_fail(delivery, quiet=quiet, held=False)

    def repeat_answer(self, delivery: Delivery) -> None:
        """The same registration again: its answer was lost, or is still to come."""
        if delivery.state is DeliveryState.FAILED:
            self.refuse(delivery.registration, delivery.reason)
        elif delivery.acknowledged:
            self.acknowledge(delivery.registration)

    def acknowledge(self, registration: Registration) -> None:
        """A write or a refusal will follow."""
        message = registration.message
        self._space.send(
            registration.peer, Registered(self._space.sender, message.request_id, message.epoch)
        )

    def refuse(self, registration: Registration, reason: str) -> None:
        """Nothing will be written for it, and nothing is in flight."""
        self._space.counts[Counted.REGISTRATIONS_REFUSED] += 1
        self._send(registration, reason, held=False, quiet=True)

    def send_fenced(self, registration: Registration) -> None:
        """Nothing is in flight for it and nothing will be posted."""
        message = registration.message
        self._space.send(
            registration.peer, Fenced(self._space.sender, message.request_id, message.epoch)
        )

    def _problem(self, delivery: Delivery, peer: Peer) -> str:
        message = delivery.registration.message
        wanted = message.first_token + message.num_tokens
        if peer.why_not_from_us:
            return peer.why_not_from_us
        if not peer.routes_from_us.get(delivery.registration.peer.rank):
            return "this rank holds nothing that rank wants"
        if wanted > delivery.hold.num_tokens:
            return f"{wanted} tokens are wanted, {delivery.hold.num_tokens} were computed"
        return ""

    def _post(self, delivery: Delivery, peer: Peer) -> None:
        registration, message = delivery.registration, delivery.registration.message
        span = TokenSpan(message.first_token, message.first_token + message.num_tokens)
        delivery.advance(DeliveryEvent.POSTED)
        self._space.set_timer(
            TimerKind.DELIVERY, registration.key, self._space.timing.transfer_timeout_s
        )
        blocks: BlockGroups = tuple(
            tuple(BlockId(block) for block in group) for group in message.local_block_ids
        )
        for index, route in enumerate(peer.routes_from_us[registration.peer.rank]):
            moved = route.needed(span)
            notice = Landed(
                self._space.sender,
                message.request_id,
                moved.start,
                len(moved),
                route=index,
                epoch=message.epoch,
            )
            self._space.emit(
                PostWrite(
                    operation_id=self._space.flights.launch(delivery.owner),
                    peer=registration.peer,
                    address=registration.address,
                    route=route,
                    own_block_ids=delivery.hold.block_ids,
                    num_held=delivery.hold.num_tokens,
                    peer_block_ids=blocks,
                    span=span,
                    notice=notice,
                )
            )

    def _send_fail(self, delivery: Delivery, *, quiet: bool, held: bool | None = None) -> None:
        registration = delivery.registration
        self._note(delivery, "delivery_failed", to=str(registration.peer), reason=delivery.reason)
        still_held = delivery.hold.state is HoldState.HELD if held is None else held
        self._send(registration, delivery.reason, held=still_held, quiet=quiet)

    def _send(self, registration: Registration, reason: str, *, held: bool, quiet: bool) -> None:
        message = registration.message
        self._space.send(
            registration.peer,
            Fail(
                self._space.sender,
                message.request_id,
                reason[:1024],
                held=held,
                quiet=quiet,
                epoch=message.epoch,
            ),
        )

    def _note(self, delivery: Delivery, what: str, **details: object) -> None:
        self._space.note(RequestId(delivery.hold.request_id), what, **details)
