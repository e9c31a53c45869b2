"""What must hold in every world, whatever goes wrong in it.

Decides what counts as a violation. Refuses to know how a world runs.

I1  the number of free blocks is in the end what it was
I2  nothing lands in a block that has changed hands since it was granted, nor is sent from one
I3  every request comes to exactly one end
I4  all tables are empty in the end
I5  a fresh request is still served right
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvcourier.config import Limits
from kvcourier.core.messages import Landed, decode
from kvcourier.core.outcomes import Outcome, Report
from kvcourier.errors import KVCourierError
from kvcourier.ids import AgentName
from kvcourier.sim.blocks import BlockPool
from kvcourier.sim.memory import Memory
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import InFlight

_TERMINAL = frozenset({Outcome.RECEIVED, Outcome.RECEIVE_FAILED, Outcome.SENT, Outcome.SEND_FAILED})
_LIMITS = Limits()


class Violation(KVCourierError):
    """Something that must hold did not."""


def require(holds: bool, what: str) -> None:
    """Raise Violation with these words unless it holds."""
    if not holds:
        raise Violation(what)


@dataclass(frozen=True, slots=True)
class Owned:
    """What an agent's instance knows of its blocks.

    Attributes:
        grants: D: for each request, its blocks and `changes` of each when it was received for.
        num_preempted: P: how often each request has lost its blocks.
    """

    place: str
    memory: Memory
    pool: BlockPool
    grants: Mapping[str, Mapping[int, int]]
    num_preempted: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Touched:
    """Blocks of one side of an operation, and `changes` of each by which they are its own."""

    owned: Owned
    blocks: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _Posted:
    written: _Touched
    sent: _Touched | None
    holder_request: str
    num_preempted: int


class Ownership:
    """I2: watches every operation from its posting until its last byte has landed.

    Args:
        owned_by: what an agent's instance knows of its blocks.
        holder_request_of: P's request id for D's.
    """

    def __init__(
        self,
        owned_by: Callable[[AgentName], Owned],
        holder_request_of: Callable[[str], str],
    ) -> None:
        self._owned_by = owned_by
        self._holder_request_of = holder_request_of
        self._posted: dict[InFlight, _Posted] = {}

    def posted(self, item: InFlight) -> None:
        """See data_path.Watch."""
        assert item.moves is not None
        initiator, target = self._owned_by(item.source), self._owned_by(item.target)
        if item.operation is Operation.READ:
            written = _blocks(initiator, item, column=1)
            self._posted[item] = _Posted(_now(initiator, written), None, "", 0)
            return
        written = _blocks(target, item, column=1)
        message = decode(item.payload, _LIMITS)
        if not isinstance(message, Landed):
            # Packed: it goes into staging memory, which no request owns.
            require(not written, f"{item.source} writes a parcel into blocks {written}")
            return
        request_id = message.request_id
        granted = target.grants.get(request_id, {})
        stray = written - granted.keys()
        require(
            not stray, f"I2: {item.source} writes for {request_id} into its not granted {stray}"
        )
        holder_request = self._holder_request_of(request_id)
        num_preempted = initiator.num_preempted.get(holder_request, 0)
        source = _blocks(initiator, item, column=0)
        # Posted after all by a courier that has yet to hear of a preemption: void, as below.
        is_void = num_preempted and not all(map(initiator.pool.is_owned, source))
        self._posted[item] = _Posted(
            _Touched(target, {block: granted[block] for block in written}),
            None if is_void else _now(initiator, source),
            holder_request,
            num_preempted,
        )

    def landing(self, item: InFlight) -> None:
        """See data_path.Watch."""
        posted = self._posted.get(item)
        if posted is None:
            return
        _require_owned(posted.written, f"I2: {item.operation} from {item.source} lands")
        if posted.sent is None:
            return
        # What was sent of a prompt that is computed anew is void, so its source is nobody's care.
        preempted = posted.sent.owned.num_preempted.get(posted.holder_request, 0)
        if preempted == posted.num_preempted:
            _require_owned(posted.sent, f"I2: {item.operation} of {posted.holder_request} is read")


class Reports:
    """I3, as an endpoint tells it: one terminal report and one release of each request.

    Attributes:
        all: every report of what has come to an end, in order.
    """

    def __init__(self) -> None:
        self.all: list[Report] = []
        self._told: dict[str, Counter[str]] = {}

    def of(self, request_id: str) -> list[Outcome]:
        """What was told of a request, in order."""
        return [report.outcome for report in self.all if report.request_id == request_id]

    def took(self, report: Report) -> None:
        """An engine was told this."""
        if report.outcome is Outcome.HELD:
            return
        self.all.append(report)
        if report.outcome is Outcome.RECALLED:
            return
        told = self._told.setdefault(report.request_id, Counter())
        told["terminal" if report.outcome in _TERMINAL else report.outcome.value] += 1
        require(max(told.values()) == 1, f"I3: {report.request_id} is told again: {report}")


def _blocks(owned: Owned, item: InFlight, column: int) -> set[int]:
    """Blocks of an instance that the addresses of this column lie in."""
    assert item.moves is not None
    found: set[int] = set()
    for move in item.moves.tolist():
        found |= owned.memory.blocks_at(move[column], move[2])
    return found


def _now(owned: Owned, blocks: set[int]) -> _Touched:
    touched = _Touched(owned, {block: owned.pool.changes[block] for block in blocks})
    _require_owned(touched, "I2: an operation is posted")
    return touched


def _require_owned(touched: _Touched, what: str) -> None:
    pool = touched.owned.pool
    for block, granted in touched.blocks.items():
        if not pool.is_owned(block) or pool.changes[block] != granted:
            raise Violation(f"{what} in block {block} of {touched.owned.place}, which was let go")
