"""Real vLLM on this machine's CPU, and what happens around a transfer: prompts of all lengths,
prefixes that D has, calls of several prompts, clients that leave, params that are wrong, and
prefill instances that are dead.

See `test_cpu_pair` for what it needs. Both instances have both roles. P recomputes what does not
come, D fails: where D's policy is `fail`, the same is asked of P to see the other policy.
"""

import contextlib
import http.client
import itertools
import json
import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from ports import free_port

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
BLOCK_BYTES = 4 * (2 * 4 * 32 * 2) * BLOCK
STEP_TOKENS = 64
IDLE_S = 30.0
MODES = ["pull", "push"]
TIMING = {"kv_lease_duration": 4, "push_registration_timeout": 4}

pytestmark = [*needs_vllm, pytest.mark.slow]

Pair = tuple[Vllm, Vllm]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_qwen3(folder / "model")
    flags = (
        *("--block-size", str(BLOCK), "--max-num-batched-tokens", str(STEP_TOKENS)),
        *("--enable-prefix-caching", "--max-num-seqs", "32"),
    )
    servers = (
        Vllm("p", "kv_both", model, folder, *flags, policy="recompute", extra=TIMING),
        Vllm("d", "kv_both", model, folder, *flags, policy="fail", extra=TIMING),
    )
    with started(*servers):
        yield servers


@pytest.fixture(scope="module")
def ways(pair: Pair) -> Iterator[Mapping[str, str]]:
    """URLs: our router's, and a proxy's of each mode."""
    apps = routers(pair)
    with contextlib.ExitStack() as stack:
        yield {
            "router": stack.enter_context(served(apps["kvcourier route, pull"])),
            "pull": stack.enter_context(served(apps["pull proxy"])),
            "push": stack.enter_context(served(apps["push proxy"])),
        }


@pytest.fixture(autouse=True)
def nothing_stays(pair: Pair) -> Iterator[None]:
    """After each test both engines serve, and have every block back."""
    yield
    for server in pair:
        wait_idle(server)


def wait_idle(server: Vllm) -> None:
    """Until no block is in use. vLLM tells so with the answer of a request only."""
    wait_until(
        lambda: bool(tokens(server.url, [5])) and server.metric("vllm:kv_cache_usage_perc") == 0,
        IDLE_S,
    )


def prompt_of(length: int, seed: int) -> list[int]:
    """Token ids; a prefix of any longer prompt of the same seed, and of no other's."""
    return random.Random(seed).choices(range(5, 505), k=length)


def moved_blocks(pair: Pair) -> float:
    """So far. A worker's figures come with some later answer of its engine."""
    for server in pair:
        wait_idle(server)
        tokens(server.url, [5])
    return sum(server.metric("vllm:nixl_bytes_transferred_sum") for server in pair) / BLOCK_BYTES


def post(url: str, body: Mapping[str, object], request_id: str | None = None) -> httpx.Response:
    headers = {"X-Request-Id": request_id} if request_id else {}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)


@contextlib.contextmanager
def asked(
    url: str, body: Mapping[str, object], headers: Mapping[str, str]
) -> Iterator[http.client.HTTPConnection]:
    """A call whose answer is still to be read; its client leaves in the end."""
    address = httpx.URL(url)
    connection = http.client.HTTPConnection(address.host, address.port or 80, timeout=ANSWER_S)
    try:
        headers = {"Content-Type": "application/json"} | headers
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        yield connection
    finally:
        connection.close()


def early_params(prefill: Vllm, transfer_id: str, **others: object) -> dict[str, object]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefill.engine_id,
        "remote_host": "127.0.0.1",
        "remote_port": prefill.kv_port,
        "tp_size": 1,
        "pp_size": 1,
        "remote_request_id": f"request-{transfer_id}",
        "transfer_id": transfer_id,
        **others,
    }


def late_params(prefill: Vllm, prompt: Sequence[int], **others: object) -> dict[str, object]:
    """What P answers, its KV now held for somebody."""
    body = request_body(list(prompt)) | {
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    answer = post(prefill.url, body)
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"] | others


# What is right.


@pytest.mark.parametrize("mode", MODES)
def test_prompts_shorter_than_a_block_and_longer_than_a_step(
    pair: Pair, ways: Mapping[str, str], mode: str
) -> None:
    for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, STEP_TOKENS, STEP_TOKENS + 1, 200, 1000):
        prompt = prompt_of(length, 10_000 + 2000 * MODES.index(mode) + length)
        found = tokens(ways["router"], prompt, {"X-KV-Mode": mode})
        assert found == tokens(pair[0].url, prompt), f"{length} tokens"


@pytest.mark.parametrize("mode", MODES)
def test_what_the_prefix_cache_of_d_has_is_not_fetched(
    pair: Pair, ways: Mapping[str, str], mode: str
) -> None:
    common = prompt_of(100, 1000 + MODES.index(mode))
    cases = {
        "nothing": (common, 4),
        "all of it": (common[: 3 * BLOCK + 1], 0),
        "all but the last block": (common, 1),
        "a common prefix": (common[: 2 * BLOCK + 9] + prompt_of(131, 1003), 5),
    }
    for what, (prompt, blocks) in cases.items():
        before = moved_blocks(pair)
        found = tokens(ways["router"], prompt, {"X-KV-Mode": mode})
        assert found == tokens(pair[0].url, prompt), what
        assert moved_blocks(pair) - before == blocks, what


@pytest.mark.parametrize("mode", MODES)
def test_the_other_way_round(pair: Pair, mode: str) -> None:
    """Each instance has both roles."""
    prompt = prompt_of(150, 1100 + MODES.index(mode))
    with served(routers(pair[::-1])["kvcourier route, pull"]) as url:
        assert tokens(url, prompt, {"X-KV-Mode": mode}) == tokens(pair[1].url, prompt)


# Several sub-requests in one call.

SEVERAL = {
    "n": {"n": 2, "prompt": prompt_of(100, 21)},
    "prompts": {"prompt": [prompt_of(100, seed) for seed in (22, 23, 24)]},
    "a short and a long prompt": {"prompt": [prompt_of(40, 25), prompt_of(100, 26)]},
    "a long and a short prompt": {"prompt": [prompt_of(100, 27), prompt_of(40, 28)]},
}


@pytest.mark.parametrize("fields", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("mode", MODES)
def test_the_router_refuses_several_sub_requests_at_once(
    pair: Pair, ways: Mapping[str, str], mode: str, fields: dict[str, object]
) -> None:
    before = [server.metric("vllm:prompt_tokens_total") for server in pair]
    body = request_body([5]) | fields
    answer = httpx.post(
        f"{ways['router']}/v1/completions", json=body, headers={"X-KV-Mode": mode}, timeout=ANSWER_S
    )
    assert answer.status_code == 400
    assert "send one call each" in answer.text
    assert [server.metric("vllm:prompt_tokens_total") for server in pair] == before


@pytest.mark.parametrize("fields", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("mode", MODES)
def test_several_sub_requests_behind_another_router(
    pair: Pair, ways: Mapping[str, str], mode: str, fields: dict[str, object]
) -> None:
    """All of a call's sub-requests carry the same params: right, or an error, never mixed up."""
    body = request_body([5]) | fields
    expected = post(pair[0].url, body)
    answer = post(ways[mode], body)
    assert answer.status_code in (200, 400, 500), answer.text
    if answer.status_code == 200:
        assert all_tokens(answer) == all_tokens(expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_d_refuses_frees_p_at_once(pair: Pair, mode: str) -> None:
    prefill, decode = pair
    expired = prefill.metric("vllm:nixl_num_kv_expired_reqs_total")
    prompt = prompt_of(120, 30 + MODES.index(mode))
    named = {"do_remote_decode": True, "transfer_id": f"refused-{mode}"}
    body = request_body(prompt) | {"max_tokens": 1, "kv_transfer_params": named}
    params = post(prefill.url, body).json()["kv_transfer_params"]
    if mode == "push":
        params = early_params(prefill, f"refused-{mode}")
    wrong = request_body(prompt) | {"top_p": 7, "kv_transfer_params": params}
    assert post(decode.url, wrong).status_code == 400
    wait_idle(prefill)
    assert prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == expired


def all_tokens(answer: httpx.Response) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer.json()["choices"]]


# Clients that leave.


@pytest.mark.parametrize("mode", MODES)
def test_clients_that_leave_while_p_prefills(
    pair: Pair, ways: Mapping[str, str], mode: str
) -> None:
    prefill, _ = pair
    # Sixteen steps each, so that most of them are still to come when the first is seen; again if
    # this process was too slow for that.
    seeds = itertools.count(100 + 100 * MODES.index(mode))
    finished = num_calls = 0
    while finished == num_calls and num_calls < 30:
        prompts = [prompt_of(1000, next(seeds)) for _ in range(6)]
        num_calls += len(prompts)
        before = finished_tokens(prefill)
        with contextlib.ExitStack() as stack:
            for prompt in prompts:
                body = request_body(prompt)
                stack.enter_context(asked(ways["router"], body, {"X-KV-Mode": mode}))
            wait_until(partial(begun, prefill, before), IDLE_S)
        for server in pair:
            wait_idle(server)
        # Without the prompts of one token that `wait_idle` sends.
        finished += (finished_tokens(prefill) - before) // 1000
    assert finished < num_calls, "none was cut short"
    found = tokens(ways["router"], prompts[0], {"X-KV-Mode": mode})
    assert found == tokens(prefill.url, prompts[0])


def finished_tokens(server: Vllm) -> int:
    """Prompt tokens of all requests that were finished; not of aborted ones."""
    return int(server.metric("vllm:request_prompt_tokens_sum"))


def begun(server: Vllm, before: int) -> bool:
    return (
        server.metric("vllm:num_requests_running") > 0 or finished_tokens(server) >= before + 1000
    )


def test_a_client_that_leaves_after_d_registered(pair: Pair, ways: Mapping[str, str]) -> None:
    _, decode = pair
    name = uuid.uuid4().hex
    body = request_body(prompt_of(120, 200)) | {"kv_transfer_params": early_params(pair[0], name)}
    with asked(decode.url, body, {"X-Request-Id": name}):
        wait_until(lambda: decode.metric("vllm:kv_cache_usage_perc") > 0, IDLE_S)
    wait_idle(decode)
    # P's prefill comes late: it must neither write into blocks that are gone nor keep its own.
    hold = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
    answer = post(pair[0].url, body | {"max_tokens": 1, "kv_transfer_params": hold})
    assert answer.status_code == 200
    prompt = prompt_of(120, 200)
    assert tokens(ways["push"], prompt) == tokens(pair[0].url, prompt)


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_leaves_while_d_generates(
    pair: Pair, ways: Mapping[str, str], mode: str
) -> None:
    prompt = prompt_of(120, 210 + MODES.index(mode))
    body = request_body(prompt) | {"max_tokens": 800, "stream": True}
    with asked(ways["router"], body, {"X-KV-Mode": mode}) as connection:
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
    for server in pair:
        wait_idle(server)
    found = tokens(ways["router"], prompt, {"X-KV-Mode": mode})
    assert found == tokens(pair[0].url, prompt)


# Params that are wrong.

NOBODYS_BLOCKS = {"remote_block_ids": [[1, 2, 3, 4]], "remote_request_id": "nobody"}
WRONG: dict[str, object] = {
    "a list": [1],
    "a text": "x",
    "a number": 7,
    "flags that are texts": {"do_remote_prefill": "true", "do_remote_decode": "false"},
    "flags that are numbers": {"do_remote_prefill": 1},
    "both flags": {"do_remote_prefill": True, "do_remote_decode": True},
    "a hold whose transfer id is a list": {"do_remote_decode": True, "transfer_id": []},
    "a hold whose part is huge": {"do_remote_decode": True, "transfer_id": "t", "part": 10**30},
    "an object for an engine id": {"remote_engine_id": {}},
    "a list for a host": {"remote_host": ["127.0.0.1"]},
    "a host with a line break": {"remote_host": "127.0.0.1\nx"},
    "a port that is a text": {"remote_port": "5600"},
    "a port beyond the last": {"remote_port": 65536},
    "a port that is no whole number": {"remote_port": 5600.5},
    "a huge tp_size": {"tp_size": 10**9},
    "tp_size 0": {"tp_size": 0},
    "no name for the prompt": {"transfer_id": None, "remote_request_id": None},
    "a long transfer id": {"transfer_id": "x" * 100_000},
    "blocks that are an object": {"remote_block_ids": {"0": [1]}},
    "blocks that are texts": {"remote_block_ids": [["1"]]},
    "negative blocks": {"remote_block_ids": [[-1]]},
    "blocks beyond 64 bits": {"remote_block_ids": [[2**70]]},
    "more tokens than the prompt": NOBODYS_BLOCKS | {"remote_num_tokens": 10**6},
    "an incarnation that is a number": NOBODYS_BLOCKS | {"remote_incarnation": 5},
}
"""Objects without a flag are put into params that are right otherwise."""


@pytest.mark.parametrize("role", ["p", "d"])
def test_params_of_wrong_types_are_refused_or_mean_a_local_answer(pair: Pair, role: str) -> None:
    server, other = pair if role == "p" else pair[::-1]
    prompt = prompt_of(70, 300)
    expected = tokens(other.url, prompt)
    for what, wrong in WRONG.items():
        params = wrong
        if isinstance(wrong, dict) and not any(key.startswith("do_") for key in wrong):
            params = early_params(other, "t") | wrong
        answer = post(server.url, request_body(prompt) | {"kv_transfer_params": params})
        assert answer.status_code in (200, 400, 422), f"{what}: {answer.text}"
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["token_ids"] == expected, what


@pytest.mark.parametrize(
    "named", [{"remote_request_id": "nobody"}, {"remote_block_ids": [[10**6] * 4]}], ids=str
)
def test_blocks_that_p_does_not_hold_for_this_request_are_not_believed(
    pair: Pair, named: dict[str, object]
) -> None:
    prefill, decode = pair
    prompt = prompt_of(120, 310)
    held = late_params(prefill, prompt)
    answer = post(decode.url, request_body(prompt) | {"kv_transfer_params": held | named})
    assert answer.status_code == 500, answer.text


# Prefill instances that are dead.


def test_a_prefill_instance_that_does_not_exist(pair: Pair, ways: Mapping[str, str]) -> None:
    prefill, decode = pair
    prompt = prompt_of(120, 400)
    blocks = {"remote_block_ids": [[1, 2, 3, 4]], "remote_num_tokens": 120}
    port = free_port()
    calls = [
        (server, early_params(prefill, name, remote_port=port, remote_engine_id="dead") | pulled)
        for server in (prefill, decode)
        for name, pulled in (("pushed", {}), ("pulled", blocks))
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        answers = list(
            pool.map(
                lambda call: post(
                    call[0].url, request_body(prompt) | {"kv_transfer_params": call[1]}
                ),
                calls,
            )
        )
    expected = tokens(prefill.url, prompt)
    for answer in answers[:2]:
        assert answer.status_code == 200, "P recomputes"
        assert all_tokens(answer) == [expected]
    for answer in answers[2:]:
        assert answer.status_code == 500, "D fails"
    for mode in MODES:
        assert tokens(ways["router"], prompt, {"X-KV-Mode": mode}) == expected


def test_a_prefill_instance_that_dies_and_comes_back(pair: Pair, ways: Mapping[str, str]) -> None:
    prefill, decode = pair
    prompt = prompt_of(120, 410)
    outdated = request_body(prompt) | {"kv_transfer_params": late_params(prefill, prompt)}
    name = uuid.uuid4().hex
    waiting = request_body(prompt) | {"kv_transfer_params": early_params(prefill, name)}
    with asked(decode.url, waiting, {"X-Request-Id": name}) as connection:
        wait_until(lambda: decode.metric("vllm:kv_cache_usage_perc") > 0, IDLE_S)
        prefill.kill()
        assert tokens(decode.url, prompt_of(70, 411)), "others are served"
        assert connection.getresponse().status == 500, "registered"
        assert post(decode.url, outdated).status_code == 500, "dead"
    wait_idle(decode)

    prefill.start()
    prefill.wait_healthy()
    assert post(decode.url, outdated).status_code == 500, "another life"
    expected = tokens(prefill.url, prompt)
    for mode in MODES:
        assert tokens(ways["router"], prompt, {"X-KV-Mode": mode}) == expected
        longer = prompt_of(200, 420 + MODES.index(mode))
        found = tokens(ways[mode], longer)
        assert found == tokens(prefill.url, longer)


def test_a_decode_instance_that_dies_and_is_replaced(pair: Pair, ways: Mapping[str, str]) -> None:
    """Where it was, under its old engine id: what P keeps and knows of the dead one goes."""
    prefill, decode = pair
    prompt = prompt_of(120, 430)
    expected = tokens(prefill.url, prompt)
    name = uuid.uuid4().hex
    waiting = request_body(prompt) | {"kv_transfer_params": early_params(prefill, name)}
    with asked(decode.url, waiting, {"X-Request-Id": name}):
        wait_until(lambda: decode.metric("vllm:kv_cache_usage_perc") > 0, IDLE_S)
        decode.kill()
        assert tokens(prefill.url, prompt_of(70, 431)), "P serves"
    hold = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
    body = request_body(prompt) | {"max_tokens": 1, "kv_transfer_params": hold}
    assert post(prefill.url, body).status_code == 200, "nobody waits for it any more"

    decode.start()
    decode.wait_healthy()
    for mode in MODES:
        assert tokens(ways["router"], prompt, {"X-KV-Mode": mode}) == expected
        longer = prompt_of(200, 440 + MODES.index(mode))
        assert tokens(ways[mode], longer) == tokens(prefill.url, longer)
    wait_idle(decode)
    wait_idle(prefill)
