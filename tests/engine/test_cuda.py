"""The same engine on a GPU, where there is one."""

import itertools

import pytest
import torch

from engine.rig import LLAMA, generate, random_prompt
from kvcourier.engine.attention import ATTENTION_NAME
from kvcourier.engine.config import EngineConfig, make_cache
from kvcourier.engine.engine import Engine
from kvcourier.engine.models import load_model
from kvcourier.engine.runner import ModelRunner
from kvcourier.engine.scheduler import Sequence, Work
from kvcourier.ids import BlockId, RequestId
from kvcourier.layout.geometry import MemoryKind

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(("cache_layout", "tp_size"), [("NHD", 1), ("HND", 2), ("NHD", 4)])
def test_tokens_equal_transformers_on_cuda(cache_layout: str, tp_size: int) -> None:
    model = load_model(LLAMA, "float32", "cuda")
    config = EngineConfig(
        device="cuda",
        num_blocks=64,
        max_batch_tokens=24,
        cache_layout=cache_layout,
        tp_size=tp_size,
    )
    prompts = [random_prompt(length) for length in (1, 16, 33, 100)]
    model.module.set_attn_implementation("sdpa")
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device="cuda")
        output = model.module.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
        expected.append(output[0, len(prompt) :].tolist())
    model.module.set_attn_implementation(ATTENTION_NAME)
    engine = Engine(model, config)
    engine.start()
    assert generate(engine, prompts, max_tokens=12) == expected
    regions = [region for cache in engine.cache.rank_caches() for region in cache.regions]
    assert {region.memory for region in regions} == {MemoryKind.VRAM}
    engine.close()


def test_chunks_agree_with_one_pass_in_bfloat16() -> None:
    model = load_model(LLAMA, "bfloat16", "cuda")
    runner = ModelRunner(model, make_cache(model, EngineConfig(device="cuda", num_blocks=32)))
    found = []
    for number, bounds in enumerate(((0, 100), (0, 37, 61, 100))):
        blocks = [BlockId(16 * number + index) for index in range(16)]
        sequence = Sequence(RequestId("a"), 0, list(random_prompt(100)), blocks=blocks)
        for start, stop in itertools.pairwise(bounds):
            logits = runner.run([Work(sequence, start, stop - start)])
        found.append(logits[0])
    whole, chunked = found
    assert torch.allclose(whole, chunked, atol=0.15 * whole.std().item(), rtol=0)
