"""Cache groups: what a window needs, how groups are paired, what a rank may say of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.config import Limits
from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout import (
    RankCache,
    Route,
    TokenSpan,
    block_run,
    instance_geometries,
    route,
    validate_cache,
)
from layout_builders import make_rank, model_cache

ONLY = Rank(0, 0)
WHOLE = instance_geometries(model_cache(num_layers=4), 1)[ONLY]


def groups(*parts, **changes):
    """A rank's groups from (layers, window) each."""
    return tuple(replace(WHOLE, layers=each, window=window, **changes) for each, window in parts)


@settings(max_examples=300, deadline=None)
@given(
    start=st.integers(0, 100),
    length=st.integers(1, 100),
    window=st.none() | st.integers(2, 120),
    unit=st.integers(1, 32),
)
def test_what_later_queries_look_at_is_needed_and_less_than_a_unit_more(
    start, length, window, unit
):
    start -= start % unit
    span = TokenSpan(start, start + length)
    queries = range(span.stop, span.stop + 200)
    looked_at = {
        position
        for query in queries
        for position in range(0 if window is None else query - window + 1, query + 1)
        if span.start <= position < span.stop
    }
    needed = span.needed(window, unit)
    assert looked_at <= set(range(needed.start, needed.stop))
    assert needed.start % unit == 0
    assert min(looked_at) - needed.start < unit
    assert needed.stop == span.stop


@pytest.mark.parametrize(
    ("window", "prefill_list", "decode_list", "moved"), [(64, 32, 32, 32), (50, 48, 32, 48)]
)
def test_worked_example(window, prefill_list, decode_list, moved):
    """The numbers of docs/mapping.md: 104 tokens, blocks of 16 and 32."""
    source, target = (groups((WHOLE.layers, window), block_size=size) for size in (16, 32))
    span = TokenSpan(0, 104)
    caches = [make_rank(each)[0] for each in (source, target)]
    firsts = [block_run("either", each, 0, [[]], span).first_token for each in caches]
    assert firsts == [prefill_list, decode_list]
    (only,) = route({ONLY: source}, {ONLY: target})
    assert only.needed(span) == TokenSpan(moved, 104)


def test_groups_are_paired_by_layer():
    source = groups(((0, 1), None), ((2, 3), None))
    target = groups(((3, 0), None), ((1,), None), ((2,), None), block_size=8)
    found = route({ONLY: source}, {ONLY: target})
    assert [(each.layers, each.source_group, each.target_group) for each in found] == [
        ((0,), 0, 0),
        ((3,), 1, 0),
        ((1,), 0, 1),
        ((2,), 1, 2),
    ]
    assert {each.unit_tokens for each in found} == {8}


def test_a_route_needs_what_the_target_looks_at():
    source = groups(((0, 1, 2, 3), None), block_size=32)
    target = groups(((0, 1, 2), None), ((3,), 20), block_size=48)
    found = route({ONLY: source}, {ONLY: target})
    assert found == (
        Route(ONLY, ONLY, (0, 1, 2), 0, 4, 0, 0, 16, None),
        Route(ONLY, ONLY, (3,), 0, 4, 0, 1, 16, 20),
    )
    assert [each.needed(TokenSpan(0, 100)) for each in found] == [
        TokenSpan(0, 100),
        TokenSpan(80, 100),
    ]


@pytest.mark.parametrize(
    ("kept", "wanted", "words"),
    [
        (16, None, "a sliding window of 16 tokens, the target needs all positions"),
        (16, 17, "a sliding window of 16 tokens, the target needs a window of 17"),
        (16, 16, ""),
        (17, 16, ""),
        (None, 16, ""),
    ],
)
def test_a_source_that_keeps_less_is_refused(kept, wanted, words):
    source = groups(((0, 1, 2), None), ((3,), kept))
    target = groups(((0, 1, 2), None), ((3,), wanted))
    if not words:
        assert len(route({ONLY: source}, {ONLY: target})) == 2
        return
    with pytest.raises(MappingError, match=f"layer 3: the source keeps {words}"):
        route({ONLY: source}, {ONLY: target})


def test_groups_of_other_shapes_are_compared_layer_by_layer():
    source = (replace(WHOLE, layers=(0, 1)), replace(WHOLE, layers=(2, 3), head_dim=8))
    target = (replace(WHOLE, layers=(3, 2), head_dim=8), replace(WHOLE, layers=(0, 1)))
    assert len(route({ONLY: source}, {ONLY: target})) == 2
    other = (target[0], replace(target[1], layers=(0,)), replace(target[0], layers=(1,)))
    with pytest.raises(MappingError, match="layer 1: head_dim: source has 4, target has 8"):
        route({ONLY: source}, {ONLY: other})


def test_a_layer_in_two_groups_is_refused():
    twice = groups(((0, 1), None), ((1, 2, 3), 16))
    with pytest.raises(MappingError, match="source rank pp0tp0: holds layer 1 more than once"):
        route({ONLY: twice}, {ONLY: (WHOLE,)})
    with pytest.raises(MappingError, match="layers: expected each in one group"):
        validate_cache(make_rank(twice)[0], Limits())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 1}, "group 1: window: expected 2 to"),
        ({"window": -5}, "group 1: window: expected 2 to"),
        ({"num_reserved_blocks": -1}, "group 1: num_reserved_blocks: expected 0 to 7, found -1"),
        ({"num_reserved_blocks": 8}, "group 1: num_reserved_blocks: expected 0 to 7, found 8"),
        ({"num_blocks": 9}, "group 1: layer 2, plane 0: expected all blocks within"),
        ({"layers": ()}, "group 1: number of layers: expected 1 to"),
    ],
)
def test_each_group_is_checked(changes, message):
    cache, _ = make_rank(groups(((0, 1), None), ((2, 3), 16)))
    second = replace(cache.groups[1], geometry=replace(cache.groups[1].geometry, **changes))
    with pytest.raises(MappingError, match=f"cache of rank pp0tp0: {message}"):
        validate_cache(RankCache((cache.groups[0], second)), Limits())


def test_the_number_of_groups_is_bounded():
    cache, _ = make_rank(groups(((0, 1), None), ((2, 3), 16)))
    validate_cache(cache, Limits(max_groups=2))
    with pytest.raises(MappingError, match="number of groups: expected 1 to 1, found 2"):
        validate_cache(cache, Limits(max_groups=1))


def test_a_list_of_blocks_begins_with_the_window():
    cache, _ = make_rank(groups(((0, 1), None), ((2, 3), 20)))
    ids = [[1, 2, 3, 4, 5, 6, 7], [5, 6]]
    span = TokenSpan(0, 100)
    assert block_run("source", cache, 0, ids, span).first_token == 0
    assert block_run("source", cache, 1, ids, span).first_token == 80
    with pytest.raises(MappingError, match="target blocks: expected a list for each of 2 cache"):
        block_run("target", cache, 0, ids[:1], span)
