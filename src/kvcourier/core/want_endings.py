"""How a want ends: received, failed, aborted or not needed.

Decides what the engine and the holders are told of the end, and when the blocks go back. Refuses to
know why it ends.

Blocks go back in exactly one place, `_release`, and only when neither our operations nor a peer
can touch them. (Those that the engine recalls, before the end, go through `recalls`.)
"""

from kvcourier.core.asks import Asks
from kvcourier.core.checks import Checks
from kvcourier.core.commands import Abandon
from kvcourier.core.lifecycle import WantEvent, WantState
from kvcourier.core.outcomes import Cause, Outcome, Side
from kvcourier.core.want_table import WantTable
from kvcourier.core.wants import Want
from kvcourier.core.workspace import Counted, TimerKind, Workspace

_BEFORE_BLOCKS = frozenset({WantState.QUEUED, WantState.PARTING})


class WantEndings:
    """The ends of all wants of one rank."""

    def __init__(self, space: Workspace, wants: WantTable, asks: Asks, checks: Checks) -> None:
        self._space = space
        self._wants = wants
        self._asks = asks
        self._checks = checks

    def receive(self, want: Want, event: WantEvent) -> None:
        """All has come for good."""
        self._space.tell(
            Side.WANT, want.request_id, Outcome.RECEIVED, continuation=want.continuation
        )
        # A written-to holder rank knows by itself, unless it waits for our check; one that we READ
        # from or only free does not.
        self._let_go(want, read=want.reads or self._checks.enabled)
        self._release(want, event)

    def fail(self, want: Want, reason: str, cause: Cause | None = None) -> None:
        """The KV will not come."""
        self._space.tell(Side.WANT, want.request_id, Outcome.RECEIVE_FAILED, reason, cause=cause)
        self.give_up(want, reason)

    def give_up(self, want: Want, reason: str) -> None:
        """It is not wanted any more; the engine needs no outcome."""
        want.gave_up = True
        if want.may_be_served or not want.reads:
            for link in want.sources:
                self._asks.cancel(want, link)
        self._let_go(want, read=False)
        if want.quiet_remotely and self.quiet_locally(want):
            self._release(want, WantEvent.ENDED_QUIET)
            return
        want.advance(WantEvent.ENDED_IN_FLIGHT)
        self._space.note(want.request_id, "quarantined", reason=reason)
        timing = self._space.timing
        self._space.set_timer(TimerKind.WANT, want.request_id, timing.quarantine_limit_s)
        self._space.set_timer(TimerKind.RESEND, want.request_id, timing.resend_s)

    def part(self, want: Want) -> None:
        """It had no blocks; its holder is told."""
        self._let_go(want, read=False)
        self.drop(want)

    def drop(self, want: Want) -> None:
        """It had no blocks, and its holder cannot be told."""
        self._release(want, WantEvent.ENDED_QUIET)

    def ask_again(self, want: Want) -> None:
        """Whoever may still write into blocks that are in quarantine."""
        for link in want.sources:
            if link.may_write:
                self._asks.cancel(want, link)

    def release_if_quiet(self, want: Want) -> None:
        """An operation has ended, or a peer writes no more."""
        if want.state is WantState.QUARANTINED and want.quiet_remotely and self.quiet_locally(want):
            self._release(want, WantEvent.QUIESCED)

    def abandon(self, want: Want) -> None:
        """Whatever can still touch its blocks is waited for no longer."""
        self._space.counts[Counted.QUARANTINES_EXPIRED] += 1
        for link in want.links.values():
            link.may_write = False
            for operation_id in self._space.flights.of(want.owner(link)):
                self._space.emit(Abandon(operation_id))
                self._space.flights.land(operation_id)
        self._release(want, WantEvent.QUIESCED)

    def quiet_locally(self, want: Want) -> bool:
        """Whether none of our READs can write into its blocks any more."""
        return all(self._space.flights.quiet(want.owner(link)) for link in want.links.values())

    def _let_go(self, want: Want, *, read: bool) -> None:
        """Free the holder ranks that do not know by themselves that we need nothing more.

        Where another may follow us, they must know whether we have it or have given up.
        """
        for link in want.links.values():
            if link.refused:
                # It may be somebody else's, and not ours to end.
                continue
            reads = want.reads and not want.may_be_served
            checked = read and want.state is WantState.CHECKING
            if reads or checked or not link.routes or want.state is WantState.PARTING:
                if want.gave_up and want.may_be_followed:
                    self._asks.cancel(want, link)
                else:
                    self._asks.let_go(want, link, read=read)

    def _release(self, want: Want, event: WantEvent) -> None:
        """Give the blocks back: the only place where a wanter does."""
        self._checks.drop(want)
        had_blocks = want.state not in _BEFORE_BLOCKS
        want.advance(event)
        self._wants.remove(want)
        self._space.cancel_timer(TimerKind.WANT, want.request_id)
        self._space.cancel_timer(TimerKind.RESEND, want.request_id)
        self._space.leave_peer(want.address, want.request_id)
        if had_blocks:
            self._space.tell(Side.WANT, want.request_id, Outcome.RELEASED, block_ids=want.block_ids)
        else:
            self._space.note(want.request_id, "dropped")
