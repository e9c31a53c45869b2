"""Who is told that a prompt is finished without having registered for it.

Decides who that is, from the heartbeats that keep it, and says it once it is finished: they may
reserve their blocks now. Refuses to know what else heartbeats are for.
"""

from collections import OrderedDict

from kvcourier.core.holds import Hold, forget_oldest
from kvcourier.core.lifecycle import DeliveryState, HoldState
from kvcourier.core.messages import UNASKED, HoldName, Renewed
from kvcourier.core.workspace import Workspace
from kvcourier.ids import PeerRank, RequestId

_TAKEN_BACK = frozenset({DeliveryState.CANCELLED, DeliveryState.QUARANTINED})


class Askers:
    """Those of one rank's holds, and of holds that have not begun."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._early: OrderedDict[object, dict[PeerRank, RequestId]] = OrderedDict()

    def note(self, hold: Hold | HoldName, peer: PeerRank, request_id: RequestId) -> None:
        """A rank has asked for it; by its name if it has not begun."""
        if isinstance(hold, Hold):
            asked_by = hold.askers
        elif (exact := hold.hold_id or hold.key()) is not None:
            asked_by = self._early.setdefault(exact, {})
        else:
            return
        if peer in asked_by or len(asked_by) < self._space.limits.max_ranks:
            asked_by[peer] = request_id
        forget_oldest(self._early)

    def meet(self, hold: Hold) -> None:
        """It has begun."""
        for name in (hold.hold_id, hold.key):
            hold.askers |= self._early.pop(name, {})

    def tell_all(self, hold: Hold) -> None:
        """It may be finished: say so to those who have not registered for it, or no longer."""
        if hold.state is not HoldState.HELD:
            return
        for peer, request_id in hold.askers.items():
            delivery = hold.deliveries.get((peer, request_id))
            if delivery is None or delivery.state in _TAKEN_BACK:
                self.tell(peer, request_id)

    def tell(self, peer: PeerRank, request_id: RequestId) -> None:
        """It is finished, which nobody has asked just now."""
        sender = self._space.sender
        self._space.send(peer, Renewed(sender, UNASKED, 0.0, [], [], [], finished=[request_id]))
