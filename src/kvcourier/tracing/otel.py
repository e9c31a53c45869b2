"""Spans by OpenTelemetry's SDK.

Decides when tracing is on, and that nothing of it can disturb serving. Refuses to know what the
spans mean. The standard variables (OTEL_*) decide everything else: the SDK reads them.
"""

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcourier.errors import ConfigError
from kvcourier.tracing.interface import Carrier, Kind, LiveSpan, Span, Tracing, Value

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

_log = logging.getLogger(__name__)
_FLUSH_S = 3.0
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DISABLED, EXPORTER = "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"
SERVICE_NAME, ATTRIBUTES = "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"
VARIABLES = (*ENDPOINTS, DISABLED, EXPORTER, SERVICE_NAME, ATTRIBUTES)
"""What is read here. The SDK reads more."""

_INSTALL = "install kvcourier with its extra otel: pip install 'kvcourier[otel]'"


def open_tracing(
    service: str, endpoint: str | None = None, environment: Mapping[str, str] = os.environ
) -> Tracing | None:
    """What sends spans; None where nobody wants any, and then nothing is imported.

    Args:
        service: `service.name`, where the environment names none.
        endpoint: of a collector, for OTLP over HTTP, as it is; None: the environment says.

    Raises:
        ConfigError: `endpoint` is given, but OpenTelemetry is not installed, or cannot be set up.
    """
    if not is_wanted(endpoint, environment):
        return None
    try:
        provider = _make_provider(service, endpoint, environment)
    except Exception as error:
        problem = _INSTALL if isinstance(error, ImportError) else f"{error}"
        if endpoint is not None:
            raise ConfigError(f"--otlp-traces-endpoint: no tracing: {problem}") from error
        # The variables are often set for all of a machine or a cluster.
        _log.warning("%s is set, but there is no tracing: %s", " or ".join(ENDPOINTS), problem)
        return None
    return OtelTracing(provider)


@contextmanager
def tracing_of(service: str, endpoint: str | None = None) -> Iterator[Tracing | None]:
    """`open_tracing`, closed at the end of the block."""
    tracing = open_tracing(service, endpoint)
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


def is_wanted(endpoint: str | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody wants spans."""
    if environment.get(DISABLED, "").strip().lower() == "true":
        return False
    if environment.get(EXPORTER, "otlp").strip().lower() == "none":
        return False
    return endpoint is not None or any(environment.get(name) for name in ENDPOINTS)


def _make_provider(
    service: str, endpoint: str | None, environment: Mapping[str, str]
) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    given = environment.get(ATTRIBUTES, "")
    is_named = environment.get(SERVICE_NAME) or "service.name=" in given
    resource = Resource.create({} if is_named else {"service.name": service})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class OtelTracing:
    """Implements `Tracing` over a provider, which it closes."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvcourier")

    def begin(
        self,
        name: str,
        kind: Kind,
        parent: Carrier,
        at_unix_s: float,
        attributes: Mapping[str, Value],
    ) -> LiveSpan:
        """Begin a span; see `Tracing`."""
        return _begin(self._tracer, _context_of(parent), name, kind, at_unix_s, attributes)

    def tell(self, parent: Carrier, root: Span, children: Sequence[Span]) -> None:
        """Take finished spans; see `Tracing`."""
        whole = self._finished(_context_of(parent), root)
        for child in children:
            self._finished(whole.context, child)

    def close(self) -> None:
        """Send what is left; see `Tracing`."""
        # A collector that hangs must not hold up whoever ends us.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_FLUSH_S)
        if closing.is_alive():
            _log.warning("the last spans were not taken within %g s", _FLUSH_S)

    def _finished(self, context: "Context", span: Span) -> "_Live":
        live = _begin(
            self._tracer, context, span.name, span.kind, span.start_unix_s, span.attributes
        )
        for event in span.events:
            live.span.add_event(event.name, dict(event.attributes), _ns(event.at_unix_s))
        live.end(span.end_unix_s, span.failure)
        return live


class _Live:
    """Implements `LiveSpan`."""

    def __init__(self, tracer: "Tracer", span: "OtelSpan", context: "Context") -> None:
        self._tracer = tracer
        self.span = span
        self.context = context

    def carrier(self) -> Carrier:
        from opentelemetry import propagate

        carrier: dict[str, str] = {}
        propagate.inject(carrier, self.context)
        return carrier

    def child(
        self, name: str, kind: Kind, at_unix_s: float, attributes: Mapping[str, Value]
    ) -> LiveSpan:
        return _begin(self._tracer, self.context, name, kind, at_unix_s, attributes)

    def end(self, at_unix_s: float, failure: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if failure:
            self.span.set_status(Status(StatusCode.ERROR, failure))
        self.span.end(_ns(at_unix_s))


def _begin(
    tracer: "Tracer",
    context: "Context",
    name: str,
    kind: Kind,
    at_unix_s: float,
    attributes: Mapping[str, Value],
) -> _Live:
    from opentelemetry.trace import SpanKind, set_span_in_context

    span = tracer.start_span(
        name, context, SpanKind[kind.name], dict(attributes), start_time=_ns(at_unix_s)
    )
    return _Live(tracer, span, set_span_in_context(span, context))


def _context_of(parent: Carrier) -> "Context":
    from opentelemetry import propagate
    from opentelemetry.context import Context

    # Not the context of whatever runs here just now.
    return propagate.extract(dict(parent), Context())


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
