"""When an instance that keeps failing is left alone, and when it is tried again.

Decides by a small state machine on times that it is given. Refuses to know what a failure is
(`events.blame`) and who else there is to choose (`policy`).

    CLOSED --failures in a row--> OPEN --open_s--> PROBING --success--> CLOSED
                                   ^                  |
                                   '-----failure------'   each time for twice as long
"""

import enum
from dataclasses import dataclass

from kvcourier.errors import ConfigError


class BreakerState(enum.StrEnum):
    """Whether an instance is sent requests."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"
    """One request may go there, to see."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens and for how long.

    Attributes:
        failures: in a row, after which it opens; 0: never.
        open_s: for how long, the first time.
        max_open_s: for how long at most, after failed probes.
    """

    failures: int = 5
    open_s: float = 5.0
    max_open_s: float = 60.0

    def __post_init__(self) -> None:
        if self.failures < 0:
            raise ConfigError(f"breaker failures: expected 0 or more, found {self.failures!r}")
        if not 0 < self.open_s <= self.max_open_s < float("inf"):
            raise ConfigError(
                "breaker open_s: expected seconds above 0, and max_open_s not below it, found "
                f"{self.open_s!r} and {self.max_open_s!r}"
            )


class Breaker:
    """The breaker of one instance. All times are of one clock that never goes back, in seconds."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._num_failures = 0
        self._open_s = settings.open_s
        self._open_until: float | None = None
        self._is_probed = False
        self.num_opened = 0

    def state(self, now: float) -> BreakerState:
        """Where it stands."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.PROBING

    def allows(self, now: float) -> bool:
        """Whether a request should go there. Changes nothing."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (
            state is BreakerState.PROBING and not self._is_probed
        )

    def begin(self, now: float) -> None:
        """A request is sent there; while probing no other follows until it has ended."""
        self._is_probed = self.state(now) is BreakerState.PROBING

    def succeeded(self) -> None:
        """A request went well, as far as this instance is concerned."""
        self._num_failures = 0
        self._open_s = self._settings.open_s
        self._open_until = None
        self._is_probed = False

    def failed(self, now: float) -> None:
        """A request failed, and it is the instance's fault."""
        self._num_failures += 1
        state = self.state(now)
        if state is BreakerState.OPEN:
            # Of the requests that were under way when it opened: they tell nothing new.
            return
        if state is BreakerState.PROBING:
            self._open_s = min(2 * self._open_s, self._settings.max_open_s)
        elif not 0 < self._settings.failures <= self._num_failures:
            return
        self._open_until = now + self._open_s
        self._is_probed = False
        self.num_opened += 1

    def ended(self) -> None:
        """A request ended without a verdict (cancelled): the next may probe."""
        self._is_probed = False
