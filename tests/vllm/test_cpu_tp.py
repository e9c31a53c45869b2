"""Real vLLM on this machine's CPU, split differently: P in one worker, D in two.

See `test_cpu_pair` for what it needs.
"""

from collections.abc import Iterator

import pytest

from .models import write_qwen3
from .servers import Vllm, needs_vllm, routers, served, started, tokens

LENGTHS = (1, 2, 31, 32, 33, 200)

pytestmark = [*needs_vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_qwen3(folder / "model")
    flags = ("--block-size", "32")
    servers = (
        Vllm("p", "kv_producer", model, folder, *flags),
        Vllm("d", "kv_consumer", model, folder, *flags, "--tensor-parallel-size", "2"),
    )
    with started(*servers):
        yield servers


@pytest.mark.parametrize("way", ["pull proxy", "push proxy"])
def test_tokens_equal_one_instances(pair: tuple[Vllm, Vllm], way: str) -> None:
    prefill, decode = pair
    factor = {"pull proxy": 7, "push proxy": 11}[way]
    with served(routers(pair)[way]) as url:
        for length in LENGTHS:
            prompt = [(factor * length + 13 * i) % 500 + 5 for i in range(length)]
            expected = tokens(prefill.url, prompt)
            # Twice: the second time most of the prompt is in D's prefix cache.
            assert tokens(url, prompt) == expected, f"{length} tokens"
            assert tokens(url, prompt) == expected, f"{length} tokens, cached"
    for server in pair:
        assert server.metric("vllm:nixl_num_failed_transfers_total") == 0
    moved = [server.metric("vllm:nixl_bytes_transferred_sum") for server in pair]
    assert sum(moved) > 0
    assert decode.process.poll() is None
