"""Both halves of a packed transfer, against what `bind` moves, over real memory."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_content import write_prompt, wrong_cells
from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout import (
    BlockRun,
    BoundPieces,
    CacheLayout,
    GroupCache,
    MemoryKind,
    PackedSide,
    Parcel,
    Region,
    TokenSpan,
    bind,
    instance_geometries,
    pack_source,
    pack_target,
    parcels,
    plan_mapping,
    route,
)
from layout.test_mapping_properties import (
    Scenario,
    assert_same_memory,
    expected,
    scenarios,
)
from layout_builders import Buffer, copy_pieces, make_cache, make_instance, model_cache, one_group

check = settings(max_examples=80, derandomize=True, deadline=None, database=None)

Memory = tuple[GroupCache, Sequence[Buffer]]


def table(addresses: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    return np.stack((addresses, np.full_like(addresses, length), np.zeros_like(addresses)), axis=1)


def through_slots(
    cut: Sequence[Parcel],
    from_side: PackedSide,
    source: Memory,
    to_side: PackedSide,
    target: Memory,
) -> None:
    """Gather and scatter each parcel through a slot of its own, piece by piece."""
    length = from_side.piece_bytes
    for parcel in cut:
        count = parcel.stop - parcel.start
        slot = np.zeros(count * length, np.uint8)
        region = Region(slot.ctypes.data, slot.nbytes, MemoryKind.DRAM, 0)
        staging = (replace(source[0], regions=(region,)), [slot])
        in_slot = table(region.address + length * np.arange(count, dtype=np.int64), length)
        gathered = table(from_side.addresses(parcel.start, parcel.stop), length)
        scattered = table(to_side.addresses(parcel.start, parcel.stop), length)
        dram = MemoryKind.DRAM
        copy_pieces(BoundPieces(gathered, in_slot, dram, dram), source, staging)
        copy_pieces(BoundPieces(in_slot, scattered, dram, dram), staging, target)


@check
@given(scenarios(), st.data())
def test_both_halves_move_what_bind_moves(scenario: Scenario, data: st.DataObject) -> None:
    source, target, span = scenario.source, scenario.target, scenario.span
    filled = expected(source, scenario.values, source.tokens)
    bound, packed = (make_instance(target.geometries, target.style) for _ in range(2))
    for each in route(one_group(source.geometries), one_group(target.geometries)):
        from_cache, to_cache = filled[each.source][0], packed[each.target][0]
        plan = plan_mapping(from_cache.geometry, to_cache.geometry, each)
        layers = data.draw(st.none() | st.sets(st.sampled_from(each.layers), min_size=1))
        chosen = None if layers is None else sorted(layers)

        there = bound[each.target]
        pieces = bind(plan, from_cache, there[0], source.blocks, target.blocks, span, chosen)
        copy_pieces(pieces, filled[each.source], there)

        from_side = pack_source(plan, from_cache, source.blocks, span, chosen)
        to_side = pack_target(plan, to_cache, target.blocks, span, chosen)
        assert from_side.shape == to_side.shape
        assert from_side.piece_bytes == to_side.piece_bytes
        assert from_side.num_bytes == to_side.num_bytes == pieces.num_bytes
        slot_bytes = data.draw(st.integers(1, 64)) * from_side.piece_bytes
        cut = parcels([(from_side.num_pieces, from_side.piece_bytes)], slot_bytes)
        through_slots(cut, from_side, filled[each.source], to_side, packed[each.target])
    assert_same_memory(packed, bound)


@check
@given(scenarios(), st.data())
def test_addresses_are_a_window_of_all_of_them(scenario: Scenario, data: st.DataObject) -> None:
    source, target = scenario.source, scenario.target
    each = data.draw(
        st.sampled_from(route(one_group(source.geometries), one_group(target.geometries)))
    )
    cache, _ = make_instance(source.geometries, source.style)[each.source]
    plan = plan_mapping(cache.geometry, target.geometries[each.target], each)
    side = pack_source(plan, cache, source.blocks, scenario.span)
    plainly = [
        address + block * stride + inner * side.unit_stride_bytes + offset
        for address, stride in zip(side.row_address, side.row_block_stride_bytes, strict=True)
        for block, inner in zip(side.block_of_unit, side.unit_in_block, strict=True)
        for offset in side.piece_offset_bytes
    ]
    assert len(plainly) == math.prod(side.shape) == side.num_pieces
    start = data.draw(st.integers(0, side.num_pieces))
    stop = data.draw(st.integers(start, side.num_pieces))
    found = side.addresses(start, stop)
    assert found.dtype == np.int64
    assert found.tolist() == plainly[start:stop]


@check
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=5), st.integers(9, 100))
def test_parcels_partition_the_pieces(segments: list[tuple[int, int]], slot_bytes: int) -> None:
    cut = parcels(segments, slot_bytes)
    found = [(each.segment, piece) for each in cut for piece in range(each.start, each.stop)]
    assert found == [
        (at, piece) for at, (count, _) in enumerate(segments) for piece in range(count)
    ]
    for each, after in zip(cut, (*cut, None)[1:], strict=True):
        num_pieces, piece_bytes = segments[each.segment]
        assert each.start < each.stop
        assert (each.stop - each.start) * piece_bytes <= slot_bytes
        # Full, unless it is the segment's last.
        assert each.stop == num_pieces or (each.stop - each.start + 1) * piece_bytes > slot_bytes
        assert (each.stop == num_pieces) == (after is None or after.segment != each.segment)


def test_a_piece_longer_than_a_slot_is_refused() -> None:
    with pytest.raises(MappingError, match=r"segment 1: .*slot of 100 bytes.*101 bytes; make"):
        parcels([(5, 100), (5, 101)], 100)


def test_a_prompt_arrives_from_two_ranks_in_one() -> None:
    model = model_cache(num_blocks=6, cache_layout=CacheLayout.NHD)
    prefill = make_instance(instance_geometries(model, tp_size=2))
    decode_model = replace(model, block_size=32, cache_layout=CacheLayout.HND)
    decode = make_instance(instance_geometries(decode_model, tp_size=1))
    span = TokenSpan(0, 50)
    write_prompt(prefill, "a", [4, 1, 3, 0], span)
    for each in route(
        {rank: (cache.geometry,) for rank, (cache, _) in prefill.items()},
        {rank: (cache.geometry,) for rank, (cache, _) in decode.items()},
    ):
        source, target = prefill[each.source], decode[each.target]
        plan = plan_mapping(source[0].geometry, target[0].geometry, each)
        from_side = pack_source(plan, source[0], run(4, 1, 3, 0), span)
        to_side = pack_target(plan, target[0], run(5, 2), span)
        cut = parcels([(from_side.num_pieces, from_side.piece_bytes)], 100)
        through_slots(cut, from_side, source, to_side, target)
    assert wrong_cells(decode, "a", [5, 2], span) == []


# What is refused, in the words of `bind`.


def run(*block_ids: int) -> BlockRun:
    return BlockRun(np.array(block_ids, np.int64), 0)


def lone_pair():
    geometry = instance_geometries(model_cache(), 1)[Rank(0, 0)]
    (only,) = route({Rank(0, 0): (geometry,)}, {Rank(0, 0): (geometry,)})
    return plan_mapping(geometry, geometry, only), make_cache(geometry)[0]


@pytest.mark.parametrize("pack", [pack_source, pack_target])
@pytest.mark.parametrize(
    ("blocks", "span", "layers", "message"),
    [
        (run(1, 2), TokenSpan(0, 0), None, "span: expected 0 <= start < stop"),
        (run(1, 2), TokenSpan(8, 20), None, "span: expected a start that is a multiple of 16"),
        (run(1), TokenSpan(0, 17), None, "blocks: positions 0 to 32 are wanted"),
        (run(1, 8), TokenSpan(0, 17), None, "blocks: expected ids from 0 to 7"),
        (run(1, 2), TokenSpan(0, 17), [2], r"layers: expected some of \(0, 1\), found \[2\]"),
        (run(1, 2), TokenSpan(0, 17), [], "layers: expected some of .*found none"),
    ],
)
def test_what_does_not_fit_is_refused(pack, blocks, span, layers, message) -> None:
    plan, cache = lone_pair()
    with pytest.raises(MappingError, match=message):
        pack(plan, cache, blocks, span, layers)


@pytest.mark.parametrize("pack", [pack_source, pack_target])
def test_another_cache_than_the_planned_is_refused(pack) -> None:
    plan, cache = lone_pair()
    other = replace(cache, geometry=replace(cache.geometry, num_blocks=7))
    with pytest.raises(MappingError, match="plan: made for another geometry"):
        pack(plan, other, run(1), TokenSpan(0, 16))


@pytest.mark.parametrize("pack", [pack_source, pack_target])
def test_regions_of_two_devices_are_refused(pack) -> None:
    plan, cache = lone_pair()
    first, *rest = cache.regions
    split = replace(cache, regions=(replace(first, device_id=1), *rest))
    with pytest.raises(MappingError, match="expected one kind of memory on one device"):
        pack(plan, split, run(1), TokenSpan(0, 16))


def test_only_the_target_must_have_distinct_blocks() -> None:
    plan, cache = lone_pair()
    assert pack_source(plan, cache, run(3, 3), TokenSpan(0, 32)).block_of_unit.tolist() == [3, 3]
    with pytest.raises(MappingError, match="target blocks: block 3 is there more than once"):
        pack_target(plan, cache, run(3, 3), TokenSpan(0, 32))
