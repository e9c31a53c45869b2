"""Every byte of every mapping, against a plain gather, over real memory (style.md section 6.2)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout import (
    BlockRun,
    BoundPieces,
    CacheGeometry,
    CacheKind,
    CacheLayout,
    GroupCache,
    ModelCache,
    TokenSpan,
    bind,
    plan_mapping,
    route,
    shard_geometry,
)
from layout_builders import (
    Buffer,
    PlacementStyle,
    copy_pieces,
    make_instance,
    model_cache,
    one_group,
    plane_cells,
)

Instance = Mapping[Rank, tuple[GroupCache, list[Buffer]]]
check = settings(max_examples=120, derandomize=True, deadline=None, database=None)

BLOCK_SIZES = (1, 2, 3, 4, 8, 16, 32, 48)
MAX_TOKENS = 100


@dataclass(frozen=True)
class Side:
    """One instance, and where a request lies in it. All ranks use the same block ids."""

    geometries: Mapping[Rank, CacheGeometry]
    style: PlacementStyle
    blocks: BlockRun

    @property
    def geometry(self) -> CacheGeometry:
        return next(iter(self.geometries.values()))

    def slot(self, token: int) -> tuple[int, int]:
        """Block id, and slot in it, of an absolute position: the pairing, told plainly."""
        size = self.geometry.block_size
        block, slot = divmod(token - self.blocks.first_token, size)
        return int(self.blocks.block_ids[block]), slot

    @property
    def tokens(self) -> range:
        size = self.geometry.block_size
        first = self.blocks.first_token
        return range(first, first + len(self.blocks.block_ids) * size)


@dataclass(frozen=True)
class Scenario:
    """A request that moves from one instance to another."""

    source: Side
    target: Side
    span: TokenSpan

    @property
    def moved(self) -> range:
        """Positions of the whole units that cover the span."""
        unit = math.gcd(self.source.geometry.block_size, self.target.geometry.block_size)
        return range(self.span.start, -(-self.span.stop // unit) * unit)

    @property
    def values(self) -> npt.NDArray[np.int64]:
        """[layer, plane, token, head, lane]: every lane of every position has its own value."""
        geometry = self.source.geometry
        num_layers = 1 + max(max(each.layers) for each in self.source.geometries.values())
        shape = (
            num_layers,
            geometry.kind.num_planes,
            max(self.source.tokens.stop, self.target.tokens.stop),
            geometry.num_kv_heads,
            geometry.head_dim,
        )
        return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    latent = draw(st.booleans()) and draw(st.booleans())
    model = model_cache(
        kind=CacheKind.LATENT if latent else CacheKind.KEY_VALUE,
        num_layers=draw(st.integers(1, 4)),
        num_kv_heads=1 if latent else draw(st.integers(1, 8)),
        head_dim=draw(st.integers(1, 2)),
        dtype="int64",
        itemsize=8,
    )
    source_size = draw(st.sampled_from(BLOCK_SIZES))
    target_size = draw(st.sampled_from(BLOCK_SIZES))
    unit = math.gcd(source_size, target_size)
    start = unit * draw(st.integers(0, MAX_TOKENS // 2 // unit))
    span = TokenSpan(start, draw(st.integers(start + 1, start + MAX_TOKENS // 2)))
    return Scenario(
        draw(sides(model, source_size, span)), draw(sides(model, target_size, span)), span
    )


@st.composite
def sides(draw: st.DrawFn, model: ModelCache, block_size: int, span: TokenSpan) -> Side:
    first_block = draw(st.integers(0, span.start // block_size))
    needed = -(-span.stop // block_size) - first_block
    num_held = needed + draw(st.integers(0, 2))
    num_blocks = num_held + draw(st.integers(0, 3))
    first_id = draw(st.integers(0, num_blocks - num_held))
    ids = draw(
        st.permutations(range(num_blocks)) | st.just(list(range(first_id, first_id + num_held)))
    )
    sharded = replace(
        model,
        block_size=block_size,
        num_blocks=num_blocks,
        cache_layout=draw(st.sampled_from(CacheLayout)),
    )
    heads = model.num_kv_heads
    tp_size = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0 or n % heads == 0]))
    num_cuts = draw(st.integers(0, min(2, model.num_layers - 1)))
    cuts = draw(st.permutations(range(1, model.num_layers)))[:num_cuts]
    edges = [0, *sorted(cuts), model.num_layers]
    geometries = {
        Rank(stage, tp_rank): shard_geometry(
            sharded, tp_size, tp_rank, range(edges[stage], edges[stage + 1])
        )
        for stage in range(num_cuts + 1)
        for tp_rank in range(tp_size)
    }
    run = BlockRun(np.array(ids[:num_held], np.int64), first_block * block_size)
    return Side(geometries, draw(st.sampled_from(PlacementStyle)), run)


def write(side: Side, instance: Instance, values: npt.NDArray[np.int64], tokens: range) -> None:
    """The oracle: put each value where its position belongs, one token at a time."""
    for cache, buffers in instance.values():
        geometry = cache.geometry
        for row, layer in enumerate(geometry.layers):
            for plane in range(geometry.kind.num_planes):
                cells = plane_cells(cache, buffers, row, plane).view(np.int64)
                for token in tokens:
                    held = values[layer, plane, token, geometry.head_start : geometry.head_stop]
                    cells[side.slot(token)] = held


def bound_routes(
    source: Side, from_instance: Instance, target: Side, to_instance: Instance, span: TokenSpan
) -> list[tuple[Rank, Rank, BoundPieces]]:
    found = []
    for each in route(one_group(source.geometries), one_group(target.geometries)):
        from_cache, to_cache = from_instance[each.source][0], to_instance[each.target][0]
        plan = plan_mapping(from_cache.geometry, to_cache.geometry, each)
        pieces = bind(plan, from_cache, to_cache, source.blocks, target.blocks, span)
        found.append((each.source, each.target, pieces))
    return found


def move(source: Side, from_instance: Instance, target: Side, span: TokenSpan) -> Instance:
    """Move a request into a fresh instance; no byte of it may be written twice."""
    to_instance = make_instance(target.geometries, target.style)
    num_writes = {
        rank: [np.zeros(buffer.nbytes, np.int64) for buffer in buffers]
        for rank, (_, buffers) in to_instance.items()
    }
    for from_rank, to_rank, pieces in bound_routes(
        source, from_instance, target, to_instance, span
    ):
        writes = copy_pieces(pieces, from_instance[from_rank], to_instance[to_rank])
        assert pieces.num_bytes == sum(int(counts.sum()) for counts in writes)
        for total, counts in zip(num_writes[to_rank], writes, strict=True):
            total += counts
    assert all(counts.max() <= 1 for each in num_writes.values() for counts in each)
    return to_instance


def expected(side: Side, values: npt.NDArray[np.int64], tokens: range) -> Instance:
    instance = make_instance(side.geometries, side.style)
    write(side, instance, values, tokens)
    return instance


def assert_same_memory(found: Instance, wanted: Instance) -> None:
    """Bit for bit, canaries and guards included."""
    for rank, (_, buffers) in wanted.items():
        for mine, theirs in zip(buffers, found[rank][1], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@check
@given(scenarios())
def test_every_byte_arrives_and_no_other_changes(scenario: Scenario) -> None:
    values = scenario.values
    filled = expected(scenario.source, values, scenario.source.tokens)
    arrived = move(scenario.source, filled, scenario.target, scenario.span)
    assert_same_memory(arrived, expected(scenario.target, values, scenario.moved))
    assert_same_memory(filled, expected(scenario.source, values, scenario.source.tokens))


@check
@given(scenarios())
def test_there_and_back_is_the_identity(scenario: Scenario) -> None:
    values = scenario.values
    filled = expected(scenario.source, values, scenario.source.tokens)
    there = move(scenario.source, filled, scenario.target, scenario.span)
    back = move(scenario.target, there, scenario.source, scenario.span)
    assert_same_memory(back, expected(scenario.source, values, scenario.moved))


def cell_pairs(pieces: BoundPieces, cell_bytes: int) -> list[tuple[int, int]]:
    """Cut every piece into cells: (source address, target address), sorted by target."""
    pairs = []
    for (source, length, _), (target, _, _) in zip(
        pieces.source_table.tolist(), pieces.target_table.tolist(), strict=True
    ):
        assert length % cell_bytes == 0
        pairs += [(source + at, target + at) for at in range(0, length, cell_bytes)]
    return sorted(pairs, key=lambda pair: pair[1])


@check
@given(scenarios())
def test_merging_changes_no_bytes(scenario: Scenario) -> None:
    """The merged pieces of a request are the pieces of its units and layers, one by one."""
    source, target = scenario.source, scenario.target
    from_instance = make_instance(source.geometries, source.style)
    to_instance = make_instance(target.geometries, target.style)
    for each in route(one_group(source.geometries), one_group(target.geometries)):
        from_cache, to_cache = from_instance[each.source][0], to_instance[each.target][0]
        plan = plan_mapping(from_cache.geometry, to_cache.geometry, each)

        def bound(
            span: TokenSpan,
            layers: Sequence[int] | None = None,
            rest: tuple[object, ...] = (plan, from_cache, to_cache),
        ) -> BoundPieces:
            return bind(*rest, source.blocks, target.blocks, span, layers)  # type: ignore[arg-type]

        merged = bound(scenario.span)
        single = [
            bound(TokenSpan(start, start + 1), [layer])
            for layer in each.layers
            for start in scenario.moved[:: plan.unit_tokens]
        ]
        cell = plan.source.cell_bytes
        separate = [at for pieces in single for at in cell_pairs(pieces, cell)]
        assert cell_pairs(merged, cell) == sorted(separate, key=lambda pair: pair[1])
        assert len(merged) <= sum(len(pieces) for pieces in single)
        assert merged.num_bytes == len(single) // len(each.layers) * plan.bytes_per_unit


@check
@given(scenarios())
def test_planned_pieces_are_maximal(scenario: Scenario) -> None:
    source, target = scenario.source.geometries, scenario.target.geometries
    for each in route(one_group(source), one_group(target)):
        plan = plan_mapping(source[each.source], target[each.target], each)
        starts = set(zip(plan.source_offsets.tolist(), plan.target_offsets.tolist(), strict=True))
        stops = zip(
            (plan.source_offsets + plan.lengths).tolist(),
            (plan.target_offsets + plan.lengths).tolist(),
            strict=True,
        )
        assert starts.isdisjoint(stops)


@check
@given(scenarios(), st.data())
def test_caches_of_different_models_are_refused(scenario: Scenario, data: st.DataObject) -> None:
    changes = {
        "kind": CacheKind.LATENT
        if scenario.source.geometry.kind is CacheKind.KEY_VALUE
        else CacheKind.KEY_VALUE,
        "num_kv_heads": 9,
        "head_dim": 3,
        "dtype": "float64",
        "itemsize": 4,
    }
    name = data.draw(st.sampled_from(sorted(changes)))
    sources, targets = scenario.source.geometries, scenario.target.geometries
    routes = route(one_group(sources), one_group(targets))
    other = {rank: replace(each, **{name: changes[name]}) for rank, each in targets.items()}
    was, now = str(getattr(scenario.source.geometry, name)), str(changes[name])
    with pytest.raises(MappingError, match=rf"{name}: source has {was}, target has {now}"):
        route(one_group(sources), one_group(other))
    with pytest.raises(MappingError, match=rf"{name}: source has {was}, target has {now}"):
        plan_mapping(sources[routes[0].source], other[routes[0].target], routes[0])
