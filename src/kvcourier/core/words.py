"""What is known of a prompt that its holder may still be computing: a queued want's part.

Decides when the engine may reserve blocks: once the holder has said that the prompt is finished,
or has said nothing for so long that only an attempt can tell. Refuses to know how its word comes.
"""

from kvcourier.core.lifecycle import WantState
from kvcourier.core.outcomes import Outcome, Side
from kvcourier.core.wants import Want
from kvcourier.core.workspace import TimerKind, Workspace


class Words:
    """The words of holders about the wants of one rank."""

    def __init__(self, space: Workspace) -> None:
        self._space = space

    def expect(self, want: Want) -> None:
        """Now and then its holder should say that it has, or will have, this."""
        if want.state is WantState.QUEUED and not want.is_finished:
            self._space.set_timer(
                TimerKind.WANT, want.request_id, self._space.timing.push_registration_timeout
            )

    def on_finished(self, want: Want) -> None:
        """It has all of it."""
        if not want.is_finished:
            want.is_finished = True
            if want.state is WantState.QUEUED:
                self._space.cancel_timer(TimerKind.WANT, want.request_id)
            self._space.tell(Side.WANT, want.request_id, Outcome.HELD)

    def stop_waiting(self, want: Want, reason: str) -> None:
        """A queued prompt may never be finished: with blocks it is found out."""
        if want.state is WantState.QUEUED and not want.is_finished:
            self._space.cancel_timer(TimerKind.WANT, want.request_id)
            self._space.tell(Side.WANT, want.request_id, Outcome.HELD, reason)
