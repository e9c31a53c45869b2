"""The worked example of docs/mapping.md, what merges, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout import (
    BlockRun,
    CacheLayout,
    MemoryKind,
    Route,
    TokenSpan,
    bind,
    instance_geometries,
    plan_mapping,
    route,
    routes_to,
)
from layout_builders import (
    PlacementStyle,
    copy_pieces,
    make_cache,
    model_cache,
    one_group,
    plane_cells,
)


def run(*block_ids, first_token=0):
    return BlockRun(np.array(block_ids, np.int64), first_token)


def rows(table, *bases):
    """(offset from the base that a piece lies behind, length) of each row."""
    found = []
    for address, length, _ in table.tolist():
        base = max(base for base in bases if base <= address)
        found.append((address - base, length))
    return found


def worked_example(cache_layout, num_layers=1):
    """P has 4 ranks and blocks of 16, D has 2 ranks and blocks of 32; 4 heads of 128 bfloat16."""
    model = model_cache(
        num_layers=num_layers,
        head_dim=128,
        dtype="bfloat16",
        num_blocks=10,
        cache_layout=cache_layout,
    )
    prefill = instance_geometries(model, tp_size=4)
    decode = instance_geometries(replace(model, block_size=32), tp_size=2)
    return prefill, decode


def pair(source_geometry, target_geometry, style=PlacementStyle.STACKED):
    """A plan for the one route between two single-rank instances, and both caches."""
    rank = Rank(0, 0)
    (only,) = route({rank: (source_geometry,)}, {rank: (target_geometry,)})
    plan = plan_mapping(source_geometry, target_geometry, only)
    return plan, make_cache(source_geometry, style), make_cache(target_geometry, style)


def single(style=PlacementStyle.STACKED, target_changes=None, **changes):
    """The same, for instances of `model_cache` with these changes."""
    source = instance_geometries(model_cache(**changes), 1)[Rank(0, 0)]
    return pair(source, replace(source, **(target_changes or {})), style)


def test_worked_example_routes():
    prefill, decode = worked_example(CacheLayout.HND)
    assert routes_to(route(one_group(prefill), one_group(decode)), Rank(0, 0)) == (
        Route(Rank(0, 0), Rank(0, 0), (0,), 0, 1, 0, 0, 16, None),
        Route(Rank(0, 1), Rank(0, 0), (0,), 1, 2, 0, 0, 16, None),
    )


def test_worked_example_plan():
    prefill, decode = worked_example(CacheLayout.HND)
    second = Route(Rank(0, 1), Rank(0, 0), (0,), 1, 2, 0, 0, 16, None)
    plan = plan_mapping(prefill[second.source], decode[second.target], second)
    assert plan.unit_tokens == 16
    assert plan.source.block_bytes == 4096 and plan.target.block_bytes == 16384
    assert plan.source_offsets.tolist() == [0]
    assert plan.target_offsets.tolist() == [8192]
    assert plan.lengths.tolist() == [4096]
    assert (plan.source_unit_stride_bytes, plan.target_unit_stride_bytes) == (4096, 4096)
    assert plan.bytes_per_unit == 2 * 4096


def test_worked_example_plan_without_head_order():
    prefill, decode = worked_example(CacheLayout.NHD)
    second = Route(Rank(0, 1), Rank(0, 0), (0,), 1, 2, 0, 0, 16, None)
    plan = plan_mapping(prefill[second.source], decode[second.target], second)
    assert plan.source_offsets.tolist() == [256 * token for token in range(16)]
    assert plan.target_offsets.tolist() == [512 * token + 256 for token in range(16)]
    assert plan.lengths.tolist() == [256] * 16
    assert (plan.source_unit_stride_bytes, plan.target_unit_stride_bytes) == (4096, 8192)


@pytest.mark.parametrize(
    ("prefill_blocks", "decode_blocks", "start", "source_rows", "target_rows"),
    [
        pytest.param(
            run(7, 3, 9),
            run(2, 5, 6),
            0,
            [(28672, 4096), (12288, 4096), (36864, 4096)],
            [(40960, 4096), (45056, 4096), (90112, 4096)],
            id="scattered",
        ),
        pytest.param(
            run(7, 8, 9),
            run(2, 5, 6),
            0,
            [(28672, 8192), (36864, 4096)],
            [(40960, 8192), (90112, 4096)],
            id="consecutive on both sides within D's block",
        ),
        pytest.param(
            run(7, 3, 9),
            run(5, first_token=32),
            32,
            [(36864, 4096)],
            [(90112, 4096)],
            id="D has the first 32 tokens",
        ),
    ],
)
def test_worked_example_pieces(prefill_blocks, decode_blocks, start, source_rows, target_rows):
    prefill, decode = worked_example(CacheLayout.HND)
    second = Route(Rank(0, 1), Rank(0, 0), (0,), 1, 2, 0, 0, 16, None)
    source, _source_memory = make_cache(prefill[second.source], rank=second.source)
    target, _target_memory = make_cache(decode[second.target], rank=second.target)
    plan = plan_mapping(source.geometry, target.geometry, second)
    pieces = bind(plan, source, target, prefill_blocks, decode_blocks, TokenSpan(start, 40))
    bases = [
        [region.address + int(cache.placement.offset_bytes[0, 0]) for region in cache.regions]
        for cache in (source, target)
    ]
    assert rows(pieces.source_table, *bases[0]) == source_rows * 2
    assert rows(pieces.target_table, *bases[1]) == target_rows * 2
    assert pieces.num_bytes == sum(length for _, length in source_rows) * 2
    assert pieces.source_memory is pieces.target_memory is MemoryKind.DRAM
    assert (pieces.source_table[:, 2] == 0).all()


@pytest.mark.parametrize(
    ("style", "num_pieces"),
    [
        (PlacementStyle.SEPARATE, 4),
        (PlacementStyle.STACKED, 4),
        (PlacementStyle.ONE_REGION, 4),
        (PlacementStyle.INTERLEAVED, 2),
        (PlacementStyle.CROSS_LAYER, 1),
        (PlacementStyle.MIXED, 3),
    ],
)
def test_consecutive_blocks_become_as_few_pieces_as_their_placement_allows(style, num_pieces):
    plan, (source, _memory), (target, _other) = single(style)
    pieces = bind(plan, source, target, run(1, 2, 3), run(4, 5, 6), TokenSpan(0, 48))
    assert len(pieces) == num_pieces
    assert pieces.num_bytes == 3 * 2 * 2 * plan.source.block_bytes


def test_pieces_are_not_merged_where_only_one_side_is_consecutive():
    plan, (source, _memory), (target, _other) = single()
    pieces = bind(plan, source, target, run(1, 2, 3), run(6, 5, 4), TokenSpan(0, 48))
    assert len(pieces) == 3 * 2 * 2


def test_planes_are_not_merged_where_they_part_in_later_blocks():
    """Two planes that adjoin in block 0 only: one steps by three blocks, the other by four."""
    plan, (source, _memory), (target, _other) = single(num_layers=1, num_blocks=2)
    block = plan.source.block_bytes

    def skewed(cache):
        placement = replace(
            cache.placement,
            offset_bytes=np.array([[0, block]], np.int64),
            block_stride_bytes=np.array([[3 * block, 4 * block]], np.int64),
        )
        return replace(cache, placement=placement)

    source, target = skewed(source), skewed(target)
    assert len(bind(plan, source, target, run(0, 1), run(0, 1), TokenSpan(0, 32))) == 4


@pytest.mark.parametrize("split_side", ["source", "target"])
def test_adjoining_regions_are_not_merged(split_side):
    """K and V adjoin on both sides, but on one of them they are two registrations."""
    plan, (source, _memory), (target, _other) = single(PlacementStyle.INTERLEAVED, num_layers=1)
    caches = {"source": source, "target": target}
    rest = (run(0), run(0), TokenSpan(0, 16))
    assert len(bind(plan, source, target, *rest)) == 1
    whole = caches[split_side]
    placement = replace(whole.placement, region=np.array([[0, 1]], np.int64))
    caches[split_side] = replace(whole, placement=placement, regions=whole.regions * 2)
    assert len(bind(plan, caches["source"], caches["target"], *rest)) == 2


def test_a_partial_prefix_hit_moves_exactly_the_tail():
    plan, source, target = single(num_layers=1)
    cells = plane_cells(*source, 0, 0)
    cells[:] = 1
    pieces = bind(
        plan, source[0], target[0], run(0, 1, 2, 3), run(7, first_token=48), TokenSpan(48, 64)
    )
    copy_pieces(pieces, source, target)
    arrived = plane_cells(*target, 0, 0)
    assert (arrived[7] == 1).all()
    assert (arrived[:7] != 1).all()


def test_a_ragged_last_unit_moves_as_a_whole():
    plan, (source, _memory), (target, _other) = single()
    whole = bind(plan, source, target, run(0, 2), run(0, 2), TokenSpan(0, 32))
    ragged = bind(plan, source, target, run(0, 2), run(0, 2), TokenSpan(0, 17))
    assert np.array_equal(whole.source_table, ragged.source_table)
    assert np.array_equal(whole.target_table, ragged.target_table)


def test_layers_move_one_by_one_or_all_at_once():
    plan, (source, _memory), (target, _other) = single(num_layers=3)
    rest = (source, target, run(0, 2), run(1, 3), TokenSpan(0, 32))
    parts = [bind(plan, *rest, layers=layers) for layers in ([1], [2, 0])]
    joined = np.concatenate([part.source_table for part in parts])
    assert sorted(joined.tolist()) == sorted(bind(plan, *rest).source_table.tolist())


def test_ids_may_be_of_any_integer_type():
    """A product of an int32 id and a stride would wrap."""
    plan, (source, _memory), (target, _other) = single()
    narrow = BlockRun(np.array([3], np.int32), 0)  # type: ignore[arg-type]
    pieces = bind(plan, source, target, narrow, run(3), TokenSpan(0, 16))
    assert pieces.source_table.dtype == np.int64


@pytest.mark.parametrize(
    ("source_blocks", "target_blocks", "span", "message"),
    [
        (run(0), run(0), (0, 0), "span: expected 0 <= start < stop, found 0 to 0"),
        (run(0), run(0), (16, 8), "found 16 to 8"),
        (run(0), run(0), (-16, 8), "found -16 to 8"),
        (run(0, 1), run(0, 1), (8, 32), "a multiple of 16 tokens, found 8"),
        (run(0), run(0, 1), (0, 17), "source blocks: .* 1 blocks of 16 tokens hold 0 to 16"),
        (run(0, 1), run(0), (0, 17), "target blocks: positions 0 to 32 are wanted"),
        (run(), run(0), (0, 1), "source blocks: .* 0 blocks of 16 tokens hold 0 to 0"),
        (run(0, 1), run(0, first_token=16), (0, 17), "target blocks: .* hold 16 to 32"),
        (run(0, first_token=8), run(0), (0, 16), "source blocks: .* block size 16, found 8"),
        (run(0), run(0, first_token=-16), (0, 16), "target blocks: .* found -16"),
        (run(8), run(0), (0, 16), "source blocks: expected ids from 0 to 7 .* found 8"),
        (run(0, 1), run(0, -1), (0, 32), "target blocks: expected ids from 0 to 7 .* found -1"),
        (run(0, 1, 2), run(3, 4, 3), (0, 48), "target blocks: block 3 is there more than once"),
    ],
)
def test_blocks_that_cannot_be_paired_are_refused(source_blocks, target_blocks, span, message):
    plan, (source, _memory), (target, _other) = single()
    with pytest.raises(MappingError, match=message):
        bind(plan, source, target, source_blocks, target_blocks, TokenSpan(*span))


def test_a_span_has_as_many_tokens_as_positions_and_never_fewer_than_none():
    assert len(TokenSpan(3, 10)) == 7
    assert len(TokenSpan(10, 3)) == 0


def test_ids_outside_the_span_do_not_matter():
    plan, (source, _memory), (target, _other) = single()
    pieces = bind(plan, source, target, run(99, 1, 99), run(-5, 2, 2), TokenSpan(16, 32))
    assert pieces.num_bytes == plan.bytes_per_unit


def test_a_small_target_block_twice_is_found_in_a_large_source_block():
    plan, (source, _memory), (target, _other) = single(target_changes={"block_size": 8})
    with pytest.raises(MappingError, match="block 4 is there more than once"):
        bind(plan, source, target, run(0), run(4, 4), TokenSpan(0, 16))


@pytest.mark.parametrize("layers", [[], [0, 7]])
def test_layers_that_are_not_planned_are_refused(layers):
    plan, (source, _memory), (target, _other) = single()
    with pytest.raises(MappingError, match=r"layers: expected some of \(0, 1\), found"):
        bind(plan, source, target, run(0), run(0), TokenSpan(0, 16), layers=layers)


def test_a_plan_for_other_caches_is_refused():
    plan, (source, _memory), (target, _other) = single()
    other = replace(target, geometry=replace(target.geometry, num_blocks=9))
    with pytest.raises(MappingError, match="plan: made for other geometries"):
        bind(plan, source, other, run(0), run(0), TokenSpan(0, 16))


@pytest.mark.parametrize("change", [{"device_id": 1}, {"memory": MemoryKind.VRAM}])
@pytest.mark.parametrize("side", ["source", "target"])
def test_regions_of_one_side_must_be_of_one_kind_and_device(change, side):
    plan, (source, _memory), (target, _other) = single()
    caches = {"source": source, "target": target}
    first, *others = caches[side].regions
    caches[side] = replace(caches[side], regions=(replace(first, **change), *others))
    rest = (run(0), run(0), TokenSpan(0, 16))
    with pytest.raises(MappingError, match=f"{side} regions of rank pp0tp0: expected one kind"):
        bind(plan, caches["source"], caches["target"], *rest)
    assert len(bind(plan, caches["source"], caches["target"], *rest, layers=[1])) == 2


def test_a_route_that_a_rank_cannot_serve_is_refused():
    geometries = instance_geometries(model_cache(), 2)
    first, second = geometries[Rank(0, 0)], geometries[Rank(0, 1)]
    with pytest.raises(MappingError, match=r"heads: .* moves 0 to 2, target holds 2 to 4"):
        plan_mapping(first, second, Route(Rank(0, 0), Rank(0, 1), (0,), 0, 2, 0, 0, 16, None))
    with pytest.raises(MappingError, match=r"layer 5: .* moves it, source holds \(0, 1\)"):
        plan_mapping(first, first, Route(Rank(0, 0), Rank(0, 0), (0, 5), 0, 2, 0, 0, 16, None))


def test_a_plan_cannot_be_changed():
    plan, _, _ = single()
    with pytest.raises(ValueError, match="read-only"):
        plan.lengths[0] = 1
