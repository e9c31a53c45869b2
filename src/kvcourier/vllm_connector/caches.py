"""vLLM's KV cache tensors as a rank's cache.

Decides cache groups, geometry and placement from vLLM's groups and from the tensors themselves, by
their strides, whatever layout the attention backend chose. Refuses to guess: what it does not know
is refused by name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

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
from kvcourier.vllm_connector.block_tables import BlockTable

_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_SUPPORTED_SPECS = {
    "FullAttentionSpec": False,
    "SlidingWindowSpec": False,
    "MLAAttentionSpec": True,
}
"""vLLM's cache specs we can move, and whether they hold a latent."""


@dataclass(frozen=True)
class WorkerCache:
    """A worker's caches, and how vLLM's block ids name their blocks, group by group."""

    cache: RankCache
    tables: tuple[BlockTable, ...]


class _Shape(NamedTuple):
    """What layers have in common that are one group of ours.

    `group` is vLLM's; `block_size` counts tokens of its blocks, `num_tokens` those of the tensor's.
    """

    group: int
    block_size: int
    window: int | None
    kind: CacheKind
    num_blocks: int
    num_heads: int
    num_tokens: int
    lanes: int
    layout: CacheLayout
    dtype: str
    itemsize: int


class _Layer(NamedTuple):
    """One layer: its number, and a tensor `[blocks, heads, tokens, lanes]` for each plane."""

    number: int
    name: str
    planes: tuple[Any, ...]


def read_cache(
    kv_caches: Mapping[str, Any],
    kv_cache_groups: Sequence[Any],
    *,
    total_kv_heads: int,
    tp_rank: int,
    tp_size: int,
) -> WorkerCache:
    """Describe a worker's caches.

    Args:
        kv_caches: tensor of each layer, by the layer's name: `[blocks, heads, tokens, lanes]`
            in any memory order, K and V side by side in the lanes; `[blocks, tokens, lanes]`
            for a latent; or `[2, blocks, tokens, heads, lanes]` or `[blocks, 2, ...]` with K and V
            as planes of their own.
        kv_cache_groups: vLLM's cache groups.
        total_kv_heads: KV heads of the whole model.

    Raises:
        ConfigError: a kind of cache that is not supported yet.
    """
    members: dict[_Shape, list[_Layer]] = {}
    for index, group in enumerate(kv_cache_groups):
        for name in group.layer_names:
            if name not in kv_caches:
                raise ConfigError(f"KV cache: layer {name} of vLLM's cache groups has no tensor")
        # Layers that use another layer's KV have its tensor, and nothing of their own to move.
        owners = {kv_caches[name].data_ptr(): name for name in reversed(group.layer_names)}
        for name in group.layer_names:
            if owners[kv_caches[name].data_ptr()] == name:
                shape, layer = _layer(index, name, _spec_of(group, name), kv_caches[name])
                members.setdefault(shape, []).append(layer)
    _check_layers(kv_caches, members)
    mixed = len({shape.num_heads for shape in members}) > 1
    regions = _regions(kv_caches.values())
    caches, tables = [], []
    for shape, layers in members.items():
        layers.sort()
        total = _total_heads(shape, layers, total_kv_heads, tp_rank, tp_size, mixed=mixed)
        geometry = _geometry(shape, layers, total, tp_rank, tp_size)
        caches.append(GroupCache(Rank(0, tp_rank), geometry, _place(layers, regions), regions))
        ratio = shape.block_size // shape.num_tokens
        tables.append(BlockTable(shape.group, shape.block_size, ratio, shape.window))
    return WorkerCache(RankCache(tuple(caches)), tuple(tables))


def largest_request(kv_cache_groups: Iterable[Any], vllm_config: Any) -> int:
    """Blocks that a request of the greatest length takes in all of vLLM's cache groups."""
    specs = [group.kv_cache_spec for group in kv_cache_groups]
    return sum(
        -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs
    )


def all_ranks(groups: GroupGeometries, tp_size: int) -> dict[Rank, GroupGeometries]:
    """Every rank's geometries, from one rank's: they differ in their heads only."""
    return {
        Rank(0, tp_rank): tuple(_at_rank(geometry, tp_rank, tp_size) for geometry in groups)
        for tp_rank in range(tp_size)
    }


def layer_number(name: str) -> int:
    """A layer's number from its name, such as `model.layers.12.self_attn.attn`.

    Raises:
        ConfigError: the name has not exactly one number.
    """
    numbers = _LAYER_NUMBER.findall(name)
    if len(numbers) != 1:
        raise ConfigError(f"KV cache: layer {name!r} has no single number to know it by")
    return int(numbers[0])


def _spec_of(group: Any, name: str) -> Any:
    """A layer's own spec; a group of alike layers that differ in shape has one for each."""
    spec = group.kv_cache_spec
    return getattr(spec, "kv_cache_specs", {}).get(name, spec)


def _layer(group: int, name: str, spec: Any, tensor: Any) -> tuple[_Shape, _Layer]:
    kind_name = type(spec).__name__
    if kind_name not in _SUPPORTED_SPECS:
        supported = ", ".join(_SUPPORTED_SPECS)
        raise ConfigError(
            f"KV cache: {kind_name} of layer {name} is not supported, only {supported}"
        )
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise ConfigError(
            f"KV cache: layer {name} keeps a state for {spec.tokens_per_state} tokens; one for "
            "each token is supported"
        )
    kind, planes = _planes(name, tensor, latent=_SUPPORTED_SPECS[kind_name])
    num_blocks, num_heads, num_tokens, lanes = planes[0].shape
    if spec.block_size % num_tokens:
        raise ConfigError(
            f"KV cache: layer {name} has blocks of {num_tokens} tokens, which do not divide vLLM's "
            f"of {spec.block_size}"
        )
    shape = _Shape(
        group=group,
        block_size=int(spec.block_size),
        window=int(spec.sliding_window) if kind_name == "SlidingWindowSpec" else None,
        kind=kind,
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_tokens=num_tokens,
        lanes=lanes,
        layout=_layout(name, planes[0]),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.element_size(),
    )
    return shape, _Layer(layer_number(name), name, planes)


def _planes(name: str, tensor: Any, *, latent: bool) -> tuple[CacheKind, tuple[Any, ...]]:
    """What a layer stores, and each plane of it as `[blocks, heads, tokens, lanes]`."""
    if latent and tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    if tensor.dim() == 4:
        return CacheKind.LATENT if latent else CacheKind.PACKED_KEY_VALUE, (tensor,)
    twos = [dim for dim in (0, 1) if tensor.dim() == 5 and tensor.shape[dim] == 2]
    if latent or len(twos) != 1:
        raise ConfigError(
            f"KV cache: layer {name} has shape {tuple(tensor.shape)}; expected "
            "[blocks, heads, tokens, lanes], or K and V as [2, blocks, tokens, heads, lanes] or "
            "[blocks, 2, tokens, heads, lanes]"
        )
    return CacheKind.KEY_VALUE, tuple(
        tensor.select(twos[0], plane).transpose(1, 2) for plane in range(2)
    )


def _layout(name: str, plane: Any) -> CacheLayout:
    """Order of heads and tokens in a block, from the strides."""
    _, heads, tokens, lanes = plane.shape
    _, head_stride, token_stride, lane_stride = plane.stride()
    by_token = (heads == 1 or head_stride == lanes) and token_stride == heads * lanes
    by_head = token_stride == lanes and (heads == 1 or head_stride == tokens * lanes)
    if lane_stride != 1 or not (by_token or by_head):
        raise ConfigError(
            f"KV cache: layer {name} has strides {plane.stride()} for shape "
            f"{tuple(plane.shape)}; its blocks are not dense"
        )
    return CacheLayout.HND if by_head else CacheLayout.NHD


def _check_layers(kv_caches: Mapping[str, Any], members: Mapping[_Shape, list[_Layer]]) -> None:
    """Every cache is in a group, and no two are of one layer."""
    layers = sorted(layer for group in members.values() for layer in group)
    moved = {kv_caches[layer.name].data_ptr() for layer in layers}
    for name, tensor in kv_caches.items():
        if tensor.data_ptr() not in moved:
            raise ConfigError(f"KV cache: layer {name} is in none of vLLM's cache groups")
    for before, after in pairwise(layers):
        if before.number == after.number:
            raise ConfigError(
                f"KV cache: layer {after.number} has several caches, {before.name} and "
                f"{after.name}; one is supported"
            )


def _total_heads(
    shape: _Shape,
    layers: Sequence[_Layer],
    total_kv_heads: int,
    tp_rank: int,
    tp_size: int,
    *,
    mixed: bool,
) -> int:
    """KV heads of these layers over all ranks; `mixed` if those of other layers differ."""
    if shape.kind is CacheKind.LATENT:
        return 1
    expected = len(split_heads(total_kv_heads, tp_size, tp_rank))
    if mixed and expected != shape.num_heads and (tp_size == 1 or shape.num_heads > 1):
        # A layer with as many heads as ranks, or fewer, may have them replicated; not this one.
        return shape.num_heads * tp_size
    if expected != shape.num_heads:
        raise ConfigError(
            f"KV cache: expected {expected} KV heads on rank {tp_rank} of {tp_size} in layer "
            f"{layers[0].name}, found {shape.num_heads}"
        )
    return total_kv_heads


def _geometry(
    shape: _Shape, layers: Sequence[_Layer], total_heads: int, tp_rank: int, tp_size: int
) -> CacheGeometry:
    whole = CacheGeometry(
        kind=shape.kind,
        layers=tuple(layer.number for layer in layers),
        num_kv_heads=total_heads,
        head_start=0,
        head_stop=total_heads,
        head_dim=shape.lanes,
        dtype=shape.dtype,
        itemsize=shape.itemsize,
        block_size=shape.num_tokens,
        num_blocks=shape.num_blocks,
        cache_layout=shape.layout,
        window=shape.window,
        num_reserved_blocks=shape.block_size // shape.num_tokens,
    )
    return _at_rank(whole, tp_rank, tp_size)


def _at_rank(geometry: CacheGeometry, tp_rank: int, tp_size: int) -> CacheGeometry:
    latent = geometry.kind is CacheKind.LATENT
    heads = range(1) if latent else split_heads(geometry.num_kv_heads, tp_size, tp_rank)
    return replace(geometry, head_start=heads.start, head_stop=heads.stop)


def _regions(tensors: Iterable[Any]) -> tuple[Region, ...]:
    """One region per allocation, however many layers share it."""
    regions: dict[int, Region] = {}
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
    return tuple(regions.values())


def _place(layers: Sequence[_Layer], regions: Sequence[Region]) -> CachePlacement:
    """Where each plane of each layer lies."""
    index_of = {region.address: index for index, region in enumerate(regions)}

    def place(plane: Any) -> tuple[int, int, int]:
        address = plane.untyped_storage().data_ptr()
        stride_bytes = plane.stride(0) * plane.element_size()
        return index_of[address], plane.data_ptr() - address, stride_bytes

    table = np.array([[place(each) for each in layer.planes] for layer in layers], dtype=np.int64)
    return CachePlacement(table[..., 0], table[..., 1], table[..., 2])
