"""vLLM's KV cache tensors as a rank's cache.

Decides geometry and placement from the tensors themselves, by their strides, whatever layout the
attention backend chose. Refuses to guess: what it does not know is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvcourier.errors import ConfigError
from kvcourier.ids import Rank
from kvcourier.layout import (
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    GroupGeometries,
    MemoryKind,
    RankCache,
    Region,
    split_heads,
)

_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_SUPPORTED_SPECS = {"FullAttentionSpec": False, "MLAAttentionSpec": True}
"""vLLM's cache specs we can move, and whether they hold a latent."""


def read_cache(
    kv_caches: Mapping[str, Any],
    kv_cache_groups: Sequence[Any],
    *,
    total_kv_heads: int,
    tp_rank: int,
    tp_size: int,
) -> RankCache:
    """Describe a worker's caches.

    Args:
        kv_caches: tensor of each layer, by the layer's name: `[blocks, heads, tokens, lanes]`
            in any memory order, K and V side by side in the lanes, or `[blocks, tokens, lanes]`
            for a latent.
        kv_cache_groups: vLLM's cache groups.
        total_kv_heads: KV heads of the whole model.

    Raises:
        ConfigError: a kind of cache that is not supported yet.
    """
    latent, block_size = _check_groups(kv_cache_groups)
    named = sorted((layer_number(name), name) for name in kv_caches)
    shapes = {_logical(name, kv_caches[name], latent) for _, name in named}
    if len(shapes) != 1:
        raise ConfigError(f"KV cache: layers of different shapes are not supported: {shapes}")
    num_blocks, num_heads, num_tokens, lanes, layout = shapes.pop()
    if num_tokens != block_size:
        raise ConfigError(
            f"KV cache: the attention kernel's blocks of {num_tokens} tokens differ from vLLM's of "
            f"{block_size}; start vLLM with --block-size {num_tokens}"
        )
    heads = range(1) if latent else split_heads(total_kv_heads, tp_size, tp_rank)
    if len(heads) != num_heads:
        raise ConfigError(
            f"KV cache: expected {len(heads)} KV heads on rank {tp_rank} of {tp_size}, "
            f"found {num_heads}"
        )
    first = kv_caches[named[0][1]]
    geometry = CacheGeometry(
        kind=CacheKind.LATENT if latent else CacheKind.PACKED_KEY_VALUE,
        layers=tuple(number for number, _ in named),
        num_kv_heads=1 if latent else total_kv_heads,
        head_start=heads.start,
        head_stop=heads.stop,
        head_dim=lanes,
        dtype=str(first.dtype).removeprefix("torch."),
        itemsize=first.element_size(),
        block_size=block_size,
        num_blocks=num_blocks,
        cache_layout=layout,
    )
    placement, regions = _place([kv_caches[name] for _, name in named])
    return RankCache((GroupCache(Rank(0, tp_rank), geometry, placement, regions),))


def all_ranks(groups: GroupGeometries, tp_size: int) -> dict[Rank, GroupGeometries]:
    """Every rank's geometries, from one rank's: they differ in their heads only."""
    (geometry,) = groups
    latent = geometry.kind is CacheKind.LATENT
    ranks: dict[Rank, GroupGeometries] = {}
    for tp_rank in range(tp_size):
        heads = range(1) if latent else split_heads(geometry.num_kv_heads, tp_size, tp_rank)
        whole = replace(geometry, head_start=heads.start, head_stop=heads.stop)
        ranks[Rank(0, tp_rank)] = (whole,)
    return ranks


def layer_number(name: str) -> int:
    """A layer's number from its name, such as `model.layers.12.self_attn.attn`.

    Raises:
        ConfigError: the name has not exactly one number.
    """
    numbers = _LAYER_NUMBER.findall(name)
    if len(numbers) != 1:
        raise ConfigError(f"KV cache: layer {name!r} has no single number to know it by")
    return int(numbers[0])


def _check_groups(groups: Sequence[Any]) -> tuple[bool, int]:
    """(latent, block size) of the only group."""
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(f"KV cache: one cache group is supported, this model has: {kinds}")
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in _SUPPORTED_SPECS:
        supported = ", ".join(_SUPPORTED_SPECS)
        raise ConfigError(f"KV cache: {kind} is not supported, only {supported}")
    return _SUPPORTED_SPECS[kind], int(spec.block_size)


def _logical(name: str, tensor: Any, latent: bool) -> tuple[int, int, int, int, CacheLayout]:
    """(blocks, heads, tokens, lanes, layout) of a layer's tensor, from its strides."""
    if latent and tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    if tensor.dim() != 4:
        raise ConfigError(
            f"KV cache: layer {name} has shape {tuple(tensor.shape)}; expected "
            "[blocks, heads, tokens, lanes]"
        )
    blocks, heads, tokens, lanes = tensor.shape
    _, head_stride, token_stride, lane_stride = tensor.stride()
    by_token = (heads == 1 or head_stride == lanes) and token_stride == heads * lanes
    by_head = token_stride == lanes and (heads == 1 or head_stride == tokens * lanes)
    if lane_stride != 1 or not (by_token or by_head):
        raise ConfigError(
            f"KV cache: layer {name} has strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; its blocks are not dense"
        )
    return blocks, heads, tokens, lanes, CacheLayout.HND if by_head else CacheLayout.NHD


def _place(tensors: Sequence[Any]) -> tuple[CachePlacement, tuple[Region, ...]]:
    """Where each layer lies: one region per allocation, however many layers share it."""
    regions: dict[int, Region] = {}
    rows = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        on_cpu = tensor.device.type == "cpu"
        region = Region(
            storage.data_ptr(),
            storage.nbytes(),
            MemoryKind.DRAM if on_cpu else MemoryKind.VRAM,
            0 if on_cpu else tensor.get_device(),
        )
        regions.setdefault(region.address, region)
        rows.append(
            (
                list(regions).index(region.address),
                tensor.data_ptr() - region.address,
                tensor.stride(0) * tensor.element_size(),
            )
        )
    table = np.array(rows, dtype=np.int64)
    placement = CachePlacement(table[:, 0:1], table[:, 1:2], table[:, 2:3])
    return placement, tuple(regions.values())
