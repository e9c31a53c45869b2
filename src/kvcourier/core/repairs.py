"""What a want tries before it fails, when its holder still has the KV.

Decides the steps, their order and when one can be taken: each is taken once. Refuses to know why
the holder failed, and what the engine does when nothing helps.
"""

import enum
from collections.abc import Callable, Sequence

from kvcourier.config import TransferMode
from kvcourier.core.asks import Asks
from kvcourier.core.lifecycle import WantEvent, WantState
from kvcourier.core.messages import Fail
from kvcourier.core.wants import Link, Want
from kvcourier.core.workspace import Counted, TimerKind, Workspace


class Step(enum.StrEnum):
    """One try."""

    WRITE_AGAIN = "write again"
    """The holder writes once more, in another epoch."""

    READ = "read"
    """We READ what it holds, by our own means: its way to us may be what is broken."""


LADDER = (Step.WRITE_AGAIN, Step.READ)
"""In this order; after the last the engine's policy decides."""


class Repairs:
    """Takes the steps of all wants of one rank.

    Args:
        read: READs a want whose holders' offers are known.
    """

    def __init__(self, space: Workspace, asks: Asks, read: Callable[[Want], None]) -> None:
        self._space = space
        self._asks = asks
        self._read = read

    def go_on(self, want: Want, link: Link, failed: Fail) -> bool:
        """Take the next step that can be taken; False if there is none."""
        # Our blocks must be untouched by what has failed, and the KV must be there.
        if not (failed.held and failed.quiet) or want.reads:
            return False
        return self.mend(want, [link], failed.reason)

    def mend(self, want: Want, links: Sequence[Link], reason: str) -> bool:
        """The same, whether these ranks have failed or all has come and theirs is not what they
        hold."""
        while want.num_repairs < len(LADDER):
            step = LADDER[want.num_repairs]
            want.num_repairs += 1
            if self._can(step, want, links):
                self._take(step, want, links, reason)
                return True
        return False

    def _can(self, step: Step, want: Want, links: Sequence[Link]) -> bool:
        peer = self._space.peers.get(want.address)
        if peer is None or want.reads:
            # Only a READ that has brought something wrong is repaired: by another one.
            return peer is not None and step is Step.READ
        # What other ranks write meanwhile would be lost, or read twice.
        alone = want.sources == list(links)
        return step is Step.WRITE_AGAIN or (alone and TransferMode.PULL in peer.modes)

    def _take(self, step: Step, want: Want, links: Sequence[Link], reason: str) -> None:
        self._space.counts[Counted.REPAIRS] += 1
        self._space.note(want.request_id, "repairing", step=step.value, reason=reason)
        if want.reads:
            self._read(want)
            return
        want.reads_instead = step is Step.READ
        for link in links:
            self._prepare(want, link)
        if want.reads and all(link.offer is not None for link in links):
            self._read(want)
            return
        if want.state is WantState.CHECKING:
            want.advance(WantEvent.REGISTRATION_SENT)
            self._space.set_timer(
                TimerKind.WANT, want.request_id, self._space.timing.push_registration_timeout
            )
        for link in links:
            self._asks.register(want, link)
        self._space.set_timer(TimerKind.RESEND, want.request_id, self._space.timing.resend_s)

    def _prepare(self, want: Want, link: Link) -> None:
        """Void what this rank has brought, and what it says of it."""
        link.asked_epoch = link.epoch = max(link.epoch, link.asked_epoch) + 1
        link.expect(want.span)
        link.acknowledged = False
        link.may_write = not want.reads
