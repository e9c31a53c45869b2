"""How a hold ends: everybody has it, or nobody can have it any more.

Decides who needs nothing more of it, when that is everybody, and when its blocks go back. Refuses
to know who asks for it, and how a registered rank is served.

Blocks go back in exactly one place, `_release`, and only when nothing of the hold is in flight.
"""

from kvcourier.core.commands import Abandon
from kvcourier.core.deliveries import Deliveries
from kvcourier.core.hold_table import HoldTable
from kvcourier.core.holds import Hold, Wanter, wanter_of
from kvcourier.core.leases import LeaseTable
from kvcourier.core.lifecycle import HoldEvent, HoldState
from kvcourier.core.outcomes import Outcome, Side
from kvcourier.core.partings import CANCELLED, Parting, how
from kvcourier.core.witness import Witness
from kvcourier.core.workspace import Counted, TimerKind, Workspace
from kvcourier.ids import InstanceAddress, RequestId


class HoldEndings:
    """The ends of all holds of one rank."""

    def __init__(
        self,
        space: Workspace,
        holds: HoldTable,
        leases: LeaseTable,
        deliveries: Deliveries,
        witness: Witness,
    ) -> None:
        self._space = space
        self._holds = holds
        self._leases = leases
        self._deliveries = deliveries
        self._witness = witness

    def part(self, hold: Hold, message: Parting) -> None:
        """One of the wanter's ranks needs nothing more from us."""
        peer, request_id = message.sender.peer(), RequestId(message.request_id)
        parted = how(message)
        if parted == CANCELLED and hold.may_be_unbound():
            self.unbind(hold, wanter_of(peer, request_id), "it gave up")
            return
        if not hold.bind(peer, request_id, message.consumers):
            self._space.counts[Counted.STALE_REFUSED] += 1
            return
        hold.served.setdefault(peer.rank, parted)
        self._space.note(hold.request_id, parted, by=str(peer))
        self.settle(hold)

    def unbind(self, hold: Hold, wanter: Wanter, reason: str) -> None:
        """A request gets this KV no more; it is kept for another, at most for its lease."""
        if wanter not in hold.parted:
            self._space.note(hold.request_id, "unbound", by=wanter[2], reason=reason)
        hold.unbind(wanter)
        for delivery in hold.deliveries.values():
            if delivery.registration.wanter == wanter:
                self._deliveries.end(delivery)

    def on_wanter_lost(self, hold: Hold, address: InstanceAddress, reason: str) -> None:
        """Whoever may have it is gone, and nobody else may have what was promised to it."""
        if not hold.may_be_unbound():
            hold.forsaken = hold.forsaken or reason
            self.settle(hold)
            return
        if hold.bound is not None:
            self.unbind(hold, hold.bound, reason)
        for peer in [each for each, at in hold.awaited_by.items() if at == address]:
            del hold.awaited_by[peer]
        self._space.leave_peer(address, hold.request_id)

    def settle(self, hold: Hold) -> None:
        """End a finished hold when every rank that needs it is served, or has gone."""
        if hold.state is not HoldState.HELD:
            return
        if not hold.all_served:
            if hold.forsaken:
                self.end(hold, Outcome.SEND_FAILED, hold.forsaken)
        elif CANCELLED in hold.served.values():
            self.end(hold, Outcome.SEND_FAILED, "the decode instance cancelled it")
        else:
            self.end(hold, Outcome.SENT, "served")

    def expire(self, hold: Hold) -> None:
        """Its lease has run out."""
        if hold.keep_s is not None and hold.bound is None:
            # Nobody has come for it, which is no failure.
            self._space.counts[Counted.HISTORIES_EXPIRED] += 1
            self.end(hold, None, "it was kept as long as agreed")
        else:
            self._space.counts[Counted.LEASES_EXPIRED] += 1
            reason = "the lease ran out before the KV was collected"
            self.end(hold, Outcome.SEND_FAILED, reason)

    def end(self, hold: Hold, outcome: Outcome | None, reason: str) -> None:
        """Nobody gets this KV from now on; None where the engine needs no outcome."""
        self._leases.end(hold.request_id)
        self._witness.end(hold, "the prefill instance does not hold this KV any more")
        hold.reason = reason
        self._holds.end(hold)
        for delivery in hold.deliveries.values():
            self._deliveries.end_with_hold(delivery, reason)
        if outcome is not None:
            told = "" if outcome is Outcome.SENT else reason
            self._space.tell(Side.HOLD, hold.request_id, outcome, told)
        if self._is_quiet(hold):
            self._release(hold, HoldEvent.ENDED_QUIET)
        else:
            hold.advance(HoldEvent.ENDED_IN_FLIGHT)
            self._space.note(hold.request_id, "quarantined")
            self._space.set_timer(
                TimerKind.HOLD_QUARANTINE, hold.request_id, self._space.timing.quarantine_limit_s
            )

    def on_landed(self, hold: Hold) -> None:
        """One of its writes is terminal: it may have been the last that anything waits for."""
        if hold.state is HoldState.QUARANTINED and self._is_quiet(hold):
            self._release(hold, HoldEvent.QUIESCED)
        else:
            self.settle(hold)

    def abandon(self, hold: Hold) -> None:
        """The longest any write can take is over: stop waiting for its end."""
        self._space.counts[Counted.QUARANTINES_EXPIRED] += 1
        for delivery in hold.deliveries.values():
            for operation_id in self._space.flights.of(delivery.owner):
                self._space.emit(Abandon(operation_id))
                self._space.flights.land(operation_id)
        self._release(hold, HoldEvent.QUIESCED)

    def _is_quiet(self, hold: Hold) -> bool:
        return all(
            self._space.flights.quiet(delivery.owner) for delivery in hold.deliveries.values()
        )

    def _release(self, hold: Hold, event: HoldEvent) -> None:
        """Give the blocks back: the only place where a holder does."""
        hold.advance(event)
        self._holds.remove(hold)
        self._space.cancel_timer(TimerKind.HOLD_QUARANTINE, hold.request_id)
        for key, delivery in hold.deliveries.items():
            self._space.cancel_timer(TimerKind.DELIVERY, key)
            self._space.leave_peer(delivery.registration.address, delivery.registration.request_id)
        for address in hold.awaited_by.values():
            self._space.leave_peer(address, hold.request_id)
        if hold.lent:
            self._space.tell(Side.HOLD, hold.request_id, Outcome.RELEASED, block_ids=hold.block_ids)
        else:
            self._space.note(hold.request_id, "dropped")
