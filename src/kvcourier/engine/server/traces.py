"""From requests that are over to their spans.

Decides when a request's story is told whole: an answered prompt may still be held for somebody.
Refuses to know what becomes of the spans, and their names (`kvcourier.tracing.spans`).
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvcourier.core.params import HoldIntent
from kvcourier.engine.server.job import Job
from kvcourier.ids import RequestId
from kvcourier.runtime.diary import Diary
from kvcourier.runtime.interface import Endpoint
from kvcourier.tracing.interface import Carrier, Tracing, Value, trace_headers
from kvcourier.tracing.spans import Side, instance_spans, is_over

_log = logging.getLogger(__name__)
_PERIOD_S = 0.25
_PATIENCE_S = 600.0
"""What is not over by then is told as it is: a lost end must not be followed for ever."""
_MAX_FOLLOWED = 4096


class StoryTeller:
    """All that an instance knows of a request: what its server saw, and its couriers."""

    def __init__(self, endpoint: Endpoint | None, diary: Diary) -> None:
        self._endpoint = endpoint
        self._diary = diary

    def story(self, key: str) -> list[dict[str, Any]]:
        """By request id or transfer id, in order; empty if unknown or forgotten."""
        moved = self._endpoint.story(key) if self._endpoint is not None else None
        return sorted([*(moved or ()), *self._diary.story(key)], key=lambda e: e["at_unix_s"])


@dataclass(frozen=True, slots=True)
class _Followed:
    side: Side
    parent: Carrier
    attributes: dict[str, Value]
    since_s: float = field(default_factory=time.monotonic)


class RequestTraces:
    """Follows requests until they are over, then tells their spans. On the event loop only."""

    def __init__(self, tracing: Tracing, teller: StoryTeller) -> None:
        self._tracing = tracing
        self._teller = teller
        self._followed: OrderedDict[RequestId, _Followed] = OrderedDict()

    def follow(self, job: Job, headers: Iterable[tuple[str, str]]) -> None:
        """A request was accepted, which came with these headers."""
        parent = trace_headers(headers)
        for part in job.parts:
            attributes: dict[str, Value] = {"gen_ai.request.id": str(part.request_id)}
            if job.intent is not None and job.intent.transfer_id is not None:
                attributes["kvcourier.transfer_id"] = str(job.intent.transfer_id)
            self._followed[part.request_id] = _Followed(_side(job), parent, attributes)
        while len(self._followed) > _MAX_FOLLOWED:
            self._tell(*self._followed.popitem(last=False))

    async def watch(self) -> None:
        """Tell what is over, until cancelled; then tell the rest as it is."""
        try:
            while True:
                await asyncio.sleep(_PERIOD_S)
                self.look()
        finally:
            for request_id, followed in self._followed.items():
                self._tell(request_id, followed)
            self._followed.clear()

    def look(self) -> None:
        """Tell what is over by now."""
        now = time.monotonic()
        for request_id, followed in list(self._followed.items()):
            story = self._teller.story(request_id)
            if is_over(story, followed.side) or now - followed.since_s > _PATIENCE_S:
                del self._followed[request_id]
                self._tell(request_id, followed)

    def _tell(self, request_id: RequestId, followed: _Followed) -> None:
        story = self._teller.story(request_id)
        if not story:
            _log.debug("%s: its story was forgotten before its spans were told", request_id)
            return
        root, children = instance_spans(story, followed.side, followed.attributes)
        self._tracing.tell(followed.parent, root, children)


def _side(job: Job) -> Side:
    if job.intent is None:
        return Side.NONE
    return Side.PREFILL if isinstance(job.intent, HoldIntent) else Side.DECODE
