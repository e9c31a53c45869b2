"""Who needs nothing of a prompt that has not come yet.

Decides what is remembered of a `Cancel` or `Collected` whose hold is not there, and for how long.
An engine in another process tells us of its holds by a way of its own, which has no order with a
peer's messages (vllm#43509); and in push D may decline before P's engine has heard of the prompt.
Nobody says it again, so the prompt would be kept until its lease runs out.
"""

from kvcourier.core.holds import DeliveryKey, EndedHolds, claim_of
from kvcourier.core.messages import Cancel, Collected
from kvcourier.core.rendezvous import Rendezvous
from kvcourier.core.workspace import Counted, TimerKind, Workspace

Parting = Cancel | Collected
CANCELLED = "cancelled"


class Partings:
    """Partings that wait for their hold, beside the registrations that do."""

    def __init__(
        self, space: Workspace, rendezvous: Rendezvous[DeliveryKey], ended: EndedHolds
    ) -> None:
        self._space = space
        self._rendezvous = rendezvous
        self._ended = ended
        self._waiting: dict[DeliveryKey, Parting] = {}

    def __contains__(self, key: DeliveryKey) -> bool:
        return key in self._waiting

    def wait(self, key: DeliveryKey, message: Parting) -> None:
        """Keep it until its hold begins, unless that is over, or nobody could tell which it is."""
        name = message.name
        # Found by its stripped id alone, it would stand in the way of a retry with the same id.
        exact = name.transfer_id is not None or name.hold_id is not None
        full = len(self._waiting) >= self._space.limits.max_waiting_registrations
        if full or not exact or self._ended.find(name) is not None:
            self._space.counts[Counted.STALE_REFUSED] += 1
            return
        self._waiting[key] = message
        self._rendezvous.wait(key, claim_of(name, *key))
        self._space.set_timer(TimerKind.REGISTRATION, key, self._space.timing.registration_ttl_s)

    def take(self, key: DeliveryKey) -> Parting:
        """Its hold has begun."""
        self._space.cancel_timer(TimerKind.REGISTRATION, key)
        return self._waiting.pop(key)

    def expire(self, key: DeliveryKey) -> None:
        """No such hold came in time."""
        del self._waiting[key]
        self._rendezvous.withdraw(key)
        self._space.counts[Counted.STALE_REFUSED] += 1


def how(message: Parting) -> str:
    """What it means that a rank needs nothing more, for the story."""
    if isinstance(message, Cancel):
        return CANCELLED
    return "read" if message.read else "not_needed"
