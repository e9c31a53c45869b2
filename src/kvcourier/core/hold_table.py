"""Which hold a name or a message means.

Decides the answer from what is known of the holds that stand, have ended, and may yet begin.
Refuses to know what is done with them.
"""

from collections.abc import Iterator

from kvcourier.core.foretold import Foretold
from kvcourier.core.holds import Delivery, DeliveryKey, EndedHolds, Hold, claim_of
from kvcourier.core.messages import HoldName
from kvcourier.core.rendezvous import Rendezvous
from kvcourier.core.workspace import Workspace
from kvcourier.ids import InstanceAddress, PeerRank, RequestId


class HoldTable:
    """Every hold of one rank that is not released, with its deliveries.

    Attributes:
        rendezvous: those that have not ended, and what waits for others.
        ended: those that have.
        foretold: those that may begin in a moment.
    """

    def __init__(self, space: Workspace) -> None:
        self._holds: dict[RequestId, Hold] = {}
        self._deliveries: dict[DeliveryKey, Delivery] = {}
        self.rendezvous: Rendezvous[DeliveryKey] = Rendezvous()
        self.ended = EndedHolds()
        self.foretold = Foretold(space)

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        """Those of now: they may be released meanwhile."""
        return iter(list(self._holds.values()))

    def __getitem__(self, request_id: RequestId) -> Hold:
        return self._holds[request_id]

    def get(self, request_id: RequestId) -> Hold | None:
        """None if it is not held, or no longer."""
        return self._holds.get(request_id)

    def delivery(self, key: DeliveryKey) -> Delivery | None:
        """What became of a registration that has met its hold."""
        return self._deliveries.get(key)

    def deliveries_to(self, address: InstanceAddress) -> list[Delivery]:
        """Those to the instance that listens there."""
        return [each for each in self._deliveries.values() if each.registration.address == address]

    def find(self, name: HoldName, peer: PeerRank, request_id: RequestId) -> Hold | None:
        """The hold a message means; a hold id that does not match means: not this one."""
        delivery = self._deliveries.get((peer, request_id))
        if delivery is not None:
            return delivery.hold
        found = self.rendezvous.find(claim_of(name, peer, request_id))
        hold = self._holds.get(found) if found is not None else None
        return hold if hold is not None and hold.is_meant_by(name) else None

    def begin(self, hold: Hold) -> None:
        """It can be found from now on.

        Raises:
            LocalProtocolError: the request or its transfer key is held already.
        """
        self.rendezvous.open(hold.request_id, hold.key)
        self._holds[hold.request_id] = hold
        self.foretold.begin(hold.hold_id)

    def add_delivery(self, delivery: Delivery) -> None:
        """A registration has met its hold; a later one takes the place of an earlier."""
        key = delivery.registration.key
        delivery.hold.deliveries[key] = self._deliveries[key] = delivery

    def end(self, hold: Hold) -> None:
        """Nobody who is new can have it."""
        self.rendezvous.close(hold.request_id)
        self.ended.remember(hold)

    def remove(self, hold: Hold) -> None:
        """It is released."""
        del self._holds[hold.request_id]
        for key in hold.deliveries:
            del self._deliveries[key]
        self.ended.remember(hold)
