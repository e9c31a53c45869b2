"""What the source ranks of a want say, and what that means for it.

Decides whether an answer counts: whether it is of the matched life, of the latest registration or
epoch, and of something that was asked. Refuses to know what follows once all of them have answered.
"""

from kvcourier.core.checks import Checks
from kvcourier.core.coverage import Coverage
from kvcourier.core.events import groups_of
from kvcourier.core.lifecycle import WantEvent, WantState
from kvcourier.core.messages import (
    Computed,
    Digested,
    Fail,
    Fenced,
    Held,
    Landed,
    Registered,
    span_of,
)
from kvcourier.core.outcomes import NOT_AS_REQUESTED, NOT_HELD, Cause
from kvcourier.core.recalls import Recalls
from kvcourier.core.receipts import Receipts
from kvcourier.core.want_endings import WantEndings
from kvcourier.core.want_table import WantTable
from kvcourier.core.wants import Link, Offer, Want, WriteTarget
from kvcourier.core.words import Words
from kvcourier.core.workspace import Counted, TimerKind, Workspace
from kvcourier.ids import HoldId

Answer = Registered | Landed | Computed | Held | Digested | Fail | Fenced

_READ_BEGUN = frozenset({WantState.READING, WantState.PROVING, WantState.CHECKING})


class Answers:
    """All that is said to the wants of one rank."""

    def __init__(
        self,
        space: Workspace,
        wants: WantTable,
        words: Words,
        checks: Checks,
        recalls: Recalls,
        receipts: Receipts,
        endings: WantEndings,
    ) -> None:
        self._space = space
        self._wants = wants
        self._words = words
        self._checks = checks
        self._recalls = recalls
        self._receipts = receipts
        self._endings = endings

    def take(self, message: Answer) -> None:
        """An answer that comes by itself; one that does not count changes nothing."""
        found = self._wants.match(message.sender.peer(), message.request_id)
        if found is not None and self._counts(message, *found):
            return
        written = isinstance(message, Landed | Computed)
        self._space.counts[Counted.STALE_REFUSED if written else Counted.MESSAGES_IGNORED] += 1

    def write_target(self, message: Landed) -> WriteTarget | None:
        """Where a tile that is announced goes; None unless all of it is expected now.

        As a tile that has landed does, one of a newer epoch voids the older ones.
        """
        found = self._wants.match(message.sender.peer(), message.request_id)
        if found is None:
            return None
        want, link = found
        coverage, span = _expected(want, link, message), span_of(message)
        if coverage is None or not coverage.expects(span, message.layers):
            return None
        route = link.routes[message.route]
        return WriteTarget(want.request_id, route, want.block_ids, want.span, span)

    # In heartbeats.

    def on_finished(self, want: Want, link: Link, *, unasked: bool) -> None:
        """It has computed all of the prompt, and keeps it for us."""
        if unasked and want.state is WantState.PROVING and not link.confirmed:
            # We were faster than its engine, so that it could not confirm what we read. Who says so
            # in an answer has said all that it knows: asking again would have no end.
            self._receipts.ask_for_proof(want)
        self._words.on_finished(want)

    def on_known(self, want: Want, link: Link, asked_at: float, granted_s: float) -> None:
        """It holds it still: good for `granted_s` from when we asked."""
        link.proven_until = max(link.proven_until, asked_at + granted_s)
        link.confirmed = link.confirmed or asked_at >= link.shown_at
        self._words.expect(want)
        if want.state is WantState.REGISTERED:
            timing = self._space.timing
            self._space.set_timer(TimerKind.WANT, want.request_id, timing.push_registration_timeout)
        self._receipts.on_proven(want)

    def on_served(self, want: Want, link: Link) -> None:
        """It has written all of it, so prefill has finished: a lost notice matters no more."""
        if _may_write(want) and link.routes and link.covered:
            link.computed = True
            self._receipts.on_written(want, link)

    def on_refused(self, want: Want, link: Link) -> None:
        """It holds it, but not in the blocks that we were sent to."""
        link.refused = True
        if want.reads and want.state in (WantState.READING, WantState.PROVING):
            self._space.counts[Counted.STALE_REFUSED] += 1
            self._endings.fail(want, NOT_AS_REQUESTED)

    def on_unknown(self, want: Want, link: Link, asked_at: float) -> None:
        """It does not hold it (any more)."""
        pulling = want.reads and want.state in _READ_BEGUN
        # Before its acknowledgement a registration may have been on its way, so "not known" means
        # nothing; so it does where it was asked before that.
        registered = want.state in (WantState.REGISTERED, WantState.CHECKING)
        forgotten = registered and asked_at > want.registered_at
        if pulling or forgotten:
            self._space.counts[Counted.STALE_REFUSED] += 1
            self._endings.fail(want, NOT_HELD, Cause.NOT_HELD)

    # By themselves: each returns whether it counts.

    def _counts(self, message: Answer, want: Want, link: Link) -> bool:
        match message:
            case Registered():
                return self._on_registered(message, want, link)
            case Landed():
                return self._on_landed(message, want, link)
            case Computed():
                return self._on_computed(message, want, link)
            case Held():
                return self._on_held(message, want, link)
            case Digested():
                return self._on_digested(message, want, link)
            case Fail():
                return self._on_fail(message, want, link)
            case Fenced():
                return self._on_fenced(message, want, link)

    def _on_registered(self, message: Registered, want: Want, link: Link) -> bool:
        """It has our registration."""
        if not want.registered or link.is_earlier(message.epoch):
            return False
        link.acknowledged = True
        if all(source.acknowledged for source in want.sources):
            if want.state is WantState.REGISTERING:
                want.advance(WantEvent.ACKNOWLEDGED)
            want.registered_at = self._space.now
            self._space.cancel_timer(TimerKind.RESEND, want.request_id)
            self._space.note(want.request_id, "registered")
        return True

    def _on_landed(self, message: Landed, want: Want, link: Link) -> bool:
        """A tile was written."""
        coverage, span = _expected(want, link, message), span_of(message)
        if coverage is None or not coverage.land(span, message.layers):
            return False
        self._space.note(want.request_id, "landed", by=str(link.peer), tokens=len(span))
        if message.computed:
            _note_computed(want, link, message.continuation)
        self._receipts.on_written(want, link)
        return True

    def _on_computed(self, message: Computed, want: Want, link: Link) -> bool:
        """It has finished prefill and posted everything before."""
        if not _is_current(want, link, message.epoch):
            return False
        self._space.note(want.request_id, "computed", by=str(link.peer))
        _note_computed(want, link, message.continuation)
        self._receipts.on_written(want, link)
        return True

    def _on_held(self, message: Held, want: Want, link: Link) -> bool:
        """It has finished and tells what we may READ; we do when all have."""
        if not (want.reads and want.may_be_served) or link.offer is not None:
            return False
        link.acknowledged = True
        self._words.on_finished(want)
        link.offer = Offer(
            HoldId(message.hold_id), groups_of(message.block_ids), message.num_tokens
        )
        want.continuation = message.continuation or want.continuation
        self._space.note(want.request_id, "offered", by=str(link.peer))
        problem = link.offer.why_unusable(want.span, link.routes)
        if problem:
            self._endings.fail(want, problem)
        elif all(source.offer for source in want.sources):
            self._space.cancel_timer(TimerKind.RESEND, want.request_id)
            self._receipts.read(want)
        return True

    def _on_digested(self, message: Digested, want: Want, link: Link) -> bool:
        """It says what it holds."""
        if want.state not in _READ_BEGUN or not self._checks.answered(link, message):
            return False
        if message.reason:
            self._endings.fail(want, f"integrity: {message.reason}")
        else:
            self._receipts.judge(want)
        return True

    def _on_fail(self, message: Fail, want: Want, link: Link) -> bool:
        """It will not write."""
        if link.is_earlier(message.epoch):
            return False
        if message.quiet:
            link.may_write = False
            link.fenced = True
        if want.state is WantState.RECALLING and message.quiet and message.held:
            self._recalls.give_back_if_fenced(want)
        elif want.state is WantState.RECALLING:
            self._endings.fail(want, message.reason)
        elif want.registered:
            self._receipts.on_refused(want, link, message)
        else:
            self._endings.release_if_quiet(want)
        return True

    def _on_fenced(self, message: Fenced, want: Want, link: Link) -> bool:
        """It has nothing in flight and will post nothing."""
        if link.is_earlier(message.epoch):
            return False
        link.may_write = False
        link.fenced = True
        self._recalls.give_back_if_fenced(want)
        self._endings.release_if_quiet(want)
        return True


def _may_write(want: Want) -> bool:
    """Whether what holders write now is what they were asked for."""
    return want.may_be_served and not want.reads


def _expected(want: Want, link: Link, message: Landed) -> Coverage | None:
    """What is to come of the tiles' route; None if the tiles are foreign or of an older epoch."""
    if message.route >= len(link.coverage) or not _is_current(want, link, message.epoch):
        return None
    return link.coverage[message.route]


def _is_current(want: Want, link: Link, epoch: int) -> bool:
    """Whether what is written in this epoch is expected now. With a newer one than before all that
    has landed from this rank is void."""
    if not _may_write(want):
        return False
    if epoch > link.epoch:
        link.epoch = epoch
        link.may_write = True
        link.expect(want.span)
    return epoch == link.epoch


def _note_computed(want: Want, link: Link, continuation: str | None) -> None:
    link.computed = True
    want.continuation = continuation or want.continuation
