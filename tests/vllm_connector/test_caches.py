"""vLLM's tensors as a cache geometry: every byte is where the placement says."""

from dataclasses import dataclass

import pytest
import torch

from kvcourier.config import Limits
from kvcourier.errors import ConfigError
from kvcourier.ids import Rank
from kvcourier.layout import (
    CacheKind,
    CacheLayout,
    GroupCache,
    MemoryKind,
    RankCache,
    validate_cache,
)
from kvcourier.vllm_connector.block_tables import BlockTable
from kvcourier.vllm_connector.caches import WorkerCache, all_ranks, layer_number, read_cache

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
    sliding_window: int = 24


@dataclass
class ChunkedLocalAttentionSpec:
    block_size: int = TOKENS


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, object]
    block_size: int = TOKENS


@dataclass
class Group:
    kv_cache_spec: object
    layer_names: list[str]


def layer(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def group(spec: object, *layers: int) -> Group:
    return Group(spec, [layer(number) for number in layers])


def tensors(layout: str, num_layers: int = 3) -> dict[str, torch.Tensor]:
    """One allocation for all layers, as vLLM makes it, seen as [blocks, heads, tokens, lanes]."""
    order = (HEADS, TOKENS) if layout == "HND" else (TOKENS, HEADS)
    whole = torch.arange(num_layers * BLOCKS * HEADS * TOKENS * LANES, dtype=torch.float32)
    whole = whole.view(num_layers, BLOCKS, *order, LANES)
    layers = {layer(i): whole[i] for i in reversed(range(num_layers))}
    return layers if layout == "HND" else {k: v.transpose(1, 2) for k, v in layers.items()}


def read_all(caches: dict[str, torch.Tensor], groups: list[Group], **changes: int) -> WorkerCache:
    shape = {"total_kv_heads": HEADS, "tp_rank": 0, "tp_size": 1} | changes
    return read_cache(caches, groups, **shape)


def read(
    caches: dict[str, torch.Tensor], spec: object = FullAttentionSpec(), **changes: int
) -> GroupCache:
    """The only group."""
    found = read_all(caches, [Group(spec, list(caches))], **changes)
    (only,) = found.cache.groups
    return only


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_placement_points_at_each_block(layout: str) -> None:
    caches = tensors(layout)
    cache = read(caches)
    geometry, placement = cache.geometry, cache.placement
    validate_cache(RankCache((cache,)), Limits())
    assert geometry.num_reserved_blocks == 1
    assert geometry.cache_layout is CacheLayout(layout)
    assert geometry.kind is CacheKind.PACKED_KEY_VALUE
    assert geometry.layers == (0, 1, 2)
    assert (geometry.num_blocks, geometry.block_size, geometry.head_dim) == (BLOCKS, TOKENS, LANES)
    assert len(cache.regions) == 1, "layers that share an allocation are registered once"
    assert cache.regions[0].memory is MemoryKind.DRAM
    for row, number in enumerate(geometry.layers):
        tensor = caches[layer(number)]
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
    cache = read(caches, MLAAttentionSpec(), total_kv_heads=16, tp_rank=1, tp_size=4)
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
        ({"spec": ChunkedLocalAttentionSpec()}, "ChunkedLocalAttentionSpec of layer .* not supp"),
        ({"spec": FullAttentionSpec(block_size=24)}, "blocks of 16 tokens, which do not divide"),
        ({"total_kv_heads": 8}, "expected 8 KV heads on rank 0 of 1 in layer .*, found 2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(tensors("HND"), **change)


def test_tensors_of_unknown_shape_are_refused() -> None:
    for shape in ((3, BLOCKS, TOKENS, HEADS, LANES), (2, 2, TOKENS, HEADS, LANES), (BLOCKS, 9)):
        with pytest.raises(ConfigError, match="has shape"):
            read({"model.layers.0.attn": torch.zeros(*shape)})
    with pytest.raises(ConfigError, match="has shape"):
        read({layer(0): torch.zeros(2, BLOCKS, TOKENS, HEADS, LANES)}, MLAAttentionSpec())
    sparse = {"model.layers.0.attn": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * LANES)[..., :LANES]}
    with pytest.raises(ConfigError, match="its blocks are not dense"):
        read(sparse)


@pytest.mark.parametrize("name", ["model.embed", "model.layers.1.experts.2.attn"])
def test_a_layer_without_a_single_number_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no single number"):
        layer_number(name)


# Several groups.


def address(cache: GroupCache, row: int, plane: int, block: int) -> int:
    placement = cache.placement
    return (
        cache.regions[int(placement.region[row, plane])].address
        + int(placement.offset_bytes[row, plane])
        + block * int(placement.block_stride_bytes[row, plane])
    )


def test_groups_lie_over_the_same_memory() -> None:
    """As vLLM has it: the i-th layers of all groups are one tensor."""
    places = tensors("HND", 2)
    caches = {layer(i): places[layer(i // 3)] for i in range(6)}
    groups = [
        group(SlidingWindowSpec(), 0, 3),
        group(SlidingWindowSpec(), 1, 4),
        group(FullAttentionSpec(), 2, 5),
    ]
    found = read_all(caches, groups)
    validate_cache(found.cache, Limits())
    assert [each.layers for each in found.cache.geometries] == [(0, 3), (1, 4), (2, 5)]
    assert [each.window for each in found.cache.geometries] == [24, 24, None]
    assert found.tables == (
        BlockTable(0, TOKENS, 1, 24),
        BlockTable(1, TOKENS, 1, 24),
        BlockTable(2, TOKENS),
    )
    assert len(found.cache.regions) == 1
    for cache in found.cache.groups:
        for row in range(2):
            assert address(cache, row, 0, 3) == places[layer(row)][3].data_ptr()


def test_layers_of_several_shapes_in_one_group_of_vllm_share_its_block_ids() -> None:
    caches = {
        layer(0): torch.zeros(BLOCKS, HEADS, TOKENS, LANES),
        layer(1): torch.zeros(BLOCKS, 4, TOKENS, 24),
        layer(2): torch.zeros(BLOCKS, HEADS, TOKENS, LANES),
    }
    spec = UniformTypeKVCacheSpecs({layer(i): FullAttentionSpec() for i in range(3)})
    found = read_all(caches, [group(spec, 0, 1, 2)])
    validate_cache(found.cache, Limits())
    assert [each.layers for each in found.cache.geometries] == [(0, 2), (1,)]
    assert [each.num_kv_heads for each in found.cache.geometries] == [HEADS, 4]
    assert found.tables == (BlockTable(0, TOKENS), BlockTable(0, TOKENS))
    halves = read_all(caches, [group(spec, 0, 1, 2)], total_kv_heads=2 * HEADS, tp_size=2)
    assert [each.num_kv_heads for each in halves.cache.geometries] == [2 * HEADS, 8]


def test_heads_that_may_be_replicas_of_an_unknown_number_are_refused() -> None:
    caches = {
        layer(0): torch.zeros(BLOCKS, HEADS, TOKENS, LANES),
        layer(1): torch.zeros(BLOCKS, 1, TOKENS, LANES),
    }
    groups = [group(FullAttentionSpec(), 0, 1)]
    with pytest.raises(ConfigError, match=r"expected 2 KV heads .* in layer .*\.1\..*, found 1"):
        read_all(caches, groups, total_kv_heads=2 * HEADS, tp_size=2)


def test_kernel_blocks_are_the_blocks_we_move() -> None:
    found = read_all(tensors("HND"), [group(FullAttentionSpec(block_size=64), 0, 1, 2)])
    (geometry,) = found.cache.geometries
    assert (geometry.block_size, geometry.num_blocks) == (TOKENS, BLOCKS)
    assert geometry.num_reserved_blocks == 4
    assert found.tables == (BlockTable(0, 64, 4),)


@pytest.mark.parametrize("kv_dim", [0, 1])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_k_and_v_may_be_planes_of_their_own(kv_dim: int, layout: str) -> None:
    outer = (2, BLOCKS) if kv_dim == 0 else (BLOCKS, 2)
    inner = (TOKENS, HEADS) if layout == "NHD" else (HEADS, TOKENS)
    tensor = torch.zeros(*outer, *inner, LANES, dtype=torch.bfloat16)
    if layout == "HND":
        tensor = tensor.transpose(2, 3)
    cache = read({layer(0): tensor})
    validate_cache(RankCache((cache,)), Limits())
    assert cache.geometry.kind is CacheKind.KEY_VALUE
    assert cache.geometry.cache_layout is CacheLayout(layout)
    assert (cache.geometry.num_blocks, cache.geometry.block_size) == (BLOCKS, TOKENS)
    for plane in range(2):
        for block in range(BLOCKS):
            at = tensor[plane, block] if kv_dim == 0 else tensor[block, plane]
            assert address(cache, 0, plane, block) == at.data_ptr()


def test_a_layer_that_uses_another_s_kv_has_nothing_to_move() -> None:
    caches = tensors("HND", 2)
    caches[layer(2)] = caches[layer(1)]
    for groups in ([group(FullAttentionSpec(), 0, 1, 2)], [group(FullAttentionSpec(), 0, 1)]):
        assert read_all(caches, groups).cache.geometries[0].layers == (0, 1)


def test_caches_that_are_in_no_group_or_twice_in_a_layer_are_refused() -> None:
    caches = tensors("HND", 2)
    with pytest.raises(ConfigError, match=r"layer model\.layers\.1\..* is in none of"):
        read_all(caches, [group(FullAttentionSpec(), 0)])
    with pytest.raises(ConfigError, match=r"layer model\.layers\.2\..* has no tensor"):
        read_all(caches, [group(FullAttentionSpec(), 0, 1, 2)])
    twins = {"model.layers.0.attn": caches[layer(0)], "model.layers.0.index": caches[layer(1)]}
    with pytest.raises(ConfigError, match=r"layer 0 has several caches, model\.layers\.0\.attn"):
        read_all(twins, [Group(FullAttentionSpec(), list(twins))])
