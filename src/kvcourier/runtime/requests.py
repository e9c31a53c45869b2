"""From the reports of ranks to the reports of an instance.

Decides when all ranks together have received, sent or released a request: an engine's block spans
every rank, so it is free when the last rank has let go, and a transfer has failed when the first
rank's has. Refuses to know couriers and transports. Thread-safe.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvcourier.core.events import BlocksReserved
from kvcourier.core.outcomes import Outcome, Report
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import Rank, RequestId, TransferId, TransferKey

_SUCCESS = frozenset({Outcome.RECEIVED, Outcome.SENT})


@dataclass(slots=True)
class _Tracked:
    key: TransferKey | None
    handed_over: bool = False
    finished: bool = False
    let_go: bool = False
    aborted: bool = False
    failed: bool = False
    reserved: BlocksReserved | None = None
    is_held: bool = False
    success: Report | None = None
    succeeded: set[Rank] = field(default_factory=set)
    released: set[Rank] = field(default_factory=set)
    recalled: set[Rank] = field(default_factory=set)


class RequestTable:
    """Requests the engine has given us and not got back.

    Args:
        ranks: all ranks of the instance.
        abandon: called (outside the lock) when one rank has failed and the others must give up.
        resume: called (outside the lock) with ranks that have given their blocks back although
            another one has received: they are to receive as well.
    """

    def __init__(
        self,
        ranks: frozenset[Rank],
        abandon: Callable[[RequestId], None],
        resume: Callable[[BlocksReserved, frozenset[Rank]], None],
    ) -> None:
        self._ranks = ranks
        self._abandon = abandon
        self._resume = resume
        self._lock = threading.Lock()
        self._requests: dict[RequestId, _Tracked] = {}
        self._keys: dict[TransferKey, RequestId] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, request_id: RequestId, key: TransferKey | None) -> bool:
        """Track a new request; False if its transfer key is in use (a client's repetition).

        Raises:
            LocalProtocolError: the request id is in use.
        """
        with self._lock:
            if request_id in self._requests:
                raise LocalProtocolError(f"request {request_id} is known already")
            if key is not None and key in self._keys:
                return False
            if key is not None:
                self._keys[key] = request_id
            self._requests[request_id] = _Tracked(key)
            return True

    def hand_over(self, request_id: RequestId, reserved: BlocksReserved | None = None) -> None:
        """The engine gives its blocks: they are ours until released, or `reserved` ones recalled.

        Raises:
            LocalProtocolError: the request is unknown, or has handed its blocks over before.
        """
        with self._lock:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.handed_over:
                raise LocalProtocolError(f"request {request_id} has no blocks to hand over now")
            tracked.handed_over = True
            tracked.reserved = reserved

    def finish(self, request_id: RequestId) -> bool:
        """Its prompt is computed, and the couriers know; whether it was let go before."""
        with self._lock:
            tracked = self._requests.get(request_id)
            if tracked is None:
                return False
            tracked.finished = True
            return tracked.let_go

    def let_go(self, transfer_id: TransferId) -> tuple[bool, list[RequestId]]:
        """Nobody will collect a transfer: whether it is known, and which of its requests to abort.

        One that is being computed is its engine's to end; if it is finished instead, `finish` says
        that it was let go.
        """
        with self._lock:
            names = [name for key, name in self._keys.items() if key.transfer_id == transfer_id]
            found = [(name, self._requests[name]) for name in names]
            for _, tracked in found:
                tracked.let_go = True
            return bool(found), [name for name, tracked in found if tracked.finished]

    def abort(self, request_id: RequestId, *, keeps_blocks: bool = False) -> bool:
        """The engine wants no outcome any more; False if the request is unknown.

        `keeps_blocks`: it hands over those of an unfinished prompt and waits for RELEASED.
        """
        with self._lock:
            tracked = self._requests.get(request_id)
            if tracked is None:
                return False
            tracked.aborted = True
            tracked.handed_over |= keeps_blocks
            if not tracked.handed_over:
                self._forget(request_id, tracked)
            return True

    def report(self, rank: Rank, report: Report) -> list[Report]:
        """What one rank's report means for the instance, in order."""
        with self._lock:
            tracked = self._requests.get(report.request_id)
            if tracked is None:
                return []
            told = self._tell(tracked, rank, report)
            abandon = any(each.outcome is Outcome.RECEIVE_FAILED for each in told)
            resumed = self._take_resumed(tracked)
        if abandon:
            self._abandon(report.request_id)
        if resumed and tracked.reserved is not None:
            self._resume(tracked.reserved, resumed)
        return told

    def _take_resumed(self, tracked: _Tracked) -> frozenset[Rank]:
        """Ranks that were faster to give up than to receive; the blocks of all are still ours."""
        goes_on = not (tracked.failed or tracked.aborted) and tracked.succeeded
        if not goes_on or tracked.released | tracked.recalled != self._ranks:
            return frozenset()
        resumed, tracked.recalled = frozenset(tracked.recalled), set()
        return resumed

    def _tell(self, tracked: _Tracked, rank: Rank, report: Report) -> list[Report]:
        if report.outcome in _SUCCESS:
            tracked.success = _joined(tracked.success, report)
            tracked.succeeded.add(rank)
            return []
        if report.outcome is Outcome.HELD:
            first, tracked.is_held = not tracked.is_held, True
            return [report] if first else []
        if report.outcome is Outcome.RECALLED:
            tracked.recalled.add(rank)
            return self._tell_back(tracked, report)
        if report.outcome is not Outcome.RELEASED:
            first = not (tracked.failed or tracked.aborted)
            tracked.failed = True
            return [report] if first else []
        tracked.released.add(rank)
        return self._tell_back(tracked, report)

    def _tell_back(self, tracked: _Tracked, report: Report) -> list[Report]:
        """The blocks are the engine's again when no rank has any part of them."""
        if tracked.recalled == self._ranks and not (tracked.failed or tracked.aborted):
            tracked.handed_over, tracked.recalled = False, set()
            return [report]
        goes_on = tracked.succeeded and not (tracked.failed or tracked.aborted)
        back = tracked.released if goes_on else tracked.released | tracked.recalled
        if back != self._ranks:
            return []
        self._forget(report.request_id, tracked)
        report = replace(report, outcome=Outcome.RELEASED)
        told = []
        if tracked.success and tracked.succeeded == self._ranks and not tracked.aborted:
            told.append(tracked.success)
        return [*told, report]

    def _forget(self, request_id: RequestId, tracked: _Tracked) -> None:
        del self._requests[request_id]
        if tracked.key is not None:
            self._keys.pop(tracked.key, None)


def _joined(before: Report | None, report: Report) -> Report:
    """The success of several ranks; a continuation is one only if all have got the same."""
    if before is None or before.continuation == report.continuation:
        return report
    return replace(report, continuation=None)
