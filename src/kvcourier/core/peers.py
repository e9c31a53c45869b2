"""Instances we exchange KV with, one entry per address and life.

Decides when to connect, who still uses a peer and when it may be forgotten. Refuses to know what
is exchanged. An entry is keyed by engine id, host and port together, so that one request with a
wrong port cannot spoil the others' connection.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvcourier.config import TransferMode
from kvcourier.errors import MappingError
from kvcourier.ids import Incarnation, InstanceAddress, PeerRank, Rank, RequestId
from kvcourier.layout.geometry import GroupGeometries
from kvcourier.layout.routes import Geometries, Route, consumers_of, route


class PeerState(enum.StrEnum):
    """How far we are with a peer."""

    CONNECTING = "connecting"
    CONNECTED = "connected"


@dataclass(slots=True)
class Peer:
    """One instance as we know it. The maps are filled when it is connected."""

    address: InstanceAddress
    state: PeerState = PeerState.CONNECTING
    incarnation: Incarnation | None = None
    modes: frozenset[TransferMode] = frozenset()
    gives_digests: bool = True
    ranks: tuple[Rank, ...] = ()
    routes_to_us: dict[Rank, tuple[Route, ...]] = field(default_factory=dict)
    """What we would take from each of its ranks (we want, it holds)."""
    consumers: dict[Rank, tuple[Rank, ...]] = field(default_factory=dict)
    """Which ranks of *our* instance take from each of its ranks."""
    routes_from_us: dict[Rank, tuple[Route, ...]] = field(default_factory=dict)
    """What each of its ranks would take from us (we hold, it wants)."""
    why_not_to_us: str = ""
    """Why we can take nothing from it, if so: it keeps shorter windows."""
    why_not_from_us: str = ""
    """Why it can take nothing from us, if so."""
    users: set[RequestId] = field(default_factory=set)
    was_reset: bool = False
    """A connection to it broke while no transfer waited for it; the next one that does looks."""

    def rank(self, rank: Rank) -> PeerRank:
        """One of its ranks, in its present life; only while connected."""
        assert self.incarnation is not None
        return PeerRank(self.address.engine_id, self.incarnation, rank)

    def connected(
        self,
        incarnation: Incarnation,
        modes: frozenset[TransferMode],
        theirs: Mapping[Rank, GroupGeometries],
        ours: Mapping[Rank, GroupGeometries],
        own_rank: Rank,
    ) -> None:
        """Fill the maps. Raises MappingError, naming what does not fit, and changes nothing.

        Where one side keeps all positions of a layer and the other a window, only the latter can
        take from the former; that there is one direction is enough.

        A source rank that nobody takes from (replicated KV) is given to our first rank, which
        then frees it: somebody must, or its blocks stay until the lease ends (vllm#36958).
        """
        (to_us, why_not_to_us), (from_us, why_not_from_us) = (
            _routes(theirs, ours),
            _routes(ours, theirs),
        )
        if why_not_to_us and why_not_from_us:
            raise MappingError(why_not_to_us)
        self.why_not_to_us, self.why_not_from_us = why_not_to_us, why_not_from_us
        first = min(ours)
        self.consumers = {rank: consumers_of(to_us, rank) or (first,) for rank in theirs}
        self.routes_to_us = _grouped((e.source, e) for e in to_us if e.target == own_rank)
        self.routes_from_us = _grouped((e.target, e) for e in from_us if e.source == own_rank)
        self.ranks = tuple(sorted(theirs))
        self.incarnation = incarnation
        self.modes = modes
        self.state = PeerState.CONNECTED


class PeerTable:
    """Known peers, bounded."""

    def __init__(self, max_peers: int) -> None:
        self._peers: dict[InstanceAddress, Peer] = {}
        self._max_peers = max_peers

    def __len__(self) -> int:
        return len(self._peers)

    def all(self) -> list[Peer]:
        """Every known peer."""
        return list(self._peers.values())

    def get(self, address: InstanceAddress) -> Peer | None:
        """The peer at this address, if known."""
        return self._peers.get(address)

    def add(self, address: InstanceAddress) -> Peer | None:
        """A new entry; None when the table is full."""
        if len(self._peers) >= self._max_peers:
            return None
        return self._peers.setdefault(address, Peer(address))

    def remove(self, address: InstanceAddress) -> Peer | None:
        """Forget an entry; returns it."""
        return self._peers.pop(address, None)


def _routes(sources: Geometries, targets: Geometries) -> tuple[tuple[Route, ...], str]:
    """All routes, or none and the reason."""
    try:
        return route(sources, targets), ""
    except MappingError as error:
        return (), str(error)


def _grouped(entries: Iterable[tuple[Rank, Route]]) -> dict[Rank, tuple[Route, ...]]:
    grouped: dict[Rank, tuple[Route, ...]] = {}
    for rank, entry in entries:
        grouped[rank] = (*grouped.get(rank, ()), entry)
    return grouped
