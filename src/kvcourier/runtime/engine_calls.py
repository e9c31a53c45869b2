"""Calls of our own engine, on their way to a courier.

Decides when a call has happened: at once, or when what a GPU computes for it is done; those of one
request stay in order. Refuses to know what follows from a call.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator

from kvcourier.core.events import EngineEvent
from kvcourier.ids import RequestId

Ready = Callable[[], bool]
_Call = tuple[EngineEvent, Ready | None]


class EngineCalls:
    """Calls that are not handled yet. `submit` and `flush` are for any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` makes the courier's thread look here."""
        self._wake = wake
        self._inbox: deque[_Call | threading.Event] = deque()
        self._unready: dict[RequestId, deque[_Call]] = {}

    @property
    def has_new(self) -> bool:
        """Whether anything was submitted since the last `take`."""
        return bool(self._inbox)

    @property
    def has_unready(self) -> bool:
        """Whether a call has yet to happen."""
        return bool(self._unready)

    def submit(self, event: EngineEvent, ready: Ready | None) -> None:
        """A call that has happened, or will have once `ready` returns True."""
        self._inbox.append((event, ready))
        self._wake()

    def flush(self) -> threading.Event:
        """Is set once all that was submitted before has come out of `take`, and is handled."""
        handled = threading.Event()
        self._inbox.append(handled)
        self._wake()
        return handled

    def take(self) -> Iterator[EngineEvent]:
        """Those that have happened; each is to be handled before the next is asked for."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, threading.Event):
                item.set()
            elif self.accept(*item):
                yield item[0]
        for request_id, waiting in list(self._unready.items()):
            while waiting and _has_happened(waiting[0]):
                yield waiting.popleft()[0]
            if not waiting:
                del self._unready[request_id]

    def accept(self, event: EngineEvent, ready: Ready | None = None) -> bool:
        """Whether it is to be handled now; if not, it comes out of `take` later."""
        waiting = self._unready.get(event.request_id)
        if waiting is not None:
            waiting.append((event, ready))
        elif not _has_happened((event, ready)):
            self._unready[event.request_id] = deque([(event, ready)])
        else:
            return True
        return False

    def end(self) -> None:
        """Nothing is handled any more: let nobody wait for it."""
        for item in list(self._inbox):
            if isinstance(item, threading.Event):
                item.set()


def _has_happened(call: _Call) -> bool:
    ready = call[1]
    return ready is None or ready()
