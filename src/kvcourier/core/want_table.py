"""Which want and which of its source ranks a message means.

Decides that by the request and by the life of the rank that speaks. Refuses to know what it says.
"""

from collections.abc import Iterator

from kvcourier.core.wants import Link, Want
from kvcourier.ids import InstanceAddress, PeerRank, RequestId


class WantTable:
    """Every want of one rank that is not released."""

    def __init__(self) -> None:
        self._wants: dict[RequestId, Want] = {}

    def __len__(self) -> int:
        return len(self._wants)

    def __iter__(self) -> Iterator[Want]:
        """Those of now: they may be released meanwhile."""
        return iter(list(self._wants.values()))

    def __getitem__(self, request_id: RequestId) -> Want:
        return self._wants[request_id]

    def get(self, request_id: RequestId) -> Want | None:
        """None if it is not wanted, or no longer."""
        return self._wants.get(request_id)

    def at(self, address: InstanceAddress) -> list[Want]:
        """Those whose holder listens there."""
        return [want for want in self._wants.values() if want.address == address]

    def match(self, peer: PeerRank, request_id: str) -> tuple[Want, Link] | None:
        """The want that a source rank speaks of, and its link; None if it is not of the life that
        we matched."""
        want = self._wants.get(RequestId(request_id))
        link = want.links.get(peer.rank) if want is not None else None
        if want is None or link is None or link.peer != peer:
            return None
        return want, link

    def add(self, want: Want) -> None:
        """It is wanted from now on."""
        self._wants[want.request_id] = want

    def remove(self, want: Want) -> None:
        """It is released."""
        del self._wants[want.request_id]
