"""The transport between agents of one process, with real bytes at real addresses.

Decides what a memory agent may address: its own regions, and those of peers as their metadata
told. Refuses to know when bytes land; `MemoryNetwork` decides that, with hooks for tests.

It keeps to what NIXL does where callers could notice: stale metadata connects but cannot be
posted to, releasing a handle stops nothing, a list dies with its peer's connection.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvcourier.errors import (
    LocalProtocolError,
    PeerLost,
    PostFailed,
    RegistrationFailed,
    RemoteProtocolError,
)
from kvcourier.ids import AgentName
from kvcourier.layout.geometry import Int64Array, MemoryKind, Region
from kvcourier.transport.interface import (
    DescriptorListId,
    Descriptors,
    Notification,
    Operation,
    Side,
    TransferHandle,
    TransferState,
    TransferStatus,
)
from kvcourier.transport.memory_network import Fate, InFlight, Landed, MemoryNetwork
from kvcourier.transport.sides import (
    ADDRESS,
    DEVICE,
    LENGTH,
    PreparedList,
    check_forms,
    check_lengths,
    check_regions,
    checked_indices,
    checked_table,
    find_list,
)

__all__ = ["Fate", "InFlight", "Landed", "MemoryNetwork", "MemoryTransport"]

_MAGIC: Final = "kvcourier-memory-agent"


@dataclass(frozen=True, slots=True)
class _Peer:
    name: AgentName
    life: int
    regions: tuple[Region, ...] = field(repr=False)


class MemoryTransport:
    """One agent on a `MemoryNetwork`.

    Raises:
        LocalProtocolError: the name is in use on this network.
    """

    def __init__(self, network: MemoryNetwork, agent_name: str) -> None:
        self._network = network
        with network.lock:
            self._member = network.join(AgentName(agent_name))
        self._peers: dict[AgentName, _Peer] = {}
        self._lists: dict[DescriptorListId, PreparedList] = {}
        self._posted: dict[TransferHandle, InFlight] = {}
        self._ids = itertools.count(1)
        self._closed = False

    @property
    def agent_name(self) -> AgentName:
        return self._member.name

    def register(self, regions: Sequence[Region]) -> None:
        self._require_open()
        check_regions(regions)
        for region in regions:
            if region.memory is not MemoryKind.DRAM:
                raise RegistrationFailed(
                    f"region at {region.address:#x}: expected {MemoryKind.DRAM}, found "
                    f"{region.memory}; use NIXL for it"
                )
        with self._network.lock:
            self._member.regions.extend(regions)

    def agent_metadata(self) -> bytes:
        self._require_open()
        rows = [(r.address, r.size_bytes, r.device_id) for r in self._member.regions]
        return json.dumps([_MAGIC, self._member.name, self._member.life, rows]).encode()

    def connect(self, agent_metadata: bytes) -> AgentName:
        self._require_open()
        peer = _parse(agent_metadata)
        known = self._peers.get(peer.name)
        if peer.name == self._member.name or (known is not None and known.life != peer.life):
            raise RemoteProtocolError(
                f"agent metadata: expected a new name, found {peer.name!r}, which is our own or "
                "connected in another life; disconnect it first"
            )
        self._peers[peer.name] = peer
        return peer.name

    def disconnect(self, agent: AgentName) -> None:
        self._require_open()
        self._peers.pop(agent, None)
        self._lists = {i: entry for i, entry in self._lists.items() if entry.agent != agent}

    def prepare(self, descriptors: Descriptors, agent: AgentName | None) -> DescriptorListId:
        self._require_open()
        table = checked_table(descriptors)
        regions = self._member.regions if agent is None else self._require_peer(agent).regions
        _check_registered(table, descriptors.memory, regions, agent or self.agent_name)
        list_id = DescriptorListId(next(self._ids))
        self._lists[list_id] = PreparedList(agent, descriptors.memory, table.copy())
        return list_id

    def release_list(self, list_id: DescriptorListId) -> None:
        self._lists.pop(list_id, None)

    def post(
        self,
        operation: Operation,
        agent: AgentName,
        *,
        local: Side,
        remote: Side,
        notice: bytes = b"",
    ) -> TransferHandle:
        self._require_open()
        check_forms(local, remote)
        peer = self._require_peer(agent)
        ours = self._resolve(local, None, self._member.regions)
        theirs = self._resolve(remote, agent, peer.regions)
        check_lengths(ours[:, LENGTH], theirs[:, LENGTH])
        origin, goal = (ours, theirs) if operation is Operation.WRITE else (theirs, ours)
        moves = np.column_stack((origin[:, ADDRESS], goal[:, ADDRESS], ours[:, LENGTH]))
        item = InFlight(self.agent_name, agent, operation, notice, moves)
        self._send(peer, item)
        handle = TransferHandle(next(self._ids))
        self._posted[handle] = item
        return handle

    def post_again(self, handle: TransferHandle, notice: bytes = b"") -> None:
        self._require_open()
        done = self._posted.get(handle)
        if done is None or done.status.state is not TransferState.DONE:
            raise LocalProtocolError(f"handle {handle}: expected one that is done, found {done}")
        item = InFlight(self.agent_name, done.target, done.operation, notice, done.moves)
        self._send(self._require_peer(done.target), item)
        self._posted[handle] = item

    def poll(self, handle: TransferHandle) -> TransferStatus:
        self._require_open()
        item = self._posted.get(handle)
        if item is None:
            raise LocalProtocolError(f"handle {handle}: expected a posted one, found none")
        with self._network.lock:
            self._network.progress(item)
            return item.status

    def release(self, handle: TransferHandle) -> None:
        self._posted.pop(handle, None)

    def notify(self, agent: AgentName, payload: bytes) -> None:
        self._require_open()
        self._send(self._require_peer(agent), InFlight(self.agent_name, agent, None, payload))

    def notifications(self) -> list[Notification]:
        self._require_open()
        with self._network.lock:
            self._network.progress()
            if self._member.stalled:
                return []
            arrived = list(self._member.inbox)
            self._member.inbox.clear()
            return arrived

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._network.lock:
            if self._network.is_up(self.agent_name, self._member.life):
                self._network.kill(self.agent_name)
        self._peers.clear()
        self._lists.clear()
        self._posted.clear()

    def _send(self, peer: _Peer, item: InFlight) -> None:
        with self._network.lock:
            for name, life in ((self.agent_name, self._member.life), (peer.name, peer.life)):
                if not self._network.is_up(name, life):
                    raise PeerLost(f"agent {peer.name!r}: its process is gone")
            self._network.send(item)

    def _resolve(
        self, side: Side, agent: AgentName | None, regions: Sequence[Region]
    ) -> Int64Array:
        if isinstance(side, Descriptors):
            table = checked_table(side)
            _check_registered(table, side.memory, regions, agent or self.agent_name)
            return table
        prepared = find_list(self._lists, side, agent)
        return prepared.table[checked_indices(side, prepared)]

    def _require_open(self) -> None:
        if self._closed:
            raise LocalProtocolError(f"transport of {self.agent_name}: used after close")

    def _require_peer(self, agent: AgentName) -> _Peer:
        peer = self._peers.get(agent)
        if peer is None:
            raise PeerLost(f"agent {agent!r}: not connected")
        return peer


def _check_registered(
    table: Int64Array, memory: MemoryKind, regions: Sequence[Region], agent: AgentName
) -> None:
    inside = np.zeros(len(table), dtype=bool)
    for region in regions:
        start = table[:, ADDRESS] - region.address
        inside |= (
            (start >= 0)
            & (start <= region.size_bytes - table[:, LENGTH])
            & (table[:, DEVICE] == region.device_id)
            & (memory is region.memory)
        )
    if not inside.all():
        piece = int(np.flatnonzero(~inside)[0])
        address, length, device = map(int, table[piece])
        raise PostFailed(
            f"piece {piece}: expected registered {memory} memory of {agent}, found {length} bytes "
            f"at {address:#x} on device {device}"
        )


def _parse(agent_metadata: bytes) -> _Peer:
    try:
        magic, name, life, rows = json.loads(agent_metadata)
        if magic != _MAGIC or not isinstance(name, str) or not isinstance(life, int):
            raise ValueError("not made by a memory agent")
        regions = tuple(Region(int(a), int(n), MemoryKind.DRAM, int(d)) for a, n, d in rows)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RemoteProtocolError(f"agent metadata cannot be read: {error}") from error
    return _Peer(AgentName(name), life, regions)
