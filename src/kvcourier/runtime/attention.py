"""How often a courier looks at its transport, which cannot wake it.

Decides the pause between looks. Each look costs the process some tens of microseconds of Python,
which an engine's step that is launched by Python misses, so nobody looks for what is not due: a
peer that has posted something says so over the side channel, which does wake (`Nudge`). Pure: times
come in as values.
"""

import math

from kvcourier.config import CourierConfig
from kvcourier.ids import PeerRank

LOOK_OFTEN_S = 0.1
"""How long a nudge lasts, unless what it was about arrives before."""

NUDGE_AGAIN_S = 0.05
"""How soon one is repeated while the operation is in flight. Some transports move bytes only while
the peer looks, too."""


class Attention:
    """When the next look is due."""

    def __init__(self, config: CourierConfig) -> None:
        self._config = config
        self._looked_at = -math.inf
        self._nudged_until: dict[PeerRank, float] = {}

    def on_nudge(self, peer: PeerRank, now: float) -> None:
        """A peer has posted something that we would not notice by ourselves."""
        self._nudged_until[peer] = now + LOOK_OFTEN_S

    def on_arrival(self, peer: PeerRank) -> None:
        """Something has arrived from it; whatever else it posts, it tells of again."""
        self._nudged_until.pop(peer, None)

    def on_look(self, now: float) -> None:
        """We look now."""
        self._looked_at = now

    def next_look(self, now: float, *, streaming: bool, posted: bool) -> float:
        """When to look next.

        Args:
            streaming: a packed transfer is under way, from here or to here.
            posted: an operation of ours is in flight.
        """
        if streaming:
            pause = self._config.poll_stream_s
        elif posted or self._is_nudged(now):
            pause = self._config.poll_busy_s
        else:
            pause = self._config.poll_idle_s
        return self._looked_at + pause

    def _is_nudged(self, now: float) -> bool:
        for peer, until in list(self._nudged_until.items()):
            if now >= until:
                del self._nudged_until[peer]
        return bool(self._nudged_until)
