"""Taking blocks back that were reserved for a want, for somebody whose KV is there.

Decides what is asked of holders for that, and when the engine has its blocks again; the want then
waits as it did before. Refuses to know who gets them.
"""

from kvcourier.core.asks import Asks
from kvcourier.core.lifecycle import WantEvent, WantState
from kvcourier.core.outcomes import Outcome, Side
from kvcourier.core.wants import Want
from kvcourier.core.words import Words
from kvcourier.core.workspace import TimerKind, Workspace


class Recalls:
    """All recalls of one rank."""

    def __init__(self, space: Workspace, asks: Asks, words: Words) -> None:
        self._space = space
        self._asks = asks
        self._words = words

    def begin(self, want: Want) -> None:
        """Not those of a prompt that is finished: it comes in a moment, and needs nothing else."""
        if want.is_finished:
            return
        if want.state is WantState.CONNECTING:
            self._give_back(want)
        elif want.registered:
            want.advance(WantEvent.BLOCKS_RECALLED)
            self._space.note(want.request_id, "recalling")
            for link in want.sources:
                link.fenced = False
            self.ask_again(want)
            timing = self._space.timing
            self._space.set_timer(TimerKind.WANT, want.request_id, timing.push_registration_timeout)
            self._space.set_timer(TimerKind.RESEND, want.request_id, timing.resend_s)

    def ask_again(self, want: Want) -> None:
        """Whoever may still write."""
        for link in want.sources:
            if not link.fenced:
                self._asks.cancel(want, link, for_now=True)

    def give_back_if_fenced(self, want: Want) -> None:
        """A source rank writes no more."""
        if want.state is WantState.RECALLING and all(link.fenced for link in want.sources):
            self._give_back(want)

    def _give_back(self, want: Want) -> None:
        """Nobody can touch the blocks: the engine has them, and the want waits for others."""
        block_ids = want.block_ids
        want.advance(WantEvent.BLOCKS_RETURNED)
        want.unreserve()
        self._space.cancel_timer(TimerKind.WANT, want.request_id)
        self._space.cancel_timer(TimerKind.RESEND, want.request_id)
        self._words.expect(want)
        self._space.tell(Side.WANT, want.request_id, Outcome.RECALLED, block_ids=block_ids)
