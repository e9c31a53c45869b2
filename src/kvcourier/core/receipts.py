"""How a want gets what is held for it, once its holder is connected.

Decides when a want registers or READs, and when all has come: written from the matched life, or
READ and proven to be held all along, and the same as its holders have; before our deadline. Refuses
to know connections, whether a message counts, and what becomes of the blocks.
"""

from collections.abc import Callable

from kvcourier.config import TransferMode
from kvcourier.core.asks import Asks
from kvcourier.core.checks import Checks
from kvcourier.core.commands import PostRead
from kvcourier.core.events import OperationId
from kvcourier.core.lifecycle import WantEvent, WantState
from kvcourier.core.messages import Fail
from kvcourier.core.outcomes import NOT_HELD, Cause
from kvcourier.core.peers import Peer
from kvcourier.core.repairs import Repairs
from kvcourier.core.want_endings import WantEndings
from kvcourier.core.wants import Link, Want
from kvcourier.core.workspace import Counted, Owner, TimerKind, Workspace

WritePreference = Callable[[PostRead], bool]
"""Whether what this READ would move should rather be written by its holder."""


class Receipts:
    """What is on its way to the wants of one rank."""

    def __init__(
        self,
        space: Workspace,
        asks: Asks,
        checks: Checks,
        endings: WantEndings,
        prefers_write: WritePreference,
    ) -> None:
        self._space = space
        self._prefers_write = prefers_write
        self._asks = asks
        self._checks = checks
        self._endings = endings
        self._repairs = Repairs(space, asks, self.read)

    def begin(self, want: Want, peer: Peer) -> None:
        """It has blocks, and its connected peer can serve it."""
        want.written_to = self._should_be_written_to(want, peer)
        if want.reads and want.offer is not None:
            self.read(want)
        else:
            self._register(want)

    def register_again(self, want: Want) -> None:
        """Whoever has not acknowledged."""
        self._space.counts[Counted.REGISTRATIONS_RESENT] += 1
        for link in want.sources:
            if not link.acknowledged:
                self._asks.register(want, link)

    def read(self, want: Want) -> None:
        """READ what all its sources offer."""
        want.advance(WantEvent.READ_POSTED)
        self._space.set_timer(
            TimerKind.WANT, want.request_id, self._space.timing.transfer_timeout_s
        )
        # Asked before the first byte is read: the answer proves that the hold stood all along.
        self.ask_for_proof(want)
        for link in want.sources:
            self._asks.read(want, link)
            if self._checks.enabled:
                # Summed up there while it is read.
                link.check = None
                self._checks.ask(want, link)
        self._space.watch(want.address)

    def ask_for_proof(self, want: Want) -> None:
        """Also again: the question or its answer was lost, or the hold had yet to be told to its
        holder."""
        self._space.set_timer(TimerKind.ASK, want.request_id, 0.0)

    def on_written(self, want: Want, link: Link) -> None:
        """A source rank has written more, or has computed what it has written."""
        if link.received:
            link.may_write = False
        if all(source.received for source in want.sources):
            self._check_or_receive(want, WantEvent.LANDED)

    def on_operation_ended(self, want: Want, reason: str | None) -> None:
        """A READ is terminal; `reason` says why it failed, None that it did not."""
        if want.state is WantState.READING and reason is not None:
            self._endings.fail(want, reason)
        elif want.state is WantState.READING and self._endings.quiet_locally(want):
            want.advance(WantEvent.READ_COMPLETED)
            want.read_completed_at = self._space.now
            self._space.note(want.request_id, "read")
            timing = self._space.timing
            self._space.set_timer(TimerKind.WANT, want.request_id, timing.handshake_timeout_s)
            self._space.set_timer(TimerKind.RESEND, want.request_id, timing.resend_s)
            self.on_proven(want)
        else:
            self._endings.release_if_quiet(want)

    def on_proven(self, want: Want) -> None:
        """A READ counts only if every holder still held the KV when it had ended, and in the very
        blocks that were read."""
        if want.state is WantState.PROVING and all(
            link.confirmed and link.proven_until >= want.read_completed_at for link in want.sources
        ):
            self._check_or_receive(want, WantEvent.PROVEN)

    def on_digest_taken(
        self, want: Want, owner: Owner, operation_id: OperationId, digest: int
    ) -> None:
        """One of the digests of what we have is there."""
        self._checks.took(want, owner, operation_id, digest)
        self.judge(want)

    def on_refused(self, want: Want, link: Link, message: Fail) -> None:
        """A source rank will not write: get it in another way, or not at all."""
        if not self._repairs.go_on(want, link, message):
            is_over = message.reason.startswith(NOT_HELD)
            self._endings.fail(want, message.reason, Cause.NOT_HELD if is_over else None)

    def judge(self, want: Want) -> None:
        """Accept what has come, have it sent again, or give it up; once both sides have told."""
        verdict = self._checks.verdict(want) if want.state is WantState.CHECKING else None
        if verdict is None:
            return
        self._space.cancel_timer(TimerKind.RESEND, want.request_id)
        if not verdict.differing:
            self._endings.receive(want, WantEvent.AGREED)
        elif not self._repairs.mend(want, verdict.differing, verdict.reason):
            self._endings.fail(want, verdict.reason)

    def _should_be_written_to(self, want: Want, peer: Peer) -> bool:
        """Whether a pull goes faster if the holder writes: then it can pack scattered blocks."""
        if want.mode is TransferMode.PUSH:
            return True
        if want.offer is None or TransferMode.PUSH not in peer.modes:
            return False
        return any(
            self._prefers_write(self._asks.read_command(want, link, route))
            for link in want.sources
            for route in link.routes
        )

    def _register(self, want: Want) -> None:
        """Have our blocks written, or be told what may be READ."""
        want.advance(WantEvent.REGISTRATION_SENT)
        self._space.set_timer(
            TimerKind.WANT, want.request_id, self._space.timing.push_registration_timeout
        )
        for link in want.sources:
            link.expect(want.span)
            link.may_write = not want.reads
            link.fenced = False
            self._asks.register(want, link)
        self._space.set_timer(TimerKind.RESEND, want.request_id, self._space.timing.resend_s)
        self._space.watch(want.address)

    def _check_or_receive(self, want: Want, event: WantEvent) -> None:
        """All has come. Is it what its holders have?"""
        if not self._checks.enabled:
            self._endings.receive(want, event)
            return
        want.advance(WantEvent.CHECK_BEGUN)
        timing = self._space.timing
        self._space.set_timer(TimerKind.WANT, want.request_id, timing.transfer_timeout_s)
        self._space.set_timer(TimerKind.RESEND, want.request_id, timing.resend_s)
        self._checks.begin(want)
        self.judge(want)
