"""Serving the ranks that registered for a prompt: writing it to them, while it is computed and
after, or telling them what they may READ.

Decides, for one delivery at a time, when to acknowledge, post, fail and fence, and what the
wanter is told. Refuses to know how holds are found (`hold_table`) and when they end
(`hold_endings`).
"""

from kvcourier.core.commands import PostWrite, SendNotification
from kvcourier.core.events import groups_of
from kvcourier.core.holds import Delivery, Registration
from kvcourier.core.lifecycle import DeliveryEvent, DeliveryState, HoldState
from kvcourier.core.messages import Computed, Fail, Fenced, Held, Landed, Registered
from kvcourier.core.outgoing import Outgoing, Tile
from kvcourier.core.peers import Peer, PeerState
from kvcourier.core.workspace import Counted, TimerKind, Workspace
from kvcourier.ids import Rank, RequestId
from kvcourier.layout.geometry import TokenSpan
from kvcourier.layout.routes import Route

_ALIVE = frozenset({DeliveryState.REGISTERED, DeliveryState.WRITING})
_UNSERVED = _ALIVE | {DeliveryState.OFFERED}
_ENDABLE = _UNSERVED | {DeliveryState.FAILED}
_MAX_TILES_IN_FLIGHT = 2
"""With as many, what becomes ready is gathered into the next tile: each post costs time."""
LEAST_SHARE = 1 / 8
"""Of all that moves, before prefill has finished. A tile costs both couriers about a millisecond of
Python, whatever its size; a thread that launches an eager prefill needs the interpreter as well."""


class Deliveries:
    """What happens to one delivery; the records belong to their holds."""

    def __init__(self, space: Workspace) -> None:
        self._space = space

    def is_alive(self, delivery: Delivery) -> bool:
        """Whether something is still to be written for it."""
        return delivery.state in _ALIVE and not delivery.reason

    def advance(self, delivery: Delivery) -> None:
        """Do what can be done: acknowledge once the peer is connected, post what is written."""
        if not self.is_alive(delivery):
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
        if not delivery.hold.num_tokens:
            return
        problem = self._problem(delivery, peer)
        if problem:
            self.fail(delivery, problem)
        elif delivery.registration.message.reads:
            if delivery.hold.state is HoldState.HELD:
                delivery.advance(DeliveryEvent.OFFERED)
                self._note(delivery, "offered", to=str(delivery.registration.peer))
                self.offer(delivery)
        elif not delivery.draining:
            self._post_ready(delivery, peer)

    def roll_back(self, delivery: Delivery) -> None:
        """The prompt is computed anew, so everything is sent anew, in another epoch."""
        delivery.epoch += 1
        delivery.outgoing.clear()
        delivery.draining = not self._space.flights.quiet(delivery.owner)

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
            self._watch(delivery)
            self.advance(delivery)
            return
        self._space.cancel_timer(TimerKind.DELIVERY, delivery.registration.key)
        delivery.draining = False
        if delivery.state is DeliveryState.QUARANTINED:
            delivery.advance(DeliveryEvent.QUIESCED)
            self.send_fenced(delivery.registration)
        elif delivery.reason:
            delivery.advance(DeliveryEvent.FAILED)
            self.send_fenced(delivery.registration)
        else:
            self.advance(delivery)
            self._complete(delivery)

    def on_overdue(self, delivery: Delivery) -> None:
        """A write does not end: failed for the wanter, while all memory stays untouchable."""
        if delivery.state is DeliveryState.WRITING:
            delivery.reason = delivery.reason or "the write did not end in time"
            self.end(delivery)
            self._send_fail(delivery, quiet=False)

    def fail(self, delivery: Delivery, reason: str) -> None:
        """A registration cannot be served (any more); what flies is waited for."""
        if not self.is_alive(delivery):
            return
        quiet = self._space.flights.quiet(delivery.owner)
        delivery.reason = reason
        if quiet:
            delivery.advance(DeliveryEvent.FAILED)
        self._send_fail(delivery, quiet=quiet)

    def end(self, delivery: Delivery) -> None:
        """Nothing more is posted for it; what flies is waited for."""
        if delivery.state not in _ENDABLE:
            return
        delivery.advance(DeliveryEvent.ENDED)
        quiet = self._space.flights.quiet(delivery.owner)
        if delivery.state is DeliveryState.QUARANTINED and quiet:
            delivery.advance(DeliveryEvent.QUIESCED)

    def end_with_hold(self, delivery: Delivery, reason: str) -> None:
        """Its hold ends: tell the wanter, unless it has everything or knows already."""
        if delivery.state not in _UNSERVED:
            return
        if delivery.registration.peer.rank in delivery.hold.served:
            self.end(delivery)
            return
        quiet = self._space.flights.quiet(delivery.owner)
        delivery.reason = delivery.reason or reason
        self.end(delivery)
        self._send_fail(delivery, quiet=quiet, held=False)

    def repeat_answer(self, delivery: Delivery) -> None:
        """The same registration again: its answer was lost, or is still to come."""
        if delivery.state is DeliveryState.FAILED:
            self._send(delivery.registration, delivery.reason, held=_is_held(delivery), quiet=True)
        elif delivery.state is DeliveryState.OFFERED:
            self.offer(delivery)
        elif delivery.acknowledged:
            self.acknowledge(delivery.registration)

    def acknowledge(self, registration: Registration) -> None:
        """A write, an offer or a refusal will follow."""
        message = registration.message
        self._space.send(
            registration.peer, Registered(self._space.sender, message.request_id, message.epoch)
        )

    def offer(self, delivery: Delivery) -> None:
        """Say what is held, to a rank that wants to READ it."""
        hold, message = delivery.hold, delivery.registration.message
        self._space.send(
            delivery.registration.peer,
            Held(
                self._space.sender,
                message.request_id,
                hold.hold_id,
                [list(group) for group in hold.block_ids],
                hold.num_tokens,
                message.epoch,
                hold.continuation,
            ),
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
        finished = delivery.hold.state is HoldState.HELD
        if finished and wanted > delivery.hold.num_tokens:
            return f"{wanted} tokens are wanted, {delivery.hold.num_tokens} were computed"
        return ""

    def _post_ready(self, delivery: Delivery, peer: Peer) -> None:
        """Post every tile that is written and was not sent, or wait for others to join it."""
        hold, message = delivery.hold, delivery.registration.message
        wanted = TokenSpan(message.first_token, message.first_token + message.num_tokens)
        routes = peer.routes_from_us[delivery.registration.peer.rank]
        if not delivery.outgoing:
            delivery.outgoing = [Outgoing(each, each.needed(wanted)) for each in routes]
        finished = hold.state is HoldState.HELD
        in_flight = len(self._space.flights.of(delivery.owner))
        if in_flight >= _MAX_TILES_IN_FLIGHT and not finished:
            return
        posted = False
        for index, (route, outgoing) in enumerate(zip(routes, delivery.outgoing, strict=True)):
            tiles = outgoing.ready(hold.num_written)
            worth = outgoing.share(tiles) >= LEAST_SHARE or outgoing.completed_by(tiles)
            if not finished and not worth:
                continue
            for tile in tiles:
                outgoing.take(tile)
                self._post(delivery, index, route, wanted, tile)
                posted = True
        if finished and not delivery.told_computed:
            delivery.told_computed = True
            if not posted:
                self._tell_computed(delivery)
                self._complete(delivery)

    def _tell_computed(self, delivery: Delivery) -> None:
        """No tile is left to say that prefill has finished."""
        registration = delivery.registration
        computed = Computed(
            self._space.sender,
            registration.message.request_id,
            delivery.epoch,
            delivery.hold.continuation,
        )
        self._space.emit(SendNotification(registration.peer, registration.address, computed))

    def _post(
        self, delivery: Delivery, index: int, route: Route, wanted: TokenSpan, tile: Tile
    ) -> None:
        registration, message = delivery.registration, delivery.registration.message
        if delivery.state is DeliveryState.REGISTERED:
            delivery.advance(DeliveryEvent.POSTED)
        if self._space.flights.quiet(delivery.owner):
            self._watch(delivery)
        notice = Landed(
            self._space.sender,
            message.request_id,
            tile.span.start,
            len(tile.span),
            route=index,
            epoch=delivery.epoch,
            layers=None if tile.layers == route.layers else list(tile.layers),
            continuation=delivery.hold.continuation,
            computed=delivery.hold.state is HoldState.HELD,
        )
        self._space.emit(
            PostWrite(
                operation_id=self._space.flights.launch(delivery.owner),
                peer=registration.peer,
                address=registration.address,
                route=route,
                own_block_ids=delivery.hold.block_ids,
                num_held=delivery.hold.num_tokens,
                peer_block_ids=groups_of(message.local_block_ids),
                span=wanted,
                notice=notice,
            )
        )

    def _watch(self, delivery: Delivery) -> None:
        """Something is in flight, and moves: a write has begun or ended."""
        self._space.set_timer(
            TimerKind.DELIVERY, delivery.registration.key, self._space.timing.transfer_timeout_s
        )

    def _complete(self, delivery: Delivery) -> None:
        """The end, if all is sent and has landed; that is never before prefill has finished."""
        if delivery.state is not DeliveryState.WRITING or delivery.reason or delivery.draining:
            return
        if not delivery.outgoing or not all(each.complete for each in delivery.outgoing):
            return
        if delivery.hold.state is HoldState.HELD and self._space.flights.quiet(delivery.owner):
            delivery.advance(DeliveryEvent.COMPLETED)
            rank: Rank = delivery.registration.peer.rank
            if not delivery.registration.message.checks:
                delivery.hold.served[rank] = "written"
            self._note(delivery, "written", to=str(delivery.registration.peer))

    def _send_fail(self, delivery: Delivery, *, quiet: bool, held: bool | None = None) -> None:
        registration = delivery.registration
        self._note(delivery, "delivery_failed", to=str(registration.peer), reason=delivery.reason)
        still_held = _is_held(delivery) if held is None else held
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


def _is_held(delivery: Delivery) -> bool:
    """Whether its KV is there, or is still being computed, and may be asked for again."""
    alive = delivery.hold.state in (HoldState.COMPUTING, HoldState.HELD)
    return alive and not delivery.is_hopeless
