"""Real vLLM on this machine's CPU, serving a model that keeps several cache groups: layers with a
sliding window and layers without.

See `test_cpu_pair` for what it needs.
"""

from collections.abc import Iterator

import httpx
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvcourier.engine.random_model import byte_tokenizer

from .servers import (
    ANSWER_S,
    Vllm,
    needs_vllm,
    request_body,
    routers,
    served,
    spec_of,
    started,
    tokens,
    visit,
    wait_until,
)

BLOCK, WINDOW = 32, 20
LENGTHS = (5, 19, 20, 21, 50, 51, 52, 83, 115, 147, 200, 303)
"""Around the window. With 51 + 32 n tokens, the window of the last token begins in the last slot of
a block: a mistake by one position loses that block. So short a window shows it in the tokens.
"""

pytestmark = needs_vllm

Instances = tuple[Vllm, Vllm, Vllm]


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instances]:
    """P, D, and one whose allocator knows one group only: it keeps all layers in full."""
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    byte_tokenizer().save_pretrained(model)
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    Gemma3ForCausalLM(config).save_pretrained(model)
    size = ("--block-size", str(BLOCK))
    servers = (
        Vllm("p", "kv_producer", model, folder, *size),
        Vllm("d", "kv_consumer", model, folder, *size),
        Vllm("full", "kv_both", model, folder, *size, "--disable-hybrid-kv-cache-manager"),
    )
    with started(*servers):
        yield servers


def prompt_of(length: int) -> list[int]:
    return [(7 * length + 13 * i * i) % 500 + 5 for i in range(length)]


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
def test_tokens_equal_one_instances(instances: Instances, way: str) -> None:
    prefill, decode, full = instances
    headers = {"X-KV-Mode": way.split(", ")[1]} if ", " in way else {}
    with served(routers((prefill, decode))[way]) as url:
        for length in LENGTHS:
            prompt = prompt_of(length)
            expected = tokens(full.url, prompt)
            # Twice: the second time most of the prompt is in D's prefix cache.
            assert tokens(url, prompt, headers) == expected, f"{length} tokens"
            assert tokens(url, prompt, headers) == expected, f"{length} tokens, cached"
            longer = prompt + prompt_of(40)
            assert tokens(url, longer, headers) == tokens(full.url, longer), f"{length} + 40"
    for server in (prefill, decode):
        assert server.metric("vllm:nixl_num_failed_transfers_total") == 0


@pytest.mark.parametrize("way", ["pull proxy", "push proxy"])
def test_a_window_moves_its_blocks_only(instances: Instances, way: str) -> None:
    """Also that vLLM keeps windows at all, without which the other tests would say nothing."""
    prefill, decode, _ = instances
    step = {"pull proxy": 11, "push proxy": 17}[way]
    prompt = [step * i % 500 + 5 for i in range(801)]
    # A worker's figures come with an answer of its engine; after a push that is the next one's.
    tokens(prefill.url, [5])
    # The last token is D's own: positions 0 to 799 of two layers, 781 to 799 of four.
    block_bytes = 2 * 4 * 32 * 4 * BLOCK
    expected = moved_bytes(instances) + (2 * 25 + 4 * 1) * block_bytes
    with served(routers((prefill, decode))[way]) as url:
        tokens(url, prompt)
    wait_until(lambda: bool(tokens(prefill.url, [5])) and moved_bytes(instances) >= expected, 30.0)
    assert moved_bytes(instances) == expected


def moved_bytes(instances: Instances) -> float:
    return sum(server.metric("vllm:nixl_bytes_transferred_sum") for server in instances)


@pytest.mark.parametrize("way", ["pull proxy", "push proxy"])
def test_one_that_keeps_all_serves_one_that_keeps_windows(instances: Instances, way: str) -> None:
    _, decode, full = instances
    with served(routers((full, decode))[way]) as url:
        for length in (83, 303):
            prompt = prompt_of(length)[::-1]
            assert tokens(url, prompt) == tokens(full.url, prompt)


@pytest.mark.parametrize("way", ["pull proxy", "push proxy"])
def test_one_that_keeps_windows_cannot_serve_one_that_keeps_all(
    instances: Instances, way: str
) -> None:
    prefill, _, full = instances
    step = {"pull proxy": 19, "push proxy": 23}[way]
    prompt = [step * i % 500 + 5 for i in range(100)]
    with served(routers((prefill, full))[way]) as url:
        answer = httpx.post(f"{url}/v1/completions", json=request_body(prompt), timeout=ANSWER_S)
    assert answer.status_code == 500
    assert f"the source keeps a sliding window of {WINDOW} tokens" in full.log.read_text()
    assert full.process.poll() is None
    assert tokens(full.url, prompt)


def test_a_doctor_finds_nothing(instances: Instances) -> None:
    """It fetches windows as a D does, and its prompt is longer than they are."""
    prefill, decode, _ = instances
    _, found = visit(f"--prefill={spec_of(prefill)}", f"--decode={spec_of(decode)}")
    assert not [told for (_, severity), told in found.items() if severity in ("warning", "error")]
    assert sum("brought the same" in each for each in found["fetch", "ok"]) == 2
