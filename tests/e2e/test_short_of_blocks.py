"""P and D have room for two prompts each: all are served, and no deadline has to help."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.cluster import (
    BLOCK_SIZE,
    MODES,
    NUM_TOKENS,
    Cluster,
    body_of,
    running_cluster,
    until,
)
from engine.rig import generate, random_prompt
from kvcourier.engine.engine import Engine

PROMPT_BLOCKS = 4
NUM_REQUESTS = 12
RECALLS = "kvcourier:kv_recalls_total"


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """D has a block more for each of two answers."""
    sizes = {
        "prefill": (f"--num-blocks={2 * PROMPT_BLOCKS}",),
        "decode": (f"--num-blocks={2 * PROMPT_BLOCKS + 2}",),
    }
    with running_cluster(tmp_path_factory.mktemp("cramped"), flags_by_role=sizes) as cluster:
        yield cluster


def prompts_of(name: str, count: int) -> list[tuple[int, ...]]:
    return [random_prompt(PROMPT_BLOCKS * BLOCK_SIZE, seed=f"{name}-{i}") for i in range(count)]


def is_full(cluster: Cluster) -> bool:
    """Whether P has no room for another prompt, nor D."""
    used = "kvcourier:kv_blocks_used"
    return all(server.metric(used) >= 2 * PROMPT_BLOCKS for server in cluster.servers[:2])


def test_p_keeps_what_d_cannot_take_and_d_has_reserved_for_what_p_cannot_begin(
    cramped: Cluster, single: Engine
) -> None:
    kept, reserved = prompts_of("kept", 2), prompts_of("reserved", 2)
    expected = generate(single, [*kept, *reserved], max_tokens=NUM_TOKENS)
    before = [server.failures() for server in cramped.servers[:2]]
    handoffs = []
    for index, prompt in enumerate(kept):
        params = {"do_remote_decode": True, "transfer_id": f"kept-{index}"}
        answer = cramped.prefill.post(body_of(prompt, 1, kv_transfer_params=params))
        handoffs.append(answer.json()["kv_transfer_params"])
    with ThreadPoolExecutor(4) as pool:
        pushed = [pool.submit(cramped.router.ask, prompt, "push") for prompt in reserved]
        until(lambda: is_full(cramped), "each waits for the other's blocks")
        assert not any(each.done() for each in pushed)
        bodies = [
            body_of(prompt, kv_transfer_params=params)
            for prompt, params in zip(kept, handoffs, strict=True)
        ]
        pulled = [pool.submit(cramped.decode.post, body) for body in bodies]
        answers = [each.result().json()["choices"][0]["token_ids"] for each in pulled]
        answers += [each.result().token_ids for each in pushed]
    assert answers == expected
    cramped.wait_idle()
    assert [server.failures() for server in cramped.servers[:2]] == before
    assert cramped.decode.metric(RECALLS) > 0


def test_twelve_at_once_in_both_modes(cramped: Cluster, single: Engine) -> None:
    prompts = prompts_of("many", NUM_REQUESTS)
    expected = generate(single, prompts, max_tokens=NUM_TOKENS)
    before = [server.failures() for server in cramped.servers[:2]]
    for round_ in range(2):
        together = threading.Barrier(NUM_REQUESTS, timeout=60)
        order = list(range(NUM_REQUESTS))
        random.Random(round_).shuffle(order)

        def ask(index: int, together: threading.Barrier = together) -> list[int]:
            together.wait()
            return cramped.router.ask(prompts[index], MODES[index % 2]).token_ids

        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            assert list(pool.map(ask, order)) == [expected[index] for index in order]
    cramped.wait_idle()
    assert [server.failures() for server in cramped.servers[:2]] == before
