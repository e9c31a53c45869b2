"""Real vLLM on this machine's CPU, a prefill and a decode instance with `CourierConnector`.

Needs an environment that `tests/vllm/install.py` makes; `make test-vllm` does both. What one
instance generates by itself is the reference.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .models import write_qwen3
from .servers import (
    ANSWER_S,
    Vllm,
    needs_vllm,
    request_body,
    routers,
    served,
    started,
    tokens,
    wait_until,
)

LENGTHS = (1, 15, 16, 17, 33, 200)

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_qwen3(folder / "model")
    servers = (
        Vllm("p", "kv_producer", model, folder),
        Vllm("d", "kv_consumer", model, folder),
    )
    with started(*servers):
        yield servers


@pytest.mark.parametrize(
    "way",
    [
        "pull proxy",
        "push proxy",
        "push proxy without transfer ids",
        "kvcourier route, pull",
        "kvcourier route, push",
    ],
)
def test_tokens_equal_one_instances(pair: tuple[Vllm, Vllm], way: str) -> None:
    prefill, decode = pair
    headers = {"X-KV-Mode": way.split(", ")[1]} if ", " in way else {}
    with served(routers(pair)[way]) as url:
        for length in LENGTHS:
            prompt = [(7 * length + 13 * i) % 500 + 5 for i in range(length)]
            expected = tokens(prefill.url, prompt)
            # Twice: the second time most of the prompt is in D's prefix cache.
            assert tokens(url, prompt, headers) == expected, f"{length} tokens"
            assert tokens(url, prompt, headers) == expected, f"{length} tokens, cached"
    for server in pair:
        assert server.metric("vllm:nixl_num_failed_transfers_total") == 0
        assert server.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
    moved = [server.metric("vllm:nixl_bytes_transferred_sum") for server in pair]
    assert sum(moved) > 0
    assert decode.process.poll() is None


def test_many_at_once_in_both_modes(pair: tuple[Vllm, Vllm]) -> None:
    prompts = [[(31 * n + 17 * i) % 500 + 5 for i in range(20 + 11 * n)] for n in range(8)]
    expected = [tokens(pair[0].url, prompt) for prompt in prompts]
    found: dict[int, list[int]] = {}
    with served(routers(pair)["kvcourier route, pull"]) as url:

        def ask(index: int) -> None:
            headers = {"X-KV-Mode": ("pull", "push")[index % 2]}
            found[index] = tokens(url, prompts[index], headers)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ANSWER_S)
    assert [found.get(index) for index in range(len(prompts))] == expected


BROKEN_PARAMS = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "127.0.0.1"},
    {"do_remote_prefill": True, "remote_engine_id": 7, "remote_host": [], "remote_port": "x"},
    {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 10**9,
        "remote_request_id": "x",
    },
    {"do_remote_decode": "yes"},
]


@pytest.mark.parametrize("params", BROKEN_PARAMS, ids=str)
def test_broken_params_are_no_end_of_the_engine(
    pair: tuple[Vllm, Vllm], params: dict[str, object]
) -> None:
    prompt = list(range(40, 80))
    expected = tokens(pair[0].url, prompt)
    body = request_body(prompt) | {"kv_transfer_params": params}
    answer = httpx.post(f"{pair[1].url}/v1/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["token_ids"] == expected


def test_a_client_that_leaves_before_prefill_began(pair: tuple[Vllm, Vllm]) -> None:
    prefill, decode = pair
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": prefill.kv_port,
        "tp_size": 1,
        "pp_size": 1,
        "remote_request_id": "nobody",
        "transfer_id": "never-sent-to-prefill",
    }
    body = request_body(list(range(5, 105))) | {"kv_transfer_params": params}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{decode.url}/v1/completions", json=body, timeout=2.0)
    wait_until(lambda: decode.metric("vllm:num_requests_waiting") == 0, ANSWER_S)
    wait_until(lambda: decode.metric("vllm:kv_cache_usage_perc") == 0, ANSWER_S)
    with served(routers(pair)["push proxy"]) as url:
        prompt = list(range(100, 160))
        assert tokens(url, prompt) == tokens(prefill.url, prompt)


@pytest.mark.slow
def test_a_trial_of_push_against_pull_says_what_it_knows(
    pair: tuple[Vllm, Vllm], tmp_path: Path
) -> None:
    out = tmp_path / "trial.json"
    with served(routers(pair)["kvcourier route, pull"]) as url:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "kvcourier", "trial", f"{url}#pull", f"{url}#push"),
                *("--input-tokens=64", "--qps=2", "--requests=2", "--turns=2"),
                *("--output-tokens=4", "--warm-up=1", f"--json={out}"),
            ],
            capture_output=True,
            text=True,
            timeout=ANSWER_S * 2,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [(row["n"], row["failures"]) for row in found["rows"]] == [(4, 0), (4, 0)]
    # vLLM tells no stories over HTTP, so when prefill has ended is not known, and that is said.
    assert "the instances do not tell when prefill ended" in done.stdout
    assert found["decision"]["advice"] == "undecided: measure longer"
    assert "--mode=push" in done.stdout
