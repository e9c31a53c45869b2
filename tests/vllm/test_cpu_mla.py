"""Real vLLM on this machine's CPU, serving a model with latent attention (MLA).

See `test_cpu_pair` for what it needs.
"""

from collections.abc import Iterator

import pytest

from .models import write_deepseek
from .servers import Vllm, needs_vllm, routers, served, started, tokens, wait_until

LENGTHS = (2, 15, 16, 17, 18, 33, 200, 500)
"""Around vLLM's block size for MLA on the CPU, which is 16."""

pytestmark = [*needs_vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_deepseek(folder / "model")
    servers = (
        Vllm("p", "kv_producer", model, folder),
        Vllm("d", "kv_consumer", model, folder),
    )
    with started(*servers):
        yield servers


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_tokens_equal_one_instances(pair: tuple[Vllm, Vllm], mode: str) -> None:
    """vLLM's two kernels for MLA on the CPU, one for prompts and one for generated tokens, differ
    by more than a near tie between tokens. D's own part of a prompt is one token, for which it
    takes the second. So the reference generates that token as well.
    """
    prefill, _ = pair
    before = moved_bytes(pair)
    answers = []
    with served(routers(pair)["kvcourier route, " + mode]) as url:
        for length in LENGTHS:
            prompt = [(7 * length + len(mode) + 13 * i * i) % 500 + 5 for i in range(length - 1)]
            last, *expected = tokens(prefill.url, prompt, num_tokens=9)
            found = tokens(url, [*prompt, last], {"X-KV-Mode": mode})
            assert found == expected, f"{length} tokens"
            answers.append(tuple(found))
    assert len(set(answers)) == len(LENGTHS), "else this model does not look at its cache"
    # Figures of a worker come with an answer of its engine.
    wait_until(lambda: bool(tokens(prefill.url, [5])) and moved_bytes(pair) > before, 30.0)
    for server in pair:
        assert server.metric("vllm:nixl_num_failed_transfers_total") == 0


def moved_bytes(pair: tuple[Vllm, Vllm]) -> float:
    return sum(server.metric("vllm:nixl_bytes_transferred_sum") for server in pair)
