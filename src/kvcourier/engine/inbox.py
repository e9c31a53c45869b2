"""What other threads say to an engine's thread.

Decides whether anything is taken in, under which ids, and when the engine's thread wakes. Refuses
to know what follows from it. All that threads share is here, under one condition.
"""

import threading
from dataclasses import dataclass

from kvcourier.engine.api import RequestRejected
from kvcourier.engine.live import LiveRequest
from kvcourier.errors import KVCourierError
from kvcourier.ids import RequestId


class EngineStopped(KVCourierError):
    """The engine was closed, or its thread died: HTTP 503."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End this request."""

    request_id: RequestId


class Inbox:
    """Requests and aborts that the engine has not seen yet, in order."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._items: list[LiveRequest | Abort] = []
        self._used_ids: set[RequestId] = set()
        self._has_reports = False
        self._is_stopping = False
        self._closed_because: str | None = "it was not started"

    @property
    def closed_because(self) -> str | None:
        """Why nobody takes anything out; None while somebody does."""
        return self._closed_because

    @property
    def ids_in_use(self) -> frozenset[RequestId]:
        """Ids that no new request may have."""
        with self._wake:
            return frozenset(self._used_ids)

    # Called from other threads.

    def claim(self, request_id: RequestId) -> None:
        """Keep an id for a request, until it is freed.

        Raises:
            EngineStopped: nothing is taken in.
            RequestRejected: the id is in use.
        """
        with self._wake:
            if self._closed_because is not None or self._is_stopping:
                raise EngineStopped(f"the engine has stopped: {self._closed_because or 'closing'}")
            if request_id in self._used_ids:
                raise RequestRejected(f"request_id: {request_id!r} is in use; send a new one")
            self._used_ids.add(request_id)

    def free(self, request_id: RequestId) -> None:
        """An id may be used again."""
        with self._wake:
            self._used_ids.discard(request_id)

    def put(self, live: LiveRequest) -> None:
        """Hand a request over. Raises EngineStopped if nobody takes it any more."""
        with self._wake:
            if self._closed_because is not None:
                raise EngineStopped(f"the engine has stopped: {self._closed_because}")
            self._items.append(live)
            self._wake.notify()

    def abort(self, request_id: RequestId) -> None:
        """Ask for the end of a request, which need not be known."""
        with self._wake:
            self._items.append(Abort(request_id))
            self._wake.notify()

    def on_reports(self) -> None:
        """The endpoint has something to tell."""
        with self._wake:
            self._has_reports = True
            self._wake.notify()

    def stop(self) -> None:
        """The engine's thread is to end, after the step that is running."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def waiting(self) -> list[LiveRequest]:
        """Requests that the engine has not seen yet."""
        with self._wake:
            return [item for item in self._items if isinstance(item, LiveRequest)]

    # Called from the engine's thread, or before there is one.

    def open(self) -> None:
        """Take things in from now on."""
        with self._wake:
            self._closed_because = None

    def close(self, because: str) -> None:
        """Take nothing in any more; what is here already can be taken out."""
        with self._wake:
            self._closed_because = because

    def wait(self, *, is_busy: bool) -> bool:
        """Sleep while there is nothing to do; False once the engine is to stop."""
        with self._wake:
            while not (is_busy or self._items or self._has_reports or self._is_stopping):
                self._wake.wait()
            return not self._is_stopping

    def take(self) -> list[LiveRequest | Abort]:
        """All there is, in order."""
        with self._wake:
            items, self._items = self._items, []
        return items

    def take_has_reports(self) -> bool:
        """Whether the endpoint had something to tell since the last call."""
        with self._wake:
            has_reports, self._has_reports = self._has_reports, False
        return has_reports
