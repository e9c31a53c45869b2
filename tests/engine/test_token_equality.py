"""The engine gives the tokens that transformers' own generate gives."""

import pytest

from engine.rig import LLAMA, QWEN3, generate, random_prompt, reference, running_engine

LENGTHS = (1, 7, 15, 16, 17, 40, 150)
NUM_TOKENS = 12


@pytest.mark.parametrize("source", [LLAMA, QWEN3])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_concurrent_prompts_of_mixed_lengths(source: str, enable_prefix_caching: bool) -> None:
    prompts = [random_prompt(length) for length in LENGTHS]
    expected = [list(reference(source, prompt, NUM_TOKENS)) for prompt in prompts]
    assert len({tuple(answer) for answer in expected}) == len(prompts)
    with running_engine(source, enable_prefix_caching=enable_prefix_caching) as engine:
        for _ in range(2):  # the second time, prefixes are cached
            assert generate(engine, prompts, max_tokens=NUM_TOKENS) == expected
        assert (engine.stats()["prefix_hit_tokens"] > 0) == enable_prefix_caching
        assert engine.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_virtual_ranks_and_layouts(cache_layout: str, tp_size: int, pp_size: int) -> None:
    prompts = [random_prompt(length) for length in (5, 33, 100)]
    with running_engine(
        max_batch_tokens=24, cache_layout=cache_layout, tp_size=tp_size, pp_size=pp_size
    ) as engine:
        assert generate(engine, prompts, max_tokens=NUM_TOKENS) == [
            list(reference(LLAMA, prompt, NUM_TOKENS)) for prompt in prompts
        ]
        assert len(engine.cache.rank_caches()) == tp_size * pp_size


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("max_batch_tokens", [1, 10, 512])
def test_block_and_chunk_sizes(block_size: int, max_batch_tokens: int) -> None:
    prompts = [random_prompt(length) for length in (31, 32, 33, 70)]
    sizes = {"block_size": block_size, "max_batch_tokens": max_batch_tokens}
    with running_engine(QWEN3, **sizes) as engine:
        assert generate(engine, prompts, max_tokens=NUM_TOKENS) == [
            list(reference(QWEN3, prompt, NUM_TOKENS)) for prompt in prompts
        ]


def test_few_blocks_make_requests_wait_and_be_preempted() -> None:
    prompts = [random_prompt(length) for length in (30, 40, 25, 60, 12)]
    num_tokens = 40
    with running_engine(block_size=8, num_blocks=20) as engine:
        assert generate(engine, prompts, max_tokens=num_tokens) == [
            list(reference(LLAMA, prompt, num_tokens)) for prompt in prompts
        ]
        assert engine.stats()["preemptions"] > 0
        assert engine.stats()["kv_blocks_used"] == 0


def test_results_do_not_depend_on_where_blocks_lie() -> None:
    prompts = [random_prompt(length) for length in (50, 90)]
    with running_engine(enable_prefix_caching=False, num_blocks=40, block_size=8) as engine:
        first = generate(engine, prompts, max_tokens=20)
        # Requests of other lengths shuffle the free blocks.
        generate(engine, [random_prompt(length, seed=9) for length in (3, 77, 20, 41)])
        assert generate(engine, prompts, max_tokens=20) == first
