"""Real vLLM on this machine's CPU, with `kv_integrity` on D: every byte is compared with P's.

See `test_cpu_pair` for what it needs.
"""

from collections.abc import Iterator

import pytest

from .models import write_qwen3
from .servers import Vllm, needs_vllm, routers, served, started, tokens

LENGTHS = (17, 200)

pytestmark = [*needs_vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_qwen3(folder / "model")
    servers = (
        Vllm("p", "kv_producer", model, folder),
        Vllm("d", "kv_consumer", model, folder, extra={"kv_integrity": "all"}),
    )
    with started(*servers):
        yield servers


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_tokens_are_right_and_everything_was_compared(pair: tuple[Vllm, Vllm], mode: str) -> None:
    prefill, decode = pair
    name = "kvcourier:integrity_checks_total"
    before = decode.metric(name)
    with served(routers(pair)[f"kvcourier route, {mode}"]) as url:
        for length in LENGTHS:
            prompt = [(11 * length + 13 * i + len(mode)) % 500 + 5 for i in range(length)]
            expected = tokens(prefill.url, prompt)
            assert tokens(url, prompt, {"X-KV-Mode": mode}) == expected, f"{length} tokens"
    # A worker's figures come with some later answer of its engine.
    tokens(decode.url, [5])
    assert decode.metric(name) - before == len(LENGTHS)
    assert decode.metric("kvcourier:integrity_failures_total") == 0
