"""A collector for tests: takes spans by OTLP over HTTP and keeps them."""

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from loopback import Handler, Listener


@dataclass(frozen=True)
class Received:
    """One span, as it came over the wire."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]


class Collector:
    """Listens on loopback; with `status`, it answers that instead of taking anything."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Received] = []
        self.changed = threading.Condition()
        collector = self

        class Takes(Handler):
            def do_POST(self) -> None:
                body = self.body()
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                if status == 200:
                    assert self.path == "/v1/traces"
                    collector._take(ExportTraceServiceRequest.FromString(body))
                self.answer(status, answer, {"content-type": "application/x-protobuf"})

        self._listener = Listener(Takes)
        self.url = self._listener.url

    def close(self) -> None:
        """Nobody listens any more; idempotent."""
        self._listener.close()

    def wait_for(self, complete: Callable[[list[Received]], bool], wait_s: float = 60) -> None:
        """Until the spans so far are all that a test looks for."""
        with self.changed:
            found = self.changed.wait_for(lambda: complete(self.spans), wait_s)
        assert found, [(each.service, each.name) for each in self.spans]

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self.changed:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_read(service, span) for span in scope.spans]
            self.changed.notify_all()


def _read(service: str, span: Any) -> Received:
    return Received(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        kind=span.kind,
        is_error=span.status.code == 2,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}
