"""How long blocks are promised to somebody.

Decides grant, renewal and expiry on the granter's own clock: a duration comes in, a deadline on
our clock results (vllm#50326: a deadline stamped by one clock and compared on another corrupted
answers). Refuses to know who asks.
"""

from kvcourier.core.deadlines import Deadlines
from kvcourier.ids import RequestId


class LeaseTable:
    """One lease per held request. A lease never ends early: renewing can only extend it."""

    def __init__(self) -> None:
        self._deadlines: Deadlines[RequestId] = Deadlines()

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._deadlines

    def grant(self, request_id: RequestId, now: float, duration_s: float) -> None:
        """Start a lease, or extend the one that runs."""
        running = self._deadlines.at(request_id)
        until = now + duration_s
        self._deadlines.set(request_id, until if running is None else max(running, until))

    def renew(self, request_id: RequestId, now: float, duration_s: float) -> bool:
        """Extend a running lease; False if there is none."""
        if request_id not in self._deadlines:
            return False
        self.grant(request_id, now, duration_s)
        return True

    def end(self, request_id: RequestId) -> None:
        """The promise is no longer needed; unknown requests are fine."""
        self._deadlines.cancel(request_id)

    def take_expired(self, now: float) -> list[RequestId]:
        """Remove and return every lease that has run out, earliest first."""
        return self._deadlines.take_due(now)

    def next_expiry(self) -> float | None:
        """When the next lease runs out, or None."""
        return self._deadlines.next()
