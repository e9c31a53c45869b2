"""Settings of one engine.

Decides names, units, defaults and allowed values. Refuses to know where a value came from.
"""

from dataclasses import dataclass, fields
from typing import Any

from kvcourier.engine.kv_cache import KVCache
from kvcourier.engine.models import DEFAULT_MODEL, LoadedModel
from kvcourier.engine.streaming import GRANULARITIES
from kvcourier.errors import ConfigError
from kvcourier.layout.geometry import CacheLayout

ALLOWED: dict[str, tuple[Any, ...]] = {
    "cache_layout": tuple(layout.value for layout in CacheLayout),
    "kv_load_failure_policy": ("fail", "recompute"),
    "granularity": GRANULARITIES,
}
OPTIONAL = frozenset({"num_blocks", "max_model_len", "kv_recompute_threshold"})
DEFAULT_RECOMPUTE_THRESHOLD = 1
DEFAULT_HISTORY_THRESHOLD = 64
LOWEST = {"kv_recompute_threshold": 0, "num_cpu_threads": 0}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine serves its model.

    Attributes:
        model: source, as `load_model` takes it.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: `cpu`, `cuda` or `cuda:N`.
        block_size: tokens per block.
        num_blocks: blocks of the cache; None takes what fits into `kv_cache_gb`.
        kv_cache_gb: size of the KV cache in 10^9 bytes, over all ranks, replicas not counted.
        max_model_len: tokens of prompt and answer together; None takes the model's own limit.
        max_batch_tokens: tokens computed in one step; longer prompts are cut into chunks of this.
        max_num_seqs: requests computed in one step.
        tp_size, pp_size: virtual ranks: shares of the heads, and groups of layers.
        cache_layout: order of dimensions in a block, `NHD` or `HND`.
        enable_prefix_caching: whether requests share blocks of equal prefixes.
        kv_load_failure_policy: when remote KV does not come, `fail` the request or `recompute`
            it here. vLLM's key and values.
        kv_recompute_threshold: if at most this many prompt tokens are missing, and always if it
            is only one, they are computed here instead of fetched. Of a conversation's history,
            if it is fewer. None: 1, and 64 for a history. vLLM's key and value.
        bidirectional_kv_xfer: whether the KV of an answer is kept for the conversation's next
            turn, and that of earlier turns fetched from who keeps it. vLLM's key.
        decoder_kv_blocks_ttl: seconds that it is kept, if its blocks are not needed before.
            vLLM's key and value.
        granularity: what is sent at once to an instance that has registered early: the whole
            `request`, each `chunk` when it is computed, or each `layer` of the last chunk as well.
        first_token_seeding: whether the first token, which the instance that computes the prompt
            has sampled, goes to the one that generates, so that it starts with the second; as
            sender and as receiver.
        num_cpu_threads: threads of one step; 0 leaves torch's choice.
        fragment: part of each prompt's blocks, 0 to 1, that is handed out in shuffled order
            instead of in long runs; to measure transfers of scattered caches.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_gb: float = 1.0
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_num_seqs: int = 64
    tp_size: int = 1
    pp_size: int = 1
    cache_layout: str = "NHD"
    enable_prefix_caching: bool = True
    kv_load_failure_policy: str = "fail"
    kv_recompute_threshold: int | None = None
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: float = 480.0
    granularity: str = "layer"
    first_token_seeding: bool = True
    num_cpu_threads: int = 0
    fragment: float = 0.0

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name in ALLOWED and value not in ALLOWED[spec.name]:
                expected = " or ".join(ALLOWED[spec.name])
                raise ConfigError(f"{spec.name}: expected {expected}, found {value!r}")
            is_number = spec.name in OPTIONAL or isinstance(spec.default, int)
            if isinstance(spec.default, bool) or not is_number:
                continue
            if value is None and spec.name in OPTIONAL:
                continue
            lowest = LOWEST.get(spec.name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ConfigError(
                    f"{spec.name}: expected a whole number of at least {lowest}, found {value!r}"
                )
        if not 0 < self.kv_cache_gb < float("inf"):
            raise ConfigError(f"kv_cache_gb: expected a number above 0, found {self.kv_cache_gb!r}")
        if not 0 < self.decoder_kv_blocks_ttl < float("inf"):
            found = self.decoder_kv_blocks_ttl
            raise ConfigError(f"decoder_kv_blocks_ttl: expected seconds above 0, found {found!r}")
        if not 0 <= self.fragment <= 1:
            raise ConfigError(f"fragment: expected 0 to 1, found {self.fragment!r}")

    @property
    def recompute_threshold(self) -> int:
        """If so many prompt tokens or fewer are missing, they are computed here."""
        threshold = self.kv_recompute_threshold
        return DEFAULT_RECOMPUTE_THRESHOLD if threshold is None else max(1, threshold)

    @property
    def history_threshold(self) -> int:
        """If fewer tokens than this are missing of a history, they are computed here."""
        threshold = self.kv_recompute_threshold
        return DEFAULT_HISTORY_THRESHOLD if threshold is None else max(1, threshold)

    def model_len(self, model: LoadedModel) -> int:
        """Tokens of prompt and answer together. Raises ConfigError above the model's limit."""
        if self.max_model_len is None:
            return model.max_position
        if self.max_model_len > model.max_position:
            raise ConfigError(
                f"max_model_len: expected at most {model.max_position}, the limit of "
                f"{model.name}; found {self.max_model_len}"
            )
        return self.max_model_len


def make_cache(model: LoadedModel, config: EngineConfig) -> KVCache:
    """Allocate the KV cache that a config asks for.

    Make it before the endpoint, which registers `rank_caches()`, and pass it to the engine.

    Raises:
        ConfigError: the ranks cannot share the model's heads or layers, or not even one block
            fits, or the memory cannot be allocated.
    """
    num_blocks = config.num_blocks
    if num_blocks is None:
        block_bytes = config.block_size * model.cache_shape.token_bytes(model.dtype)
        num_blocks = int(config.kv_cache_gb * 1e9) // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_gb: expected at least {block_bytes / 1e9:.6f}, the size of one block; "
                f"found {config.kv_cache_gb:g}"
            )
    try:
        return KVCache(
            model.cache_shape,
            dtype=model.dtype,
            device=model.device,
            block_size=config.block_size,
            num_blocks=num_blocks,
            cache_layout=CacheLayout(config.cache_layout),
            tp_size=config.tp_size,
            pp_size=config.pp_size,
        )
    except RuntimeError as error:
        raise ConfigError(f"a KV cache of {num_blocks} blocks does not fit: {error}") from error
