"""Small models with random weights, written to disk as vLLM loads them.

In float32: with bfloat16 the likeliest two tokens of such a model are often alike, and which one an
engine takes depends on the processor and on where a prompt is cut into steps.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvcourier.engine.random_model import byte_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def write_qwen3(folder: Path) -> Path:
    """K and V of four heads."""
    torch.manual_seed(0)
    config = Qwen3Config(**_COMMON, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    return _write(folder, Qwen3ForCausalLM(config))


def write_deepseek(folder: Path) -> Path:
    """One latent per token (MLA), of the sizes that vLLM's CPU kernel is compiled for; dense."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        **_COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=_COMMON["num_hidden_layers"],
        # Larger than usual, so that attention has a say in the tokens.
        initializer_range=0.1,
    )
    return _write(folder, DeepseekV2ForCausalLM(config))


def _write(folder: Path, model: PreTrainedModel) -> Path:
    byte_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
