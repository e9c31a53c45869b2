"""Digests of both sides, over real memory: equal after a right transfer, and after no other."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kv_content import write_prompt
from kvcourier.config import Integrity
from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout import (
    BlockRun,
    CacheKind,
    CacheLayout,
    Cells,
    GroupCache,
    Route,
    Share,
    TokenSpan,
    added,
    cells_of,
    digest_of,
    instance_geometries,
    parcels,
    route,
)
from kvcourier.layout.digests import GROUP_TOKENS, GROUPS_PER_CLASS, MOST_CLASSES
from kvcourier.transport.copying.host_digests import HostDigester
from layout.test_mapping_properties import Instance, Scenario, Side, expected, scenarios
from layout_builders import (
    Buffer,
    PlacementStyle,
    make_cache,
    model_cache,
    one_group,
    plane_cells,
)

check = settings(max_examples=60, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, (1 << 60) - 1)
WORD = (1 << 64) - 1


def total(cache: GroupCache, cells: tuple[Cells, ...], part_bytes: int = 1 << 20) -> int:
    digester = HostDigester(cache.regions)
    loaded = digester.load(cells)
    sizes = [(each.side.num_pieces, each.side.piece_bytes) for each in cells]
    values = [digester.start(loaded, part).value() for part in parcels(sizes, part_bytes)]
    return added([value for value in values if value is not None])


def share_of(each: Route, span: TokenSpan) -> Share:
    return Share(each.layers, each.head_start, each.head_stop, each.needed(span))


def digests(
    side: Side,
    instance: Instance,
    routes: tuple[Route, ...],
    end: str,
    span: TokenSpan,
    integrity: Integrity,
    seed: int,
) -> list[int]:
    """One for each route, as its source, or its target, takes it."""
    found = []
    for each in routes:
        cache = instance[getattr(each, end)][0]
        cells = cells_of(cache, side.blocks, share_of(each, span), integrity, seed)
        found.append(total(cache, cells))
    return found


class Moved:
    """A scenario after a right transfer, and what its digests are now."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        source, target = scenario.source, scenario.target
        self.routes = route(one_group(source.geometries), one_group(target.geometries))
        self.source = expected(source, scenario.values, source.tokens)
        self.target = expected(
            target, scenario.values, range(scenario.span.start, target.tokens.stop)
        )

    def there(self, integrity: Integrity = Integrity.ALL) -> list[int]:
        scenario = self.scenario
        return digests(
            scenario.source, self.source, self.routes, "source", scenario.span, integrity, self.seed
        )

    def here(self, integrity: Integrity = Integrity.ALL) -> list[int]:
        scenario = self.scenario
        return digests(
            scenario.target, self.target, self.routes, "target", scenario.span, integrity, self.seed
        )

    def planes(self) -> list[tuple[GroupCache, int, int, np.ndarray]]:
        """Every plane of every rank of the target: [block, slot, head, cell byte]."""
        return [
            (cache, row, plane, plane_cells(cache, buffers, row, plane))
            for cache, buffers in self.target.values()
            for row in range(len(cache.geometry.layers))
            for plane in range(cache.geometry.kind.num_planes)
        ]

    def slot(self, token: int) -> tuple[int, int]:
        return self.scenario.target.slot(token)


@check
@given(scenarios(), seeds, st.sampled_from([Integrity.SAMPLE, Integrity.ALL]))
def test_both_sides_agree_after_a_right_transfer(
    scenario: Scenario, seed: int, integrity: Integrity
) -> None:
    moved = Moved(scenario, seed)
    assert moved.there(integrity) == moved.here(integrity)


def corrupt_one(moved: Moved, data: st.DataObject) -> np.ndarray:
    """One plane of the target."""
    return data.draw(st.sampled_from(moved.planes()), "plane")[3]


def lose_a_piece(moved: Moved, data: st.DataObject) -> None:
    """The blocks of one plane's piece were never written."""
    view, span = corrupt_one(moved, data), moved.scenario.span
    block, slot = moved.slot(data.draw(st.integers(span.start, span.stop - 1)))
    view[block, slot] = 0xA5


def keep_a_stale_piece(moved: Moved, data: st.DataObject) -> None:
    """One token of one plane is that of another prompt."""
    view, span = corrupt_one(moved, data), moved.scenario.span
    block, slot = moved.slot(data.draw(st.integers(span.start, span.stop - 1)))
    other = view[block, slot].copy().view(np.int64)
    view[block, slot] = (other + 7_000_003).view(np.uint8)


def swap_two_tokens(moved: Moved, data: st.DataObject) -> None:
    span = moved.scenario.span
    assume(len(span) > 1)
    first, second = data.draw(
        st.lists(st.integers(span.start, span.stop - 1), min_size=2, max_size=2, unique=True)
    )
    for *_, view in moved.planes():
        one, two = moved.slot(first), moved.slot(second)
        view[one], view[two] = view[two].copy(), view[one].copy()


def swap_two_blocks(moved: Moved, data: st.DataObject) -> None:
    size, span = moved.scenario.target.geometry.block_size, moved.scenario.span
    inside = range(-(-span.start // size), span.stop // size)
    assume(len(inside) > 1)
    first, second = data.draw(
        st.lists(st.sampled_from(list(inside)), min_size=2, max_size=2, unique=True)
    )
    one, two = moved.slot(first * size)[0], moved.slot(second * size)[0]
    for *_, view in moved.planes():
        view[[one, two]] = view[[two, one]]


def shift_by_one_token(moved: Moved, data: st.DataObject) -> None:
    """Each position has what belongs to the one before it."""
    span = moved.scenario.span
    assume(len(span) > 1)
    for *_, view in moved.planes():
        for token in range(span.stop - 1, span.start, -1):
            view[moved.slot(token)] = view[moved.slot(token - 1)]


def flip_a_bit(moved: Moved, data: st.DataObject) -> None:
    view, span = corrupt_one(moved, data), moved.scenario.span
    block, slot = moved.slot(data.draw(st.integers(span.start, span.stop - 1)))
    cells = view[block, slot]
    head = data.draw(st.integers(0, cells.shape[0] - 1))
    byte = data.draw(st.integers(0, cells.shape[1] - 1))
    cells[head, byte] ^= 1 << data.draw(st.integers(0, 7))


def flip_two_top_bits(moved: Moved, data: st.DataObject) -> None:
    """What a plain sum of products modulo 2**64 never finds."""
    span = moved.scenario.span
    assume(len(span) > 1)
    view = corrupt_one(moved, data)
    for token in (span.start, span.stop - 1):
        view[moved.slot(token)][0, 7] ^= 0x80


def swap_two_planes(moved: Moved, data: st.DataObject) -> None:
    """K for V, or one layer for another."""
    planes = [each for each in moved.planes() if each[0] is moved.planes()[0][0]]
    assume(len(planes) > 1)
    first, second = data.draw(
        st.lists(st.sampled_from(range(len(planes))), min_size=2, max_size=2, unique=True)
    )
    one, two = planes[first][3], planes[second][3]
    kept = one.copy()
    one[:] = two
    two[:] = kept


FAULTS = [
    lose_a_piece,
    keep_a_stale_piece,
    swap_two_tokens,
    swap_two_blocks,
    shift_by_one_token,
    flip_a_bit,
    flip_two_top_bits,
    swap_two_planes,
]


@pytest.mark.parametrize("fault", FAULTS, ids=[each.__name__ for each in FAULTS])
@check
@given(scenarios(), seeds, st.data())
def test_a_digest_of_everything_finds(fault, scenario, seed, data) -> None:
    moved = Moved(scenario, seed)
    fault(moved, data)
    assert moved.there() != moved.here()


@pytest.mark.parametrize("fault", [shift_by_one_token], ids=["shift_by_one_token"])
@check
@given(scenarios(), seeds, st.data())
def test_a_sample_finds_what_is_wrong_everywhere(fault, scenario, seed, data) -> None:
    moved = Moved(scenario, seed)
    # The first position of the span keeps what belongs there; a sample of it alone finds nothing.
    assume(len(scenario.span) >= 2 * GROUP_TOKENS)
    fault(moved, data)
    assert moved.there(Integrity.SAMPLE) != moved.here(Integrity.SAMPLE)


@check
@given(scenarios(), seeds, st.integers(1, 300))
def test_parts_add_up(scenario: Scenario, seed: int, part_bytes: int) -> None:
    moved = Moved(scenario, seed)
    each = moved.routes[0]
    cache = moved.source[each.source][0]
    cells = cells_of(
        cache, scenario.source.blocks, share_of(each, scenario.span), Integrity.ALL, seed
    )
    least = cells[0].side.piece_bytes
    assert total(cache, cells, max(least, part_bytes)) == total(cache, cells)
    spans = [scenario.span]
    if len(scenario.span) > 1:
        middle = (scenario.span.start + scenario.span.stop) // 2
        spans = [
            TokenSpan(scenario.span.start, middle),
            TokenSpan(middle, scenario.span.stop),
        ]
    tiles = [
        total(
            cache,
            cells_of(
                cache,
                scenario.source.blocks,
                Share((layer,), each.head_start, each.head_stop, span),
                Integrity.ALL,
                seed,
            ),
        )
        for layer in each.layers
        for span in spans
    ]
    assert added(tiles) == total(cache, cells), "tiles add up as well: streaming may sum them up"


# What is said of the sum, and of a sample.


def lone_cache(**changes: object) -> tuple[GroupCache, list[Buffer]]:
    (geometry,) = instance_geometries(model_cache(**changes), 1).values()
    return make_cache(geometry, PlacementStyle.INTERLEAVED)


@pytest.mark.parametrize(("head_dim", "itemsize"), [(128, 2), (3, 2), (5, 1), (4, 2)])
@pytest.mark.parametrize("layout", CacheLayout)
def test_the_sum_is_the_one_that_is_written_down(head_dim, itemsize, layout) -> None:
    cache, buffers = lone_cache(head_dim=head_dim, itemsize=itemsize, cache_layout=layout)
    write_prompt({Rank(0, 0): (cache, buffers)}, "hello", [5, 2], TokenSpan(0, 20))
    share = Share((1,), 1, 3, TokenSpan(3, 20))
    (cells,) = cells_of(cache, BlockRun(np.array([5, 2]), 0), share, Integrity.ALL, 99)
    weights = cells.weights(0, cells.side.num_pieces).tolist()
    words = cells.word_weights.tolist()
    assert all(number % 2 for number in weights + words)
    plainly, number = 0, 0
    for plane in range(2):
        view = plane_cells(cache, buffers, 1, plane)
        for token in range(3, 20):
            for head in range(1, 3):
                block, slot = [5, 2][token // 16], token % 16
                content = view[block, slot, head].tobytes()
                value = 1
                for at, weight in enumerate(words):
                    bits = int.from_bytes(content[8 * at : 8 * at + 8], "little")
                    value += weight * (bits ^ (bits >> 32))
                plainly = (plainly + weights[number] * value) & WORD
                number += 1
    assert number == cells.side.num_pieces
    assert total(cache, (cells,)) == plainly


def test_zeros_count() -> None:
    """A cell of zeros weighs something, so that a share with more of them is another one."""
    words = np.zeros((3, 4), np.uint64)
    weights = np.array([3, 5, 7], np.uint64)
    assert digest_of(words, weights, np.ones(4, np.uint64)) == 15


def sampled(cells: tuple[Cells, ...], num_rows: int) -> set[tuple[int, int, int]]:
    """(address of the plane, block, slot) of every position that is looked at."""
    return {
        (row, block, slot)
        for each in cells
        for row in each.side.row_address.tolist()
        for block, slot in zip(
            each.side.block_of_unit.tolist(), each.side.unit_in_block.tolist(), strict=True
        )
    }


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(seeds, st.integers(0, 100), st.integers(1, 500), st.integers(1, 12))
def test_a_sample_has_every_plane_and_every_group_of_positions(
    seed: int, start: int, length: int, num_layers: int
) -> None:
    cache, _ = lone_cache(num_layers=num_layers, num_blocks=40)
    blocks = BlockRun(np.arange(40), 0)
    span = TokenSpan(start, start + length)
    share = Share(tuple(range(num_layers)), 0, 4, span)
    found = sampled(cells_of(cache, blocks, share, Integrity.SAMPLE, seed), 2 * num_layers)
    positions = [16 * block + slot for _, block, slot in found]
    groups = {position // GROUP_TOKENS for position in range(span.start, span.stop)}
    assert all(span.start <= position < span.stop for position in positions)
    assert {position // GROUP_TOKENS for position in positions} == groups
    assert len({row for row, *_ in found}) == 2 * num_layers
    classes = min(MOST_CLASSES, 2 * num_layers, math.ceil(len(groups) / GROUPS_PER_CLASS))
    assert len(found) <= len(groups) * math.ceil(2 * num_layers / classes)
    assert len(set(positions)) == len(groups), "one position of each group, the same in its planes"


def test_other_seeds_sample_other_positions() -> None:
    cache, _ = lone_cache(num_layers=4, num_blocks=40)
    share = Share((0, 1, 2, 3), 0, 4, TokenSpan(0, 600))
    blocks = BlockRun(np.arange(40), 0)
    found = [
        sampled(cells_of(cache, blocks, share, Integrity.SAMPLE, seed), 8) for seed in range(40)
    ]
    ever = set().union(*found)
    # 38 groups make three classes: 1 in 48 each time, of 600 positions in 8 planes.
    assert len(ever) > 0.9 * 600 * 8 * (1 - math.exp(-40 / 48))


@pytest.mark.parametrize(
    ("share", "problem"),
    [
        (Share((0, 7), 0, 4, TokenSpan(0, 8)), "layers"),
        (Share((), 0, 4, TokenSpan(0, 8)), "layers"),
        (Share((1, 1), 0, 4, TokenSpan(0, 8)), "layers"),
        (Share((0,), 2, 5, TokenSpan(0, 8)), "heads"),
        (Share((0,), 2, 2, TokenSpan(0, 8)), "heads"),
        (Share((0,), 0, 4, TokenSpan(8, 8)), "start < stop"),
        (Share((0,), 0, 4, TokenSpan(0, 49)), "48"),
    ],
)
def test_what_is_not_held_is_refused(share: Share, problem: str) -> None:
    cache, _ = lone_cache()
    for integrity in (Integrity.SAMPLE, Integrity.ALL):
        with pytest.raises(MappingError, match=problem):
            cells_of(cache, BlockRun(np.array([5, 2, 7]), 0), share, integrity, 0)


def test_a_latent_cache_has_one_plane() -> None:
    cache, buffers = lone_cache(kind=CacheKind.LATENT, num_kv_heads=1, head_dim=576)
    (cells,) = cells_of(
        cache,
        BlockRun(np.array([5, 2]), 0),
        Share((0, 1), 0, 1, TokenSpan(0, 32)),
        Integrity.ALL,
        1,
    )
    assert cells.side.num_bytes == 2 * 32 * 576 * 2
    before = total(cache, (cells,))
    plane_cells(cache, buffers, 0, 0)[2, 15, 0, 1151] ^= 1
    assert total(cache, (cells,)) != before
