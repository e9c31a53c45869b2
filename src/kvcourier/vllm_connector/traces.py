"""Whose children the spans of vLLM's requests are, and when they are told.

Decides where a request's parent is read, and that a request's spans are told when its blocks are
vLLM's again. Refuses to know OpenTelemetry, and what the spans are (`kvcourier.tracing`).

The scheduler sees a request's parent, its workers have the couriers' stories. So the parents go to
the workers with the next step. A courier hears of blocks at once and may be done before that step.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvcourier.config import Limits
from kvcourier.ids import RequestId, owner_of
from kvcourier.runtime.reports import Outcome, Report, Side
from kvcourier.tracing.interface import Carrier, Tracing, Value, parent_of
from kvcourier.tracing.spans import Side as Part
from kvcourier.tracing.spans import instance_spans

MAX_FOLLOWED = 4096
"""Requests of which one half is kept, the parent or the end. Those that never had blocks of ours
have no end; they are dropped as the oldest."""

Half = TypeVar("Half")
_PARTS = {Side.HOLD: Part.PREFILL, Side.WANT: Part.DECODE}


@dataclass(frozen=True, slots=True)
class Traced:
    """A request that takes part in a transfer: its id, whose child it is, and what it is called."""

    request_id: RequestId
    parent: Carrier
    transfer_id: str


class Parents:
    """The scheduler's part: the parents of requests that are new since the last step."""

    def __init__(self, limits: Limits) -> None:
        self._max_id_bytes = limits.max_id_bytes
        self._new: list[Traced] = []

    def read(self, request: Any) -> None:
        """A request was accepted. Nothing of what its client sent is trusted."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping):
            return
        # vLLM keeps headers only where its own tracing is on; our router puts them here as well.
        parent = parent_of(params.get("traceparent"))
        if not parent:
            headers = getattr(request, "trace_headers", None)
            if isinstance(headers, Mapping):
                parent = parent_of(headers.get("traceparent"))
        name = params.get("transfer_id")
        if not isinstance(name, str) or len(name) > self._max_id_bytes or not name.isprintable():
            name = ""
        self._new.append(Traced(RequestId(request.request_id), dict(parent), name))

    def take(self) -> tuple[Traced, ...]:
        """Those since the last time."""
        taken, self._new = tuple(self._new), []
        return taken


class WorkerTraces:
    """A worker's part: tells each request's spans once, from its courier's story.

    Args:
        story: of a request, by its id.
    """

    def __init__(self, tracing: Tracing, story: Callable[[str], list[dict[str, Any]]]) -> None:
        self._tracing = tracing
        self._story = story
        self._lock = threading.Lock()
        self._followed: OrderedDict[RequestId, Traced] = OrderedDict()
        self._early: OrderedDict[RequestId, Side] = OrderedDict()

    def follow(self, requests: Iterable[Traced]) -> None:
        """These are to be told of; on vLLM's thread."""
        over = []
        with self._lock:
            for traced in requests:
                side = self._early.pop(traced.request_id, None)
                if side is None:
                    _keep(self._followed, traced.request_id, traced)
                else:
                    over.append((traced, side))
        for traced, side in over:
            self._tell(traced, side)

    def on_report(self, report: Report) -> None:
        """Something has ended; on the courier's thread."""
        name, side = report.request_id, report.side
        if report.outcome is not Outcome.RELEASED or side is None or name != owner_of(name):
            return
        with self._lock:
            traced = self._followed.pop(name, None)
            if traced is None:
                _keep(self._early, name, side)
        if traced is not None:
            self._tell(traced, side)

    def _tell(self, traced: Traced, side: Side) -> None:
        if not (story := self._story(traced.request_id)):
            return
        attributes: dict[str, Value] = {"gen_ai.request.id": str(traced.request_id)}
        if traced.transfer_id:
            attributes["kvcourier.transfer_id"] = traced.transfer_id
        root, children = instance_spans(story, _PARTS[side], attributes)
        self._tracing.tell(traced.parent, root, children)

    def close(self) -> None:
        """Send what is left; blocks for seconds at most."""
        self._tracing.close()


def _keep(kept: "OrderedDict[RequestId, Half]", name: RequestId, half: Half) -> None:
    kept[name] = half
    while len(kept) > MAX_FOLLOWED:
        kept.popitem(last=False)
