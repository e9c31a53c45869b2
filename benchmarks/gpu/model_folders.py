"""Model folders without weights: the dense Qwen3 shapes, for vLLM's `--load-format dummy`.

Decides shapes and a tokenizer in which each id is a word. Refuses to know who serves them.
"""

import json
from pathlib import Path

VOCAB_SIZE = 151_936
_END, _PAD = "<end>", "<pad>"

# Of the models' own config.json: width, MLP width, layers, query heads, tied embeddings.
_SHAPES = {
    "0.6b": (1024, 3072, 28, 16, True),
    "8b": (4096, 12288, 36, 32, False),
    "32b": (5120, 25600, 64, 64, False),
}
_NUM_KV_HEADS, _HEAD_DIM, _DTYPE_BYTES = 8, 128, 2
SIZES = tuple(_SHAPES)


def kv_bytes_per_token(size: str) -> int:
    """Bytes of KV cache that one token of one of SIZES takes."""
    num_layers = _SHAPES[size][2]
    return num_layers * 2 * _NUM_KV_HEADS * _HEAD_DIM * _DTYPE_BYTES


def write_model_folder(parent: Path, size: str) -> Path:
    """Write one of SIZES under `parent`; returns its folder, which needs no network to serve."""
    width, mlp_width, num_layers, num_heads, tied = _SHAPES[size]
    folder = parent / f"qwen3-{size}"
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _NUM_KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of VOCAB_SIZE words into a model folder."""
    settings = {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "eos_token": _END,
        "pad_token": _PAD,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _tokenizer() -> dict[str, object]:
    """A word for every id, so that any id that random weights choose can be shown."""
    specials = (_END, _PAD)
    words = [*specials, *(f"w{index}" for index in range(len(specials), VOCAB_SIZE))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, word in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate(words)},
            "unk_token": _END,
        },
    }
