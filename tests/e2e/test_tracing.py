"""One trace over router, P and D: real processes, and a collector that decodes what they send."""

from collections.abc import Iterator

import pytest

from e2e.cluster import MODES, Cluster, body_of, running_cluster
from otlp_receiver import Collector, Received

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
PARENTS = {
    "dispatch": None,
    "prefill leg": "dispatch",
    "decode leg": "dispatch",
    "prefill request": "prefill leg",
    "decode request": "decode leg",
}
WITHIN = {
    "pull": {
        "prefill request": {"queue", "prefill", "hold"},
        "decode request": {"queue", "register", "read", "decode"},
    },
    "push": {
        "prefill request": {"queue", "prefill", "hold", "write"},
        "decode request": {"queue", "register", "wait for KV", "decode"},
    },
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that the standard variables tell to send spans, and soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with running_cluster(tmp_path_factory.mktemp("traced")) as cluster:
            yield cluster


def spans_of(collector: Collector, trace_id: str) -> list[Received]:
    return [each for each in collector.spans if each.trace_id == trace_id]


@pytest.mark.parametrize("mode", MODES)
def test_one_trace_spans_router_and_both_instances(
    traced: Cluster, collector: Collector, mode: str
) -> None:
    trace_id = TRACE_ID[:-1] + str(MODES.index(mode))
    headers = {"traceparent": f"00-{trace_id}-{CALLER}-01", "X-KV-Mode": mode}
    answer = traced.router.post(body_of([9, *range(90)]), headers=headers)
    assert answer.status_code == 200
    expected = set(PARENTS) | set().union(*WITHIN[mode].values())
    collector.wait_for(
        lambda spans: {each.name for each in spans if each.trace_id == trace_id} >= expected
    )
    spans = spans_of(collector, trace_id)
    by_id = {each.span_id: each for each in spans}
    whole = {each.name: each for each in spans if each.name in PARENTS}
    for name, parent in PARENTS.items():
        if parent is None:
            assert whole[name].parent_id == CALLER
        else:
            assert whole[name].parent_id == whole[parent].span_id, name
    for each in spans:
        assert not each.is_error, each
        assert each.start_s <= each.end_s
        if each.name not in PARENTS:
            parent = by_id[each.parent_id]
            assert each.service == parent.service
            assert each.name in WITHIN[mode][parent.name], (each.name, parent.name)
    services = {name: whole[name].service for name in PARENTS}
    assert services["dispatch"] == "kvcourier-router"
    assert services["prefill request"] == services["decode request"] == "kvcourier-instance"
    transfer_id = answer.headers["x-kv-transfer-id"]
    for name in PARENTS:
        assert whole[name].attributes["kvcourier.transfer_id"] == transfer_id
    assert "first_token" in whole["decode request"].events
    # One machine has one clock, so what follows from what also comes after it.
    assert whole["dispatch"].start_s <= whole["prefill leg"].start_s
    assert whole["prefill leg"].start_s <= whole["prefill request"].start_s
    assert whole["decode request"].end_s <= whole["decode leg"].end_s


def test_who_asks_for_no_sample_gets_none(traced: Cluster, collector: Collector) -> None:
    """As the standard's default sampler, parentbased_always_on, has it."""
    unsampled, sampled = "a" * 32, "b" * 32
    for trace_id, flags in ((unsampled, "00"), (sampled, "01")):
        headers = {"traceparent": f"00-{trace_id}-{CALLER}-{flags}"}
        assert traced.router.post(body_of([5, *range(40)]), headers=headers).status_code == 200
    collector.wait_for(
        lambda spans: (
            {"prefill request", "decode request", "dispatch"}
            <= {each.name for each in spans if each.trace_id == sampled}
        )
    )
    assert spans_of(collector, unsampled) == []


def test_a_failed_request_has_a_failed_span(traced: Cluster, collector: Collector) -> None:
    trace_id = "c" * 32
    headers = {"traceparent": f"00-{trace_id}-{CALLER}-01"}
    answer = traced.router.post(body_of([1] * 9000), headers=headers)
    assert answer.status_code == 400
    collector.wait_for(
        lambda spans: "dispatch" in {each.name for each in spans if each.trace_id == trace_id}
    )
    (dispatch,) = [e for e in spans_of(collector, trace_id) if e.name == "dispatch"]
    assert dispatch.is_error


def test_a_collector_that_refuses_or_is_gone_disturbs_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    refusing = Collector(status=503)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", refusing.url)
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
            with running_cluster(tmp_path_factory.mktemp("refused")) as cluster:
                for mode in MODES:
                    cluster.router.ask([2, *range(60)], mode)
                refusing.close()
                for mode in MODES:
                    cluster.router.ask([3, *range(60)], mode)
                cluster.wait_idle()
                for server in cluster.servers:
                    server.child.process.terminate()
                assert [server.wait_end() for server in cluster.servers] == [0, 0, 0]
    finally:
        refusing.close()
