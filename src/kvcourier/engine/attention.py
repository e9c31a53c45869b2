"""Attention over the paged cache, as a function that transformers models call.

Decides how the tokens of several sequences, flattened into one forward pass, store their K and V
and attend to their own history. Refuses to know requests and models: everything comes in with the
`PagedBatch` that the engine passes to the model's forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from kvcourier.engine.kv_cache import CacheShape, KVCache, Slots
from kvcourier.errors import ConfigError

ATTENTION_NAME = "kvcourier_paged"
BATCH_ARGUMENT = "paged_batch"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive new tokens of one sequence.

    Attributes:
        token_ids: the tokens to compute.
        start: position of the first; all before it are in the cache.
        block_ids: blocks of the sequence, covering at least start + len(token_ids) positions.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]

    @property
    def stop(self) -> int:
        """Length of the sequence once this chunk is computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Rows [first, first + count) of the batch are new tokens after `start` cached ones."""

    first: int
    count: int
    start: int
    block_table: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Rows [first, first + count) are one token each, of sequences of similar length."""

    first: int
    count: int
    longest: int
    block_table: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One forward pass over chunks of several sequences.

    Attributes:
        token_ids, positions: int64, shape [1, tokens]; inputs of the model.
        last_rows: for each chunk, as given, the row of its last token.
        on_layer: called with each layer's index once the layer's K and V are stored.
    """

    cache: KVCache
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: Slots
    prefills: tuple[_Prefill, ...]
    decodes: tuple[_Decodes, ...]
    last_rows: torch.Tensor
    on_layer: Callable[[int], None] | None = None


def build_batch(
    chunks: Sequence[Chunk], cache: KVCache, on_layer: Callable[[int], None] | None = None
) -> PagedBatch:
    """Lay chunks out for one forward pass; single tokens first, sorted by length."""
    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].token_ids) > 1, chunks[i].stop))
    device, size = cache.device, cache.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    last_rows = [0] * len(chunks)
    firsts: list[int] = []
    for index in order:
        chunk = chunks[index]
        firsts.append(len(token_ids))
        token_ids.extend(chunk.token_ids)
        positions.extend(range(chunk.start, chunk.stop))
        blocks.extend(chunk.block_ids[p // size] for p in range(chunk.start, chunk.stop))
        last_rows[index] = len(token_ids) - 1
    position_tensor = torch.tensor(positions, device=device)
    ordered = [chunks[index] for index in order]
    num_single = sum(len(chunk.token_ids) == 1 for chunk in ordered)
    return PagedBatch(
        cache=cache,
        token_ids=torch.tensor([token_ids], device=device),
        positions=position_tensor[None],
        slots=Slots(torch.tensor(blocks, device=device), position_tensor % size),
        prefills=tuple(
            _plan_prefill(chunk, first, cache)
            for chunk, first in zip(ordered[num_single:], firsts[num_single:], strict=True)
        ),
        decodes=_plan_decodes(ordered[:num_single], cache),
        last_rows=torch.tensor(last_rows, device=device),
        on_layer=on_layer,
    )


def _plan_prefill(chunk: Chunk, first: int, cache: KVCache) -> _Prefill:
    count = len(chunk.token_ids)
    mask: torch.Tensor | None = None
    if chunk.start and cache.device.type == "cuda":
        # Understood by flash attention, which takes no mask tensor.
        mask = causal_lower_right(count, chunk.stop)
    elif chunk.start:
        mask = torch.ones(count, chunk.stop, dtype=torch.bool).tril(chunk.start)
    return _Prefill(first, count, chunk.start, _block_table([chunk], cache), mask)


def _plan_decodes(chunks: Sequence[Chunk], cache: KVCache) -> tuple[_Decodes, ...]:
    """Group sequences, sorted by length, so that padding at most doubles what is read."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        if groups and chunk.stop <= max(2 * groups[-1][0].stop, 4 * cache.block_size):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    plans = []
    first = 0
    for group in groups:
        lengths = torch.tensor([chunk.stop for chunk in group], device=cache.device)
        longest = group[-1].stop
        mask = None
        if group[0].stop != longest:
            reach = torch.arange(longest, device=cache.device)
            mask = (reach < lengths[:, None])[:, None, None]
        plans.append(_Decodes(first, len(group), longest, _block_table(group, cache), mask))
        first += len(group)
    return tuple(plans)


def _block_table(chunks: Sequence[Chunk], cache: KVCache) -> torch.Tensor:
    width = max(-(-chunk.stop // cache.block_size) for chunk in chunks)
    # Short rows are padded with their own first block: masked, and always readable.
    rows = [(*chunk.block_ids[:width], *[chunk.block_ids[0]] * width)[:width] for chunk in chunks]
    return torch.tensor(rows, device=cache.device)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers: query [1, heads, tokens, lanes], key/value with KV heads.

    Returns:
        The attended values, shape [1, tokens, heads, lanes], and no weights.
    """
    batch: PagedBatch | _Probe = kwargs[BATCH_ARGUMENT]
    if isinstance(batch, _Probe):
        batch.record(module, query, key, value, kwargs)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache = batch.cache
    cache.write(layer, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if batch.on_layer is not None:
        batch.on_layer(layer)
    # Either kernel shares KV heads among query heads only when told to.
    grouped = query.shape[1] != key.shape[1]
    output = torch.empty_like(query)
    for plan in batch.prefills:
        rows = slice(plan.first, plan.first + plan.count)
        if plan.start:
            keys, values = cache.read(layer, plan.block_table)
            stop = plan.start + plan.count
            keys, values = keys[:, :, :stop], values[:, :, :stop]
        else:
            keys, values = key[:, :, rows], value[:, :, rows]
        output[:, :, rows] = functional.scaled_dot_product_attention(
            query[:, :, rows],
            keys,
            values,
            attn_mask=plan.mask,
            is_causal=plan.mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
    for group in batch.decodes:
        rows = slice(group.first, group.first + group.count)
        keys, values = cache.read(layer, group.block_table)
        # One new token: the query heads that share a KV head become rows of one small matrix.
        packed = query[0, :, rows].transpose(0, 1)
        packed = packed.reshape(group.count, key.shape[1], -1, packed.shape[-1])
        attended = functional.scaled_dot_product_attention(
            packed,
            keys[:, :, : group.longest],
            values[:, :, : group.longest],
            attn_mask=group.mask,
            scale=scaling,
        )
        output[0, :, rows] = attended.flatten(1, 2).transpose(0, 1)
    return output.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; harmless when repeated.

    No mask function is registered under the name, so that transformers builds no mask: a batch of
    flattened sequences has none that one tensor could express cheaply.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


class _Probe:
    """Stands in for a batch once, to see how a model calls its attention."""

    def __init__(self, max_position: int) -> None:
        self._max_position = max_position
        self.shapes: dict[int, tuple[int, int]] = {}
        self.objections: list[str] = []

    def record(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        layer = getattr(module, "layer_idx", None)
        window = kwargs.get("sliding_window")
        checks = (
            (not isinstance(layer, int), "its attention layers are not numbered"),
            (
                key.shape != value.shape or query.shape[-1] != key.shape[-1],
                "K and V have different sizes (latent attention, MLA)",
            ),
            (
                window is not None and window < self._max_position,
                f"layer {layer} has a sliding window of {window} tokens",
            ),
            (kwargs.get("softcap") is not None, "it caps attention logits (softcap)"),
            (kwargs.get("s_aux") is not None, "it has attention sinks"),
            (kwargs.get("position_bias") is not None, "it adds a position bias to attention"),
            (
                not kwargs.get("is_causal", getattr(module, "is_causal", True)),
                "its attention is not causal",
            ),
        )
        self.objections += [text for wrong, text in checks if wrong]
        if isinstance(layer, int):
            if layer in self.shapes:
                self.objections.append(f"layer {layer} attends more than once")
            self.shapes[layer] = (key.shape[1], key.shape[3])


@torch.inference_mode()
def probe_attention(name: str, model: Any, num_layers: int, max_position: int) -> CacheShape:
    """Run a model once to learn what it caches.

    Asking the layers is surer than reading configs, whose fields differ between architectures.

    Raises:
        ConfigError: its attention is of a kind the paged cache cannot hold; all reasons are named.
    """
    probe = _Probe(max_position)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=token, position_ids=token, use_cache=False, **{BATCH_ARGUMENT: probe})
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name}: the model does not take a paged batch: {error}") from error
    objections = list(dict.fromkeys(probe.objections))
    if sorted(probe.shapes) != list(range(num_layers)):
        objections.append(
            f"{len(probe.shapes)} of {num_layers} layers use attention (state-space, linear or "
            "shared-KV layers)"
        )
    if len(set(probe.shapes.values())) > 1:
        objections.append("its layers have different numbers or sizes of KV heads")
    if objections:
        raise ConfigError(
            f"{name}: {type(model).__name__} cannot be served: {'; '.join(objections)}"
        )
    num_kv_heads, head_dim = probe.shapes[0]
    return CacheShape(num_layers, num_kv_heads, head_dim)
