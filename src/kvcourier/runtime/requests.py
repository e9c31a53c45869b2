"""From the reports of ranks to the reports of an instance.

Decides when all ranks together have received, sent or released a request: an engine's block spans
every rank, so it is free when the last rank has let go, and a transfer has failed when the first
rank's has. Refuses to know couriers and transports. Thread-safe.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
    success: Report | None = None
    succeeded: set[Rank] = field(default_factory=set)
    released: set[Rank] = field(default_factory=set)


class RequestTable:
    """Requests the engine has given us and not got back.

    Args:
        ranks: all ranks of the instance.
        abandon: called (outside the lock) when one rank has failed and the others must give up.
    """

    def __init__(self, ranks: frozenset[Rank], abandon: Callable[[RequestId], None]) -> None:
        self._ranks = ranks
        self._abandon = abandon
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

    def hand_over(self, request_id: RequestId) -> None:
        """The engine gives its blocks: they are ours until released.

        Raises:
            LocalProtocolError: the request is unknown, or has handed its blocks over before.
        """
        with self._lock:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.handed_over:
                raise LocalProtocolError(f"request {request_id} has no blocks to hand over now")
            tracked.handed_over = True

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
        if abandon:
            self._abandon(report.request_id)
        return told

    def _tell(self, tracked: _Tracked, rank: Rank, report: Report) -> list[Report]:
        if report.outcome in _SUCCESS:
            tracked.success = _joined(tracked.success, report)
            tracked.succeeded.add(rank)
            return []
        if report.outcome is not Outcome.RELEASED:
            first = not (tracked.failed or tracked.aborted)
            tracked.failed = True
            return [report] if first else []
        tracked.released.add(rank)
        if tracked.released != self._ranks:
            return []
        self._forget(report.request_id, tracked)
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
