"""When tracing is on, and what reaches an exporter."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvcourier.errors import ConfigError
from kvcourier.tracing import otel
from kvcourier.tracing.interface import Event, Kind, Span, parent_of, trace_headers
from kvcourier.tracing.otel import ENDPOINTS, OtelTracing, open_tracing

PARENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=1"}
UNSAMPLED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[OtelTracing]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = OtelTracing(provider)
    yield made
    made.close()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_live_spans_carry_their_context_from_process_to_process(
    tracing: OtelTracing, exporter: InMemorySpanExporter
) -> None:
    whole = tracing.begin("dispatch", Kind.SERVER, PARENT, 10.0, {"kvcourier.mode": "push"})
    leg = whole.child("leg", Kind.CLIENT, 11.0, {})
    carrier = leg.carrier()
    tracing.tell(carrier, Span("request", 12.0, 13.0, Kind.SERVER), [Span("queue", 12.0, 12.5)])
    leg.end(14.0, "answered 503")
    whole.end(15.0)
    spans = by_name(exporter)
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert f"{spans['dispatch'].context.trace_id:032x}" == "a" * 32
    assert f"{spans['dispatch'].parent.span_id:016x}" == "b" * 16
    for child, parent in (("leg", "dispatch"), ("request", "leg"), ("queue", "request")):
        assert spans[child].parent.span_id == spans[parent].context.span_id
    assert carrier["tracestate"] == "x=1"
    assert not spans["leg"].status.is_ok and spans["leg"].status.description == "answered 503"
    assert (spans["queue"].start_time, spans["queue"].end_time) == (12 * 10**9, 12_500_000_000)


def test_events_keep_their_time(tracing: OtelTracing, exporter: InMemorySpanExporter) -> None:
    event = Event(1.5, "first_token", {"kvcourier.rank": "r"})
    tracing.tell({}, Span("request", 1.0, 2.0, events=(event,)), [])
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    (found,) = span.events
    assert (found.name, found.timestamp) == ("first_token", 1_500_000_000)


def test_what_the_caller_does_not_sample_is_not_sampled(
    tracing: OtelTracing, exporter: InMemorySpanExporter
) -> None:
    whole = tracing.begin("dispatch", Kind.SERVER, UNSAMPLED, 1.0, {})
    assert whole.carrier()["traceparent"].endswith("-00")
    whole.end(2.0)
    tracing.tell(UNSAMPLED, Span("request", 1.0, 2.0), [Span("queue", 1.0, 2.0)])
    assert exporter.get_finished_spans() == ()


def test_headers_that_are_no_context_begin_a_new_trace(
    tracing: OtelTracing, exporter: InMemorySpanExporter
) -> None:
    for nonsense in ("", "x" * 10_000, "00-zz-zz-01", f"00-{'0' * 32}-{'0' * 16}-01"):
        tracing.begin("dispatch", Kind.SERVER, {"traceparent": nonsense}, 1.0, {}).end(2.0)
    assert all(span.parent is None for span in exporter.get_finished_spans())
    assert len(exporter.get_finished_spans()) == 4


def test_only_trace_headers_are_taken() -> None:
    headers = [("Traceparent", "a"), ("authorization", "secret"), ("tracestate", "b")]
    assert trace_headers(headers) == {"traceparent": "a", "tracestate": "b"}


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        ["traceparent"],
        "",
        PARENT["traceparent"] + "\n",
        PARENT["traceparent"] * 1000,
        PARENT["traceparent"].upper(),
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
    ],
)
def test_a_parent_that_is_malformed_is_none(text: object) -> None:
    assert parent_of(text) == {}
    assert parent_of(PARENT["traceparent"]) == {"traceparent": PARENT["traceparent"]}


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({ENDPOINTS[0]: "http://127.0.0.1:1/v1/traces"}, True),
        ({ENDPOINTS[1]: "http://127.0.0.1:1"}, True),
        ({ENDPOINTS[1]: ""}, False),
        ({ENDPOINTS[1]: "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINTS[1]: "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_standard_variables_switch_it_on_and_off(
    environment: dict[str, str], is_on: bool
) -> None:
    tracing = open_tracing("kvcourier-test", environment=environment)
    assert (tracing is not None) is is_on
    if tracing is not None:
        tracing.close()


def test_without_the_extra_a_flag_is_refused_and_a_variable_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> TracerProvider:
        raise ModuleNotFoundError("opentelemetry")

    monkeypatch.setattr(otel, "_make_provider", missing)
    with pytest.raises(ConfigError, match=r"kvcourier\[otel\]"):
        open_tracing("kvcourier-test", "http://127.0.0.1:1/v1/traces", {})
    assert open_tracing("kvcourier-test", None, {ENDPOINTS[1]: "http://127.0.0.1:1"}) is None
    assert "kvcourier[otel]" in caplog.text


def test_nothing_is_imported_while_it_is_off() -> None:
    code = (
        "import sys\n"
        "import kvcourier.router.app, kvcourier.engine.server.traces\n"
        "import kvcourier.vllm_connector.traces\n"
        "from kvcourier.tracing.otel import open_tracing\n"
        "assert open_tracing('x', None, {}) is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
