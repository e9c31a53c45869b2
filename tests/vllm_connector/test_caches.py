"""vLLM's tensors as a cache geometry: every byte is where the placement says."""

from dataclasses import dataclass

import pytest
import torch

from kvcourier.config import Limits
from kvcourier.errors import ConfigError
from kvcourier.ids import Rank
from kvcourier.layout import CacheKind, CacheLayout, MemoryKind, RankCache, validate_cache
from kvcourier.vllm_connector.caches import all_ranks, layer_number, read_cache

BLOCKS, HEADS, TOKENS, LANES = 5, 2, 16, 8


@dataclass
class FullAttentionSpec:
    block_size: int = TOKENS


@dataclass
class MLAAttentionSpec:
    block_size: int = TOKENS


@dataclass
class SlidingWindowSpec:
    block_size: int = TOKENS


@dataclass
class Group:
    kv_cache_spec: object


GROUPS = [Group(FullAttentionSpec())]


def tensors(layout: str, num_layers: int = 3) -> dict[str, torch.Tensor]:
    """One allocation for all layers, as vLLM makes it, seen as [blocks, heads, tokens, lanes]."""
    order = (HEADS, TOKENS) if layout == "HND" else (TOKENS, HEADS)
    whole = torch.arange(num_layers * BLOCKS * HEADS * TOKENS * LANES, dtype=torch.float32)
    whole = whole.view(num_layers, BLOCKS, *order, LANES)
    layers = {f"model.layers.{i}.self_attn.attn": whole[i] for i in reversed(range(num_layers))}
    return layers if layout == "HND" else {k: v.transpose(1, 2) for k, v in layers.items()}


def read(caches: dict[str, torch.Tensor], groups: list[Group] = GROUPS, **changes: int):
    shape = {"total_kv_heads": HEADS, "tp_rank": 0, "tp_size": 1} | changes
    (only,) = read_cache(caches, groups, **shape).groups
    return only


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_placement_points_at_each_block(layout: str) -> None:
    caches = tensors(layout)
    cache = read(caches)
    geometry, placement = cache.geometry, cache.placement
    validate_cache(RankCache((cache,)), Limits())
    assert geometry.cache_layout is CacheLayout(layout)
    assert geometry.kind is CacheKind.PACKED_KEY_VALUE
    assert geometry.layers == (0, 1, 2)
    assert (geometry.num_blocks, geometry.block_size, geometry.head_dim) == (BLOCKS, TOKENS, LANES)
    assert len(cache.regions) == 1, "layers that share an allocation are registered once"
    assert cache.regions[0].memory is MemoryKind.DRAM
    for row, layer in enumerate(geometry.layers):
        tensor = caches[f"model.layers.{layer}.self_attn.attn"]
        for block in range(BLOCKS):
            address = (
                cache.regions[int(placement.region[row, 0])].address
                + int(placement.offset_bytes[row, 0])
                + block * int(placement.block_stride_bytes[row, 0])
            )
            assert address == tensor[block].data_ptr()


def test_a_latent_cache_has_one_head_on_every_rank() -> None:
    whole = torch.zeros(2, BLOCKS, TOKENS, 24, dtype=torch.bfloat16)
    caches = {f"model.layers.{i}.attn": whole[i] for i in range(2)}
    cache = read(caches, [Group(MLAAttentionSpec())], total_kv_heads=16, tp_rank=1, tp_size=4)
    assert cache.geometry.kind is CacheKind.LATENT
    assert (cache.geometry.num_kv_heads, cache.geometry.num_heads) == (1, 1)
    assert cache.geometry.dtype == "bfloat16"
    assert cache.rank == Rank(0, 1)
    assert {g.head_stop for (g,) in all_ranks((cache.geometry,), 4).values()} == {1}


def test_ranks_share_the_heads() -> None:
    cache = read(tensors("HND"), total_kv_heads=8, tp_rank=3, tp_size=4)
    assert (cache.geometry.head_start, cache.geometry.head_stop) == (6, 8)
    spans = [(g.head_start, g.head_stop) for (g,) in all_ranks((cache.geometry,), 4).values()]
    assert spans == [(0, 2), (2, 4), (4, 6), (6, 8)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"groups": [*GROUPS, Group(SlidingWindowSpec())]}, "one cache group is supported"),
        ({"groups": [Group(SlidingWindowSpec())]}, "SlidingWindowSpec is not supported"),
        ({"groups": [Group(FullAttentionSpec(block_size=32))]}, "--block-size 16"),
        ({"total_kv_heads": 8}, "expected 8 KV heads on rank 0 of 1, found 2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(tensors("HND"), **change)


def test_tensors_of_unknown_shape_are_refused() -> None:
    five = {"model.layers.0.attn": torch.zeros(2, BLOCKS, TOKENS, HEADS, LANES)}
    with pytest.raises(ConfigError, match="has shape"):
        read(five)
    sparse = {"model.layers.0.attn": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * LANES)[..., :LANES]}
    with pytest.raises(ConfigError, match="its blocks are not dense"):
        read(sparse)


@pytest.mark.parametrize("name", ["model.embed", "model.layers.1.experts.2.attn"])
def test_a_layer_without_a_single_number_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no single number"):
        layer_number(name)
