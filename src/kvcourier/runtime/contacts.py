"""Connected peers as the courier needs them: agents, side-channel sockets, mapping plans.

Decides when a peer rank's agent is loaded and who a notification comes from. Refuses to know
requests.
"""

import logging
from collections.abc import Iterable

from kvcourier.core.handshake import PeerInstance, RankContact, StagingOffer
from kvcourier.errors import PeerLost, RemoteProtocolError, TransportError
from kvcourier.ids import AgentName, InstanceAddress, PeerRank, Rank
from kvcourier.layout.geometry import MemoryKind, RankCache
from kvcourier.runtime.mapping_cache import MappingCache
from kvcourier.runtime.side_channel import Channel
from kvcourier.transport.interface import Transport

_log = logging.getLogger(__name__)


class Contact:
    """One connected peer instance."""

    def __init__(
        self,
        address: InstanceAddress,
        instance: PeerInstance,
        own_cache: RankCache,
        transport: Transport,
    ) -> None:
        self.address = address
        self.instance = instance
        self._own_cache = own_cache
        self._transport = transport
        self._agents: dict[Rank, AgentName] = {}
        self._mappings: dict[Rank, MappingCache] = {}

    def peers(self) -> list[PeerRank]:
        """Every rank of the instance, in its present life."""
        instance = self.instance
        return [PeerRank(instance.engine_id, instance.incarnation, rank) for rank in instance.ranks]

    def agent(self, rank: Rank) -> AgentName:
        """The rank's agent, loaded on first use.

        Raises:
            PeerLost: the rank does not exist.
            RemoteProtocolError: its metadata does not parse.
        """
        if rank not in self._agents:
            self._agents[rank] = self._transport.connect(self._rank(rank).agent_metadata)
        return self._agents[rank]

    def mapping(self, rank: Rank) -> MappingCache:
        """Plans between our cache and that rank's."""
        if rank not in self._mappings:
            self._mappings[rank] = MappingCache(self._own_cache, self._rank(rank).cache)
        return self._mappings[rank]

    def staging(self, rank: Rank) -> StagingOffer | None:
        """Where that rank takes parcels; None if it takes none."""
        return self._rank(rank).staging

    def packs(self, rank: Rank) -> bool:
        """Whether that rank can send packed."""
        return self._rank(rank).packs

    def close(self) -> None:
        """Forget its agents; operations in flight go on being polled."""
        for agent in self._agents.values():
            self._transport.disconnect(agent)
        self._agents.clear()

    def _rank(self, rank: Rank) -> RankContact:
        contact = self.instance.ranks.get(rank)
        if contact is None:
            raise PeerLost(f"{self.address} has no rank {rank}")
        return contact


class Contacts:
    """All connected peers of one courier."""

    def __init__(self, own_cache: RankCache, transport: Transport, channel: Channel) -> None:
        self._own_cache = own_cache
        self._transport = transport
        self._channel = channel
        self._contacts: dict[InstanceAddress, Contact] = {}

    @property
    def memory(self) -> MemoryKind:
        """Where our own cache lies."""
        return self._own_cache.regions[0].memory

    def peers_at(self, address: InstanceAddress) -> list[PeerRank]:
        """Ranks of the instance connected there; none if none is."""
        contact = self._contacts.get(address)
        return [] if contact is None else contact.peers()

    def of(self, peer: PeerRank) -> Contact | None:
        """The contact of a rank in its present life, wherever it listens."""
        for contact in self._contacts.values():
            instance = contact.instance
            if (instance.engine_id, instance.incarnation) == peer[:2] and (
                peer.rank in instance.ranks
            ):
                return contact
        return None

    def add(self, address: InstanceAddress, instance: PeerInstance) -> Contact:
        """A peer shook hands: open the side channel to each of its ranks.

        Shaking hands again with the same life changes nothing.

        Raises:
            RemoteProtocolError: its host is not an address.
        """
        known = self._contacts.get(address)
        if known is not None and known.instance.incarnation == instance.incarnation:
            return known
        self.remove(address)
        contact = Contact(address, instance, self._own_cache, self._transport)
        self._contacts[address] = contact
        for peer in contact.peers():
            port = instance.ranks[peer.rank].side_channel_port
            self._channel.connect(peer, address.host, port)
        return contact

    def remove(self, address: InstanceAddress) -> None:
        """Forget a peer; unknown ones are fine."""
        contact = self._contacts.pop(address, None)
        if contact is not None:
            contact.close()
            for peer in contact.peers():
                self._channel.disconnect(peer)

    def load_agents(self, address: InstanceAddress, ranks: Iterable[Rank]) -> None:
        """Load these ahead of need: a first contact takes milliseconds. Trouble shows at the
        post."""
        contact = self._contacts.get(address)
        if contact is None:
            return
        for rank in ranks:
            try:
                contact.agent(rank)
            except (TransportError, RemoteProtocolError) as error:
                _log.warning("agent of %s rank %s cannot be loaded: %s", address, rank, error)

    def agent_name(self, peer: PeerRank) -> AgentName | None:
        """The agent of a connected peer's rank; None if that life is not connected."""
        contact = self.of(peer)
        return None if contact is None else contact.instance.ranks[peer.rank].agent_name

    def get(self, address: InstanceAddress, peer: PeerRank) -> Contact:
        """The peer at this address, if it lives the expected life.

        Raises:
            PeerLost: it is not connected, or another life of it is.
        """
        contact = self._contacts.get(address)
        if contact is None or contact.instance.incarnation != peer.incarnation:
            raise PeerLost(f"{peer} at {address.host}:{address.port} is not connected")
        return contact
