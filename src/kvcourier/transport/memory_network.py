"""The wire between memory transports of one process, with a hook on everything that crosses it.

Decides when bytes land and notifications arrive: at the next poll, or, in a manual network, when
the test says so. Refuses to know who may address which memory; the transports check that.

As with NIXL on UCX, polling anything lets bytes land, but an operation ends, and its notice is
sent, only when its initiator polls its handle.

What is under way is an `InFlight`. The fault plan is asked once for each, when it sets out, and
once more for the notice of an operation, when its last byte has landed.
"""

import ctypes
import enum
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kvcourier.errors import LocalProtocolError, PeerLost, PostFailed
from kvcourier.ids import AgentName
from kvcourier.layout.geometry import Int64Array, Region
from kvcourier.transport.interface import Notification, Operation, TransferState, TransferStatus


class Fate(enum.Enum):
    """What becomes of an operation or a notification."""

    DELIVER = "deliver"
    HOLD = "hold"
    """Waits until it is delivered by name."""
    REFUSE = "refuse"
    """Cannot be posted (PostFailed) or sent (PeerLost; lost in silence if it is a notice)."""
    FAIL = "fail"
    """An operation that ends FAILED with nothing landed; the same as REFUSE for a notification."""
    DROP = "drop"
    """An operation that never ends; a notification that never arrives."""
    CORRUPT = "corrupt"
    """An operation that ends well, but one bit of each piece lands flipped; the same as DELIVER for
    a notification."""
    DUPLICATE = "duplicate"
    """Lands or arrives twice, the second time behind all that is under way."""


@dataclass(slots=True, eq=False)
class InFlight:
    """An operation, or a notification, on its way.

    Attributes:
        source: agent that posted or sent it.
        target: agent it is addressed to.
        operation: direction; None for a notification.
        payload: the notification, or the notice that follows the operation.
        moves: int64 [n, 3] of (from address, to address, bytes), landed in order.
        num_landed: pieces landed so far.
        held: delivered only by name.
        is_corrupt: a bit of each piece comes out wrong, and nobody is told.
        is_duplicate: the second of a duplicated operation; nobody holds its handle.
        status: what the initiator sees.
    """

    source: AgentName
    target: AgentName
    operation: Operation | None
    payload: bytes
    moves: Int64Array | None = None
    num_landed: int = 0
    held: bool = False
    is_corrupt: bool = False
    is_duplicate: bool = False
    status: TransferStatus = field(default_factory=lambda: TransferStatus(TransferState.IN_FLIGHT))

    @property
    def is_notification(self) -> bool:
        """Whether this is a notification and not an operation."""
        return self.operation is None


@dataclass(frozen=True, slots=True)
class Landed:
    """One piece written into an agent's memory; `sequence` orders all pieces of a network."""

    sequence: int
    agent: AgentName
    address: int
    size_bytes: int
    initiator: AgentName


@dataclass(slots=True, eq=False)
class Member:
    """One life of an agent on the network."""

    name: AgentName
    life: int
    regions: list[Region] = field(default_factory=list)
    inbox: list[Notification] = field(default_factory=list)
    stalled: bool = False


FaultPlan = Callable[[InFlight], Fate]
"""Decides on each thing that sets out; called with the network's lock held."""


def no_faults(item: InFlight) -> Fate:
    """The plan in which everything arrives."""
    return Fate.DELIVER


class MemoryNetwork:
    """Joins memory transports; every method may be called from any thread.

    Args:
        manual: bytes land and notifications arrive only by `deliver`, not by polling.
        fault_plan: asked about everything that sets out; may be replaced at any time.
    """

    def __init__(self, *, manual: bool = False, fault_plan: FaultPlan = no_faults) -> None:
        self.manual = manual
        self.fault_plan = fault_plan
        self.lock = threading.RLock()
        self._members: dict[AgentName, Member] = {}
        self._pending: list[InFlight] = []
        self._dropped: list[InFlight] = []
        self._landed: list[Landed] = []
        self._lives = itertools.count(1)

    @property
    def pending(self) -> tuple[InFlight, ...]:
        """What is under way, held things included, in the order of delivery."""
        with self.lock:
            return tuple(self._pending)

    @property
    def landed(self) -> tuple[Landed, ...]:
        """Every piece written so far, in order."""
        with self.lock:
            return tuple(self._landed)

    def deliver(self, *items: InFlight, pieces: int | None = None) -> int:
        """Deliver these, held or not; without arguments all that is not held, and what follows.

        `pieces` stops each operation after so many further pieces. Nothing goes to or from a
        stalled agent. Returns the steps taken: pieces landed, operations ended, notifications
        arrived. Raises LocalProtocolError for an item that is not under way.
        """
        with self.lock:
            for item in items:
                if item not in self._pending:
                    raise LocalProtocolError(f"deliver: {item} is not under way")
            if items:
                return sum(self._advance(item, pieces) for item in items)
            if pieces is not None:
                return sum(self._advance(item, pieces) for item in self._free())
            return self._exhaust(lambda item: True)

    def fail(self, item: InFlight, *, peer_lost: bool = False) -> None:
        """End an operation as FAILED where it stands; pieces that landed stay."""
        with self.lock:
            self._pending.remove(item)
            item.status = TransferStatus(TransferState.FAILED, peer_lost, "failed by the test")

    def reorder(self, key: Callable[[InFlight], Any]) -> None:
        """Sort what is under way by `key`; delivery follows this order."""
        with self.lock:
            self._pending.sort(key=key)

    def kill(self, agent: AgentName) -> None:
        """End an agent's process: what it sent is lost, what was sent to it fails as PeerLost.

        Nothing lands in its memory, or from it, any more. A new transport may take its name.
        """
        with self.lock:
            self._members.pop(agent, None)
            gone = TransferStatus(TransferState.FAILED, True, f"agent {agent} is gone")
            for items in (self._pending, self._dropped):
                for item in [i for i in items if agent in (i.source, i.target)]:
                    items.remove(item)
                    item.status = gone

    def stall(self, agent: AgentName) -> None:
        """Stop an agent's process: nothing goes to it or comes from it until `resume`."""
        with self.lock:
            self._members[agent].stalled = True

    def resume(self, agent: AgentName) -> None:
        """Let a stalled agent go on, with all that has queued up for it."""
        with self.lock:
            self._members[agent].stalled = False

    # What follows is for transports, which hold `lock` when they call.

    def join(self, name: AgentName) -> Member:
        """Bring an agent up; raises LocalProtocolError for a name that is in use."""
        if name in self._members:
            raise LocalProtocolError(f"agent {name!r}: expected a free name, found it in use")
        member = self._members[name] = Member(name, next(self._lives))
        return member

    def is_up(self, name: AgentName, life: int) -> bool:
        """Whether this life of this agent is still on the network."""
        member = self._members.get(name)
        return member is not None and member.life == life

    def send(self, item: InFlight) -> None:
        """Put something under way; raises PostFailed or PeerLost if the plan refuses it."""
        fate = self.fault_plan(item)
        if item.is_notification and fate in (Fate.REFUSE, Fate.FAIL):
            raise PeerLost(f"agent {item.target!r}: notification refused by the fault plan")
        match fate:
            case Fate.REFUSE:
                raise PostFailed(f"{item.operation} to {item.target!r}: refused by the fault plan")
            case Fate.FAIL:
                reason = "failed by the fault plan"
                item.status = TransferStatus(TransferState.FAILED, False, reason)
            case Fate.DROP:
                self._dropped.append(item)
            case _:
                item.held = fate is Fate.HOLD
                item.is_corrupt = fate is Fate.CORRUPT
                self._pending.append(item)
                if fate is Fate.DUPLICATE:
                    self._pending.append(replace(item, is_duplicate=True))

    def progress(self, polled: InFlight | None = None) -> None:
        """What polling does, unless the network is manual; `polled` may end."""
        if not self.manual:
            self._exhaust(lambda item: item is polled or item.is_duplicate)

    def _free(self) -> list[InFlight]:
        return [item for item in self._pending if not item.held]

    def _exhaust(self, may_end: Callable[[InFlight], bool]) -> int:
        total = 0
        while steps := sum(self._advance(i, None, may_end(i)) for i in self._free()):
            total += steps
        return total

    def _advance(self, item: InFlight, limit: int | None, may_end: bool = True) -> int:
        ends = [self._members.get(item.source), self._members.get(item.target)]
        if item not in self._pending or any(end is None or end.stalled for end in ends):
            return 0
        if item.moves is None:
            self._pending.remove(item)
            inbox = self._members[item.target].inbox
            inbox.append(Notification(item.source, item.payload))
            return 1
        steps = self._land(item, item.moves, limit)
        if may_end and item.num_landed == len(item.moves):
            self._end(item)
            steps += 1
        return steps

    def _land(self, item: InFlight, moves: Int64Array, limit: int | None) -> int:
        written = item.source if item.operation is Operation.READ else item.target
        first = item.num_landed
        stop = len(moves) if limit is None else min(len(moves), first + limit)
        for origin, address, size in moves[first:stop].tolist():
            ctypes.memmove(address, origin, size)
            if item.is_corrupt:
                byte = ctypes.c_ubyte.from_address(address + size // 2)
                byte.value ^= 1
            landed = Landed(len(self._landed), written, address, size, item.source)
            self._landed.append(landed)
        item.num_landed = stop
        return stop - first

    def _end(self, item: InFlight) -> None:
        self._pending.remove(item)
        item.status = TransferStatus(TransferState.DONE)
        if item.payload:
            # A refused notice is lost: its operation has ended, so nobody is left to tell.
            with suppress(PeerLost):
                self.send(InFlight(item.source, item.target, None, item.payload))
