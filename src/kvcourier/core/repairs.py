"""What a want tries before it fails, when its holder still has the KV.

Decides the steps, their order and when one can be taken: each is taken once. Refuses to know why
the holder failed, and what the engine does when nothing helps.
"""

import enum
from collections.abc import Callable

from kvcourier.config import TransferMode
from kvcourier.core.asks import Asks
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
        while want.num_repairs < len(LADDER):
            step = LADDER[want.num_repairs]
            want.num_repairs += 1
            if self._can(step, want, link, failed):
                self._take(step, want, link, failed.reason)
                return True
        return False

    def _can(self, step: Step, want: Want, link: Link, failed: Fail) -> bool:
        """Our blocks must be untouched by what has failed, and the KV must be there."""
        if not (failed.held and failed.quiet) or want.reads:
            return False
        peer = self._space.peers.get(want.address)
        if step is Step.READ:
            # What other ranks write meanwhile would be lost, or read twice.
            alone = want.sources == [link]
            return alone and peer is not None and TransferMode.PULL in peer.modes
        return peer is not None

    def _take(self, step: Step, want: Want, link: Link, reason: str) -> None:
        self._space.counts[Counted.REPAIRS] += 1
        self._space.note(want.request_id, "repairing", step=step.value, reason=reason)
        link.asked_epoch = link.epoch = max(link.epoch, link.asked_epoch) + 1
        link.expect(want.span)
        link.acknowledged = False
        link.may_write = step is Step.WRITE_AGAIN
        want.reads_instead = step is Step.READ
        if want.reads and link.offer is not None:
            self._read(want)
            return
        self._asks.register(want, link)
        self._space.set_timer(TimerKind.RESEND, want.request_id, self._space.timing.resend_s)
