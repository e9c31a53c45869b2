"""Real vLLM on this machine's CPU, P and D with room for two prompts each, as `inside/` has it with
hand-made models: all are served, and no deadline has to help."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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

BLOCK = 32
LENGTH = 3 * BLOCK - 8
"""Three blocks, with the answer."""
NUM_AT_ONCE = 10
EXPIRED = (
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_failed_transfers_total",
    "kvcourier:registrations_expired_total",
    "kvcourier:registrations_refused_total",
)

pytestmark = [*needs_vllm, pytest.mark.slow]

Pair = tuple[Vllm, Vllm]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """D has room for one prompt beside the longest request, of four blocks; each has a null block
    besides."""
    folder = tmp_path_factory.mktemp("vllm")
    model = write_qwen3(folder / "model")
    flags = (
        *("--block-size", str(BLOCK), "--max-model-len", str(4 * BLOCK)),
        *("--no-enable-prefix-caching", "--num-gpu-blocks-override"),
    )
    servers = (
        Vllm("p", "kv_producer", model, folder, *flags, "7"),
        Vllm("d", "kv_consumer", model, folder, *flags, "8"),
    )
    with started(*servers):
        yield servers


def prompts_of(count: int, seed: int) -> list[list[int]]:
    return [[(31 * n + 17 * i + 7 * seed) % 500 + 5 for i in range(LENGTH)] for n in range(count)]


def test_d_reserves_no_room_that_p_needs_for_what_it_keeps(pair: Pair) -> None:
    prefill, decode = pair
    kept, pushed = prompts_of(2, seed=1), prompts_of(3, seed=2)
    expected = [tokens(prefill.url, prompt) for prompt in (*kept, *pushed)]
    handoffs = []
    for prompt in kept:
        hold = {"do_remote_decode": True, "do_remote_prefill": False}
        body = request_body(prompt) | {"max_tokens": 1, "kv_transfer_params": hold}
        answer = httpx.post(f"{prefill.url}/v1/completions", json=body, timeout=ANSWER_S)
        handoffs.append(answer.json()["kv_transfer_params"])
    with (
        served(routers(pair)["kvcourier route, push"]) as url,
        ThreadPoolExecutor(len(expected)) as pool,
    ):
        push = partial(tokens, url, headers={"X-KV-Mode": "push"})
        waiting = [pool.submit(push, prompt) for prompt in pushed]
        wait_until(lambda: num_waiting(decode) == len(pushed), ANSWER_S)
        assert not any(each.done() for each in waiting), "P has no room"
        bodies = [
            request_body(prompt) | {"kv_transfer_params": params}
            for prompt, params in zip(kept, handoffs, strict=True)
        ]
        ask = partial(httpx.post, f"{decode.url}/v1/completions", timeout=ANSWER_S)
        pulled = [pool.submit(ask, json=body) for body in bodies]
        found = [each.result().json()["choices"][0]["token_ids"] for each in pulled]
        found += [each.result() for each in waiting]
    assert found == expected
    nothing_expired(pair)


def test_ten_at_once(pair: Pair) -> None:
    prompts = prompts_of(NUM_AT_ONCE, seed=3)
    expected = [tokens(pair[0].url, prompt) for prompt in prompts]
    with (
        served(routers(pair)["kvcourier route, push"]) as url,
        ThreadPoolExecutor(NUM_AT_ONCE) as pool,
    ):

        def ask(index: int) -> list[int]:
            mode = "pull" if index % 3 == 2 else "push"
            return tokens(url, prompts[index], {"X-KV-Mode": mode})

        assert list(pool.map(ask, range(NUM_AT_ONCE))) == expected
    nothing_expired(pair)


def num_waiting(server: Vllm) -> float:
    """vLLM tells so with the answer of a request only."""
    assert tokens(server.url, [5], num_tokens=1)
    return server.metric("vllm:num_requests_waiting")


def nothing_expired(pair: Pair) -> None:
    for server in pair:
        # What a worker counts comes with a later answer of its engine.
        assert tokens(server.url, [5])
        assert {name: server.metric(name) for name in EXPIRED} == dict.fromkeys(EXPIRED, 0)
        assert server.process.poll() is None
