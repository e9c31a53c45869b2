"""Spans of transfers, from the parent in a request's params to a collector."""

import os

import pytest

from otlp_receiver import Collector

from .engine_rig import MODES, handed_over, prompt_of, run

SPAN = "b" * 16
WITHIN = {
    "pull": {"prefill request": {"hold"}, "decode request": {"register", "read"}},
    "push": {"prefill request": {"hold", "write"}, "decode request": {"register", "wait for KV"}},
}


@pytest.fixture
def collector(monkeypatch):
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield made
    made.close()


@pytest.mark.parametrize("mode", MODES)
def test_both_workers_tell_their_spans_under_the_parent_that_a_router_names(
    collector, pair, mode
) -> None:
    p, d = pair
    trace_id = os.urandom(16).hex()
    handed_over(p, d, prompt_of(100), mode, traceparent=f"00-{trace_id}-{SPAN}-01")
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    expected = set(WITHIN[mode]).union(*WITHIN[mode].values())
    collector.wait_for(lambda spans: {each.name for each in spans} >= expected)
    spans = {each.name: each for each in collector.spans}
    assert {each.trace_id for each in spans.values()} == {trace_id}
    for name, within in WITHIN[mode].items():
        whole = spans[name]
        assert (whole.parent_id, whole.service, whole.is_error) == (SPAN, "kvcourier-vllm", False)
        assert {each for each in within if spans[each].parent_id == whole.span_id} == within


def test_a_transfer_without_a_parent_is_a_trace_and_one_that_fails_says_why(
    collector, pair, network
) -> None:
    p, d = pair
    held, _ = handed_over(p, d, prompt_of(100), "pull", want=False)
    params = {**p.asked[held].params, "remote_incarnation": "another life"}
    d.ask(prompt_of(100), params)
    run(d, until=lambda: d.is_idle)
    collector.wait_for(lambda spans: any(each.name == "decode request" for each in spans))
    (whole,) = [each for each in collector.spans if each.name == "decode request"]
    assert whole.is_error and whole.parent_id == ""
