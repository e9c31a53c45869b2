"""Prefill on one instance and decode on another give the tokens of a single instance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.cluster import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    MODES,
    NUM_BLOCKS,
    NUM_TOKENS,
    Cluster,
    body_of,
    running_cluster,
)
from e2e.pairs import QWEN3, Pair, Zoo
from engine.rig import generate, random_prompt, reference, running_engine, tiny_model
from kvcourier.config import Binding
from kvcourier.demo.prompts import PROMPTS
from kvcourier.engine.engine import Engine
from kvcourier.engine.streaming import GRANULARITIES

LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * CHUNK_TOKENS + 5)
"""Also for blocks of 32: 1, half a block, a ragged last block, several chunks."""

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 1234}
SAMPLINGS = {"greedy": {}, "sampled": SAMPLED}

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Two kv heads: with tp 4 every head is held twice.
    **{
        f"tp{prefill}-tp{decode}": ({"tp_size": prefill}, {"tp_size": decode})
        for prefill in (1, 2, 4)
        for decode in (1, 2, 4)
    },
    "block16-block32": ({"block_size": 16}, {"block_size": 32}),
    "block32-block16": ({"block_size": 32}, {"block_size": 16}),
    "NHD-HND": ({"cache_layout": "NHD"}, {"cache_layout": "HND"}),
    "HND-NHD": ({"cache_layout": "HND"}, {"cache_layout": "NHD"}),
    "pp2-pp1": ({"pp_size": 2}, {"pp_size": 1}),
    "pp1-pp2": ({"pp_size": 1}, {"pp_size": 2}),
    "all of it": (
        {"tp_size": 2, "pp_size": 2, "block_size": 32, "cache_layout": "HND"},
        {"tp_size": 4, "block_size": 16, "cache_layout": "NHD"},
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(zoo: Zoo, shape: str, mode: str) -> None:
    prefill, decode = SHAPES[shape]
    pair = Pair(zoo.instance("p", **prefill), zoo.instance("d", **decode))
    name = f"{shape}-{mode}"
    block_size = decode.get("block_size", BLOCK_SIZE)
    lengths = sorted({*LENGTHS, block_size - 1, block_size, block_size + 1})
    # Of its own for each test, so that no cache holds a part of them.
    prompts = [prompt_of(length, name) for length in lengths]
    before = pair.decode.engine.stats()
    assert pair.ask(mode, name, prompts) == [right(prompt) for prompt in prompts]
    pair.wait_idle()
    after = pair.decode.engine.stats()
    # A single token is computed, all else was moved: nothing was quietly computed again.
    assert after["kv_received"] - before["kv_received"] == len(lengths) - 1
    assert after["kv_declined"] - before["kv_declined"] == 1
    assert after["kv_receive_failures"] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_cached_blocks", [0, 1, 3, 6])
@pytest.mark.parametrize("shape", ["tp1-tp1", "tp2-tp4", "block16-block32", "block32-block16"])
def test_blocks_cached_on_decode(zoo: Zoo, shape: str, num_cached_blocks: int, mode: str) -> None:
    prefill, decode = SHAPES[shape]
    pair = Pair(zoo.instance("p", **prefill), zoo.instance("d", **decode))
    name = f"cached-{shape}-{num_cached_blocks}-{mode}"
    block_size = decode.get("block_size", BLOCK_SIZE)
    # Six blocks and the one token that has to be computed in any case.
    prompt = prompt_of(6 * block_size + 1, name)
    if num_cached_blocks:
        pair.warm(prompt[: num_cached_blocks * block_size])
    before = pair.decode.engine.stats()
    assert pair.ask(mode, name, [prompt]) == [right(prompt)]
    pair.wait_idle()
    after = pair.decode.engine.stats()
    assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] == (
        num_cached_blocks * block_size
    )
    moved = "kv_declined" if num_cached_blocks == 6 else "kv_received"
    assert after[moved] - before[moved] == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ["direct", "packed"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", ["tp1-tp1", "all of it"])
def test_what_is_sent_at_once(zoo: Zoo, shape: str, granularity: str, path: str, mode: str) -> None:
    prefill, decode = SHAPES[shape]
    pair = Pair(
        zoo.instance("p", path=path, granularity=granularity, **prefill),
        zoo.instance("d", path=path, **decode),
    )
    name = f"{shape}-{granularity}-{path}-{mode}"
    prompts = [prompt_of(length, name) for length in (3 * CHUNK_TOKENS + 5, 2 * CHUNK_TOKENS, 7)]
    assert pair.ask(mode, name, prompts) == [right(prompt) for prompt in prompts]
    pair.wait_idle()


@pytest.mark.parametrize("way", ["early-pull", "late-push"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shape", ["tp1-tp1", "tp2-tp4", "pp2-pp1", "all of it"])
def test_the_other_bindings(zoo: Zoo, shape: str, sampling: str, way: str) -> None:
    fields = SAMPLINGS[sampling]
    prefill, decode = SHAPES[shape]
    pair = Pair(zoo.instance("p", **prefill), zoo.instance("d", **decode))
    name = f"{way}-{sampling}-{shape}"
    prompts = [prompt_of(length, name) for length in (7, 2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS + 5)]
    expected = generate(zoo.instance("single").engine, prompts, max_tokens=NUM_TOKENS, **fields)
    pair.warm(prompts[1][: 4 * BLOCK_SIZE])
    before = pair.decode.engine.stats()
    assert pair.ask(way, name, prompts, **fields) == expected
    pair.wait_idle()
    after = pair.decode.engine.stats()
    for counter in ("kv_received", "first_tokens_seeded"):
        assert after[counter] - before[counter] == len(prompts), counter
    operations = {
        entry["operation"]
        for index in range(len(prompts))
        for entry in (
            *(pair.prefill.endpoint.story(f"p-{name}-{index}") or ()),
            *(pair.decode.endpoint.story(f"d-{name}-{index}") or ()),
        )
        if entry["what"] == "posted"
    }
    assert operations == {"READ" if way == "early-pull" else "WRITE"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("binding", list(Binding))
def test_a_binding_of_ones_own_through_the_router(
    cluster: Cluster, single: Engine, binding: Binding, mode: str
) -> None:
    prompt = prompt_of(3 * CHUNK_TOKENS + 5, f"router-{binding}-{mode}")
    (expected,) = generate(single, [prompt], max_tokens=NUM_TOKENS)
    headers = {"X-KV-Mode": mode, "X-KV-Binding": binding.value}
    response = cluster.router.post(body_of(prompt), headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == expected
    assert response.headers["x-kv-binding"] == binding
    transfer_id = response.headers["x-kv-transfer-id"]
    cluster.wait_idle()
    stories = [server.story(transfer_id) for server in (cluster.prefill, cluster.decode)]
    posted = [any(entry["what"] == "posted" for entry in story) for story in stories]
    assert posted == ([True, False] if mode == "push" else [False, True])
    if binding is Binding.LATE:
        assert not any(entry.get("while_computing") for entry in stories[0])
    was_offered = any(entry["what"] == "offered" for entry in stories[1])
    if mode == "push" or binding is Binding.LATE:
        assert not was_offered
    elif binding is Binding.EARLY:
        assert was_offered
    # Near, P's answer and D's leg race, as they are meant to: D may be told before or after.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("off", ["p", "d", ""])
def test_first_token_seeding_of_either_side(zoo: Zoo, off: str, sampling: str, mode: str) -> None:
    fields = SAMPLINGS[sampling]
    sides = [
        zoo.instance(role, **({"first_token_seeding": False} if role == off else {}))
        for role in ("p", "d")
    ]
    pair = Pair(*sides)
    name = f"seeding-{off}-{sampling}-{mode}"
    prompts = [prompt_of(length, name) for length in (BLOCK_SIZE, 2 * CHUNK_TOKENS + 3)]
    alone = zoo.instance("single").engine
    expected = generate(alone, prompts, max_tokens=NUM_TOKENS, **fields)
    before = pair.decode.engine.stats()["first_tokens_seeded"]
    assert pair.ask(mode, name, prompts, **fields) == expected
    pair.wait_idle()
    seeded = pair.decode.engine.stats()["first_tokens_seeded"] - before
    assert seeded == (0 if off else len(prompts))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_prompt_again(zoo: Zoo, mode: str) -> None:
    pair = Pair(zoo.instance("p"), zoo.instance("d"))
    prompt = prompt_of(100, mode)
    for turn in range(3):
        assert pair.ask(mode, f"again-{mode}-{turn}", [prompt]) == [right(prompt)]
    pair.wait_idle()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_through_the_router(cluster: Cluster, single: Engine, sampling: str, mode: str) -> None:
    fields = SAMPLINGS[sampling]
    prompts = [prompt_of(length, f"router-{sampling}-{mode}") for length in LENGTHS]
    expected = generate(single, prompts, max_tokens=NUM_TOKENS, **fields)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    counters = ("kvcourier:kv_received_total", "kvcourier:first_tokens_seeded_total")
    before = [cluster.decode.metric(counter) for counter in counters]
    for prompt, tokens in zip(prompts, expected, strict=True):
        answer = cluster.router.ask(prompt, mode, **fields)
        assert answer.token_ids == tokens
        assert answer.response.headers["x-kv-mode"] == mode
    cluster.wait_idle()
    for counter, count in zip(counters, before, strict=True):
        assert cluster.decode.metric(counter) - count == len(prompts) - 1, counter


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_cached_blocks", [0, 2, 5])
def test_through_the_router_with_blocks_cached_on_decode(
    cluster: Cluster, single: Engine, num_cached_blocks: int, mode: str
) -> None:
    prompt = prompt_of(5 * BLOCK_SIZE + 1, f"router-{num_cached_blocks}-{mode}")
    (expected,) = generate(single, [prompt], max_tokens=NUM_TOKENS)
    if num_cached_blocks:
        cluster.decode.ask(prompt[: num_cached_blocks * BLOCK_SIZE], num_tokens=1)
    before = cluster.decode.metric("kvcourier:prefix_cache_hits_total")
    assert cluster.router.ask(prompt, mode).token_ids == expected
    hits = cluster.decode.metric("kvcourier:prefix_cache_hits_total") - before
    assert hits == num_cached_blocks * BLOCK_SIZE
    # All of it is cached now.
    assert cluster.router.ask(prompt, mode).token_ids == expected
    cluster.wait_idle()


@pytest.mark.parametrize("mode", MODES)
def test_chat_and_whole_answers(cluster: Cluster, mode: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"What is moved by {mode}, and where to?"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def ask(url: str, **headers: str) -> httpx.Response:
        path = f"{url}/v1/chat/completions"
        return cluster.router.client.post(path, json=body, headers=headers)

    through_router = ask(cluster.router.url, **{"X-KV-Mode": mode})
    cluster.wait_idle()
    alone = ask(cluster.prefill.url)
    assert through_router.status_code == alone.status_code == 200
    found, expected = through_router.json()["choices"][0], alone.json()["choices"][0]
    assert len(found["token_ids"]) == NUM_TOKENS
    assert found["token_ids"] == expected["token_ids"]
    assert found["message"] == expected["message"]


@pytest.mark.timeout(300)
def test_smollm2(tmp_path: Path) -> None:
    with running_engine("smollm2", num_blocks=NUM_BLOCKS, max_batch_tokens=512) as single:
        encode = tiny_model("smollm2").tokenizer.encode
        prompts = [encode(text, add_special_tokens=True) for text in PROMPTS[:3]]
        expected = generate(single, prompts, max_tokens=16)
    assert max(map(len, prompts)) > CHUNK_TOKENS
    with running_cluster(tmp_path, "--no-prefix-caching", model="smollm2") as smol:
        for mode in MODES:
            found = [smol.router.ask(prompt, mode, 16).token_ids for prompt in prompts]
            assert found == expected
        smol.wait_idle()
        received = smol.decode.metric("kvcourier:kv_received_total")
        assert received == len(MODES) * len(prompts)


def prompt_of(length: int, name: str) -> tuple[int, ...]:
    """Random tokens, the same in every run; two names share no prefix."""
    return random_prompt(length, seed=name)


def right(prompt: Sequence[int]) -> list[int]:
    """What transformers itself generates."""
    return list(reference(QWEN3, tuple(prompt), NUM_TOKENS))
