"""Which holds our engine may tell us of in a moment.

Decides whether a hold that is not there may still begin, and for how long that is believed. An
engine in another process tells us of its holds by a way of its own, which has no order with a
peer's messages. Refuses to know who asks.
"""

from collections import OrderedDict

from kvcourier.core.holds import forget_oldest
from kvcourier.core.messages import HoldName
from kvcourier.core.workspace import Workspace
from kvcourier.ids import HoldId, hold_serial

_GRACE_RESENDS = 2


class Foretold:
    """The holds of one rank that others have named before they began."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._newest_hold = 0
        self._asked_at: OrderedDict[str, float] = OrderedDict()

    def begin(self, hold_id: HoldId) -> None:
        """Here it is; older ones come no more."""
        serial = hold_serial(hold_id, self._space.me.incarnation)
        self._newest_hold = max(self._newest_hold, serial or 0)
        self._asked_at.pop(hold_id, None)

    def may_begin(self, name: HoldName) -> bool:
        """Whether it names a hold of this life that has yet to begin.

        That takes no longer than a few messages: who has made a name up gets no more time.
        """
        serial = hold_serial(name.hold_id, self._space.me.incarnation)
        if name.hold_id is None or serial is None or serial <= self._newest_hold:
            return False
        asked_at = self._asked_at.setdefault(name.hold_id, self._space.now)
        forget_oldest(self._asked_at)
        return self._space.now - asked_at <= _GRACE_RESENDS * self._space.timing.resend_s
