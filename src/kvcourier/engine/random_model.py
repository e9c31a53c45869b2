"""Generated models and their byte tokenizer, for tests and for speed work.

Decides the shape a spec asks for and every weight in it: the same spec gives the same weights in
every process and on every machine. Refuses to know what the model is used for.
"""

import math
import zlib
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvcourier.errors import ConfigError

RANDOM_SOURCES: dict[str, tuple[type[Any], type[Any]]] = {
    "random-llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "random-qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}

START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BYTE_VOCAB_SIZE = 256 + 2


@dataclass(frozen=True, slots=True)
class RandomModelSpec:
    """Shape of a generated model; the part of a source after the colon, `key=value,...`."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = BYTE_VOCAB_SIZE
    seed: int = 0
    max_position: int = 4096

    def __post_init__(self) -> None:
        for field in fields(self):
            lowest = {"seed": 0, "vocab": BYTE_VOCAB_SIZE}.get(field.name, 1)
            if getattr(self, field.name) < lowest:
                raise ConfigError(
                    f"{field.name}: expected at least {lowest}, found {getattr(self, field.name)}"
                )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads: expected a multiple of kv_heads ({self.kv_heads}), found {self.heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number, found {self.head_dim}")

    @classmethod
    def parse(cls, source: str) -> "RandomModelSpec":
        """Read the spec of `random-llama:layers=2,hidden=64`. Raises ConfigError."""
        names = [field.name for field in fields(cls)]
        values: dict[str, int] = {}
        for item in filter(None, source.partition(":")[2].split(",")):
            name, _, value = item.partition("=")
            if name not in names or not value.isdecimal():
                raise ConfigError(
                    f"model {source}: expected key=number with a key of {', '.join(names)}; "
                    f"found {item!r}"
                )
            values[name] = int(value)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"model {source}: {error}") from None


def build_random_model(source: str) -> tuple[Any, Any]:
    """Build the float32 model and the tokenizer that a `random-...` source describes.

    Raises:
        ConfigError: a key is unknown or a value is out of range.
    """
    spec = RandomModelSpec.parse(source)
    config_class, model_class = RANDOM_SOURCES[source.partition(":")[0]]
    tokenizer = byte_tokenizer()
    config = config_class(
        num_hidden_layers=spec.layers,
        hidden_size=spec.hidden,
        intermediate_size=spec.hidden * 3,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab,
        max_position_embeddings=spec.max_position,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        module = model_class(config)
    _fill_weights(module, spec.seed)
    return module, tokenizer


def _fill_weights(module: torch.nn.Module, seed: int) -> None:
    """Draw every matrix from its own generator, so that neither order nor version matters.

    Rows have unit variance, twice that for queries and keys: answers then depend sharply on the
    whole prompt, as with a trained model, where the usual 0.02 would give nearly flat logits.
    """
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() < 2:
                continue  # norms stay 1, biases 0
            # 32 bits: torch's CPU generator ignores higher ones.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            fan_in = 1 if "embed" in name else weight.shape[1]
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            weight.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)


def byte_tokenizer() -> Any:
    """A tokenizer with one token per byte and two markers for chats; knows every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        additional_special_tokens=[START_TOKEN],
        eos_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
