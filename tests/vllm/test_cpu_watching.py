"""What can be seen from outside of real vLLM on this machine's CPU, while it moves KV and after.

See `test_cpu_pair` for what it needs.
"""

from collections.abc import Iterator

import httpx
import pytest

from .models import write_qwen3
from .servers import ANSWER_S, Vllm, needs_vllm, request_body, started, wait_until

pytestmark = needs_vllm

PROMPT = list(range(5, 105))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_qwen3(folder / "model")
    servers = (
        Vllm("p", "kv_producer", model, folder, extra={"kv_lease_duration": 4}),
        Vllm("d", "kv_consumer", model, folder),
    )
    with started(*servers):
        yield servers


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
