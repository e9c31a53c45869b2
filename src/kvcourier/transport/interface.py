"""What the rest of kvcourier asks of something that moves bytes.

Decides the verbs (register, connect, post, poll, notify) and their errors. Refuses to know about
requests, blocks and messages. Every implementation passes `tests/transport/test_conformance.py`.

Threading: all calls on one transport come from one thread, the courier's.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvcourier.ids import AgentName
from kvcourier.layout.geometry import Int64Array, MemoryKind, Region

TransferHandle = NewType("TransferHandle", int)
"""One posted operation; valid from `post` until `release`."""

DescriptorListId = NewType("DescriptorListId", int)
"""A descriptor list prepared once and used by index; valid until `release_list`."""


class Operation(enum.StrEnum):
    """Direction of an operation, seen from the initiator."""

    READ = "READ"
    WRITE = "WRITE"


class TransferState(enum.Enum):
    """What is known of a posted operation."""

    IN_FLIGHT = "in_flight"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """Answer of `poll`.

    Attributes:
        state: DONE and FAILED are terminal: the transport will not touch the initiator's memory
            for this operation again.
        peer_lost: the failure means that the target agent is gone.
        reason: one sentence for FAILED, else empty.
    """

    state: TransferState
    peer_lost: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Memory ranges of one kind: an int64 array of shape [n, 3], (address, length, device id)."""

    table: Int64Array
    memory: MemoryKind

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Entries of a prepared descriptor list, in order: int32/int64 indices of shape [n]."""

    list_id: DescriptorListId
    indices: Int64Array


Side = Descriptors | Selection


@dataclass(frozen=True, slots=True)
class Notification:
    """A small message from a peer's agent."""

    sender: AgentName
    payload: bytes


class Transport(Protocol):
    """Moves bytes between registered regions of two agents."""

    @property
    def agent_name(self) -> AgentName:
        """Name under which peers address this agent."""

    def register(self, regions: Sequence[Region]) -> None:
        """Make regions addressable by peers; blocks. Raises RegistrationFailed, nothing kept."""

    def agent_metadata(self) -> bytes:
        """Opaque bytes a peer needs for `connect`; taken after the last `register`."""

    def connect(self, agent_metadata: bytes) -> AgentName:
        """Load a peer; idempotent. Raises RemoteProtocolError for bytes that do not parse."""

    def disconnect(self, agent: AgentName) -> None:
        """Forget a peer and its prepared lists; unknown names are ignored.

        Does not end what is in flight: keep polling those handles.
        """

    def prepare(self, descriptors: Descriptors, agent: AgentName | None) -> DescriptorListId:
        """Prepare a list once, to be used by index: ours (None) or a connected peer's.

        Raises PostFailed when a descriptor lies outside registered memory, PeerLost when the
        agent is not connected.
        """

    def release_list(self, list_id: DescriptorListId) -> None:
        """Forget a prepared list; unknown ids are ignored."""

    def post(
        self,
        operation: Operation,
        agent: AgentName,
        *,
        local: Side,
        remote: Side,
        notice: bytes = b"",
    ) -> TransferHandle:
        """Start moving `local` to `remote` (WRITE) or back (READ); piece i pairs with piece i.

        A non-empty `notice` reaches the target agent after all bytes of the operation are
        visible there (WRITE) or were read (READ). Both sides are of one form: descriptors, or
        selections. May block for as long as posting takes (about 7 us a piece on UCX). Raises
        PostFailed, with nothing in flight, or PeerLost.
        """

    def post_again(self, handle: TransferHandle, notice: bytes = b"") -> None:
        """Start a finished operation once more: the same pieces, whatever they hold now.

        For the same few pieces again and again, without the cost of checking and preparing them.
        The handle is one that was polled as DONE and not released. Raises as `post`; after
        PostFailed or PeerLost nothing is in flight.
        """

    def poll(self, handle: TransferHandle) -> TransferStatus:
        """State of a posted operation; also drives progress. Never raises for peer trouble."""

    def release(self, handle: TransferHandle) -> None:
        """Forget a handle. Proves nothing about an operation that was not terminal."""

    def notify(self, agent: AgentName, payload: bytes) -> None:
        """Send a stand-alone notification; no order with transfers. Raises PeerLost."""

    def notifications(self) -> list[Notification]:
        """Take all notifications that have arrived; also drives progress."""

    def close(self) -> None:
        """Release everything. The transport cannot be used afterwards."""
