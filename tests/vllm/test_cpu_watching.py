"""What can be seen from outside of real vLLM on this machine's CPU, while it moves KV and after.

See `test_cpu_pair` for what it needs.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvcourier.router.app import create_app
from kvcourier.router.config import RouterConfig, parse_instance_spec
from kvcourier.tracing.otel import tracing_of
from otlp_receiver import Collector

from .models import write_qwen3
from .servers import (
    ANSWER_S,
    Vllm,
    needs_vllm,
    request_body,
    served,
    spec_of,
    started,
    tokens,
    wait_until,
)

pytestmark = needs_vllm

PROMPT = list(range(5, 105))
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e473"
CALLER = "00f067aa0ba902b7"
WITHIN = {
    "pull": {"prefill request": {"hold"}, "decode request": {"register", "read"}},
    "push": {
        "prefill request": {"hold", "write"},
        "decode request": {"register", "wait for KV"},
    },
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pair(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Vllm, Vllm]]:
    """P and D that the standard variables tell to send spans, and soon; vLLM traces nothing."""
    folder = tmp_path_factory.mktemp("vllm")
    model = write_qwen3(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        telling = {"tell_stories": True, "kv_lease_duration": 4}
        servers = (
            Vllm("p", "kv_producer", model, folder, extra=telling),
            Vllm("d", "kv_consumer", model, folder, extra=telling),
        )
        with started(*servers):
            yield servers


@pytest.fixture(scope="module")
def router(pair: tuple[Vllm, Vllm]) -> Iterator[str]:
    prefill, decode = (parse_instance_spec(spec_of(server)) for server in pair)
    with tracing_of("kvcourier-router") as tracing:
        app = create_app(RouterConfig(prefill=(prefill,), decode=(decode,)), tracing=tracing)
        with served(app) as url:
            yield url


def prompt_of(mode: str) -> list[int]:
    """None that begins as the other's: D is to need all of it."""
    start = {"pull": 110, "push": 230}[mode]
    return list(range(start, start + 100))


@pytest.mark.parametrize("mode", WITHIN)
def test_one_trace_spans_router_and_both_instances(
    router: str, collector: Collector, mode: str
) -> None:
    trace_id = TRACE_ID + str(list(WITHIN).index(mode))
    headers = {"traceparent": f"00-{trace_id}-{CALLER}-01", "X-KV-Mode": mode}
    assert tokens(router, prompt_of(mode), headers)
    whole = {"dispatch", "prefill leg", "decode leg", *WITHIN[mode]}
    expected = whole.union(*WITHIN[mode].values())
    collector.wait_for(
        lambda spans: {each.name for each in spans if each.trace_id == trace_id} >= expected
    )
    spans = {each.name: each for each in collector.spans if each.trace_id == trace_id}
    assert spans.keys() == expected
    assert spans["dispatch"].parent_id == CALLER
    for part in ("prefill", "decode"):
        request = spans[f"{part} request"]
        assert request.parent_id == spans[f"{part} leg"].span_id
        assert request.service == "kvcourier-vllm"
        name = spans["dispatch"].attributes["kvcourier.transfer_id"]
        assert request.attributes["kvcourier.transfer_id"] == name
        for child in WITHIN[mode][f"{part} request"]:
            assert spans[child].parent_id == request.span_id
    assert not any(each.is_error for each in spans.values())


def test_a_gauge_falls_back_on_an_engine_that_has_nothing_else_to_do(
    pair: tuple[Vllm, Vllm],
) -> None:
    prefill, decode = pair
    assert prefill.metric("kvcourier:quarantined_bytes") == 0
    body = request_body(PROMPT) | {"kv_transfer_params": {"do_remote_decode": True}}
    answer = httpx.post(f"{prefill.url}/v1/completions", json=body, timeout=ANSWER_S)
    assert answer.json()["kv_transfer_params"]
    wait_until(lambda: prefill.metric("kvcourier:holds") == 1, ANSWER_S)
    wait_until(lambda: prefill.metric("kvcourier:holds") == 0, ANSWER_S)
    assert prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
    assert decode.metric("kvcourier:operations_in_flight") == 0


@pytest.mark.parametrize("mode", WITHIN)
def test_one_transfer_is_told_by_router_and_both_instances(router: str, mode: str) -> None:
    body = request_body(prompt_of(mode)[::-1])
    answer = httpx.post(
        f"{router}/v1/completions", json=body, headers={"X-KV-Mode": mode}, timeout=ANSWER_S
    )
    assert answer.status_code == 200, answer.text
    told = story_of(answer.headers["X-KV-Transfer-Id"], f"--router={router}")
    moments = [(each["who"], each["what"]) for each in told["moments"]]
    assert ("router", "dispatched") in moments
    for moment in (("P", "prefill_finished"), ("P", "sent"), ("D", "received")):
        assert moment in moments
    posted = ("D" if mode == "pull" else "P", "posted")
    assert moments.index(posted) < moments.index(("D", "received"))
    for each in told["asked"]:
        assert each["clock_uncertainty_ms"] < 5000
        # One machine: its processes' clocks differ by no more than what their looks leave open.
        assert abs(each["clock_offset_ms"]) <= each["clock_uncertainty_ms"] + 5


def story_of(key: str, *flags: str) -> dict[str, Any]:
    """What `kvcourier story` says, once D and P have given all blocks back."""
    told: dict[str, Any] = {}

    def is_whole() -> bool:
        command = [sys.executable, "-m", "kvcourier", "story", key, *flags, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
        assert done.returncode == 0, done.stderr
        told.update(json.loads(done.stdout))
        released = {each["who"] for each in told["moments"] if each["what"] == "released"}
        return released == {"P", "D"}

    wait_until(is_whole, ANSWER_S)
    return told
