"""Who takes what from whom: worked examples, and exact cover over all splits."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout import (
    CacheKind,
    Route,
    consumers_of,
    instance_geometries,
    routes_from,
    routes_to,
)
from kvcourier.layout import route as route_groups
from layout_builders import model_cache, one_group

check = settings(max_examples=150, derandomize=True, deadline=None, database=None)


def ranks(tp_size: int, pp_size: int = 1, **changes: object):
    return instance_geometries(model_cache(**changes), tp_size, pp_size)


def route(sources, targets):
    """Routes between instances with one group each."""
    return route_groups(one_group(sources), one_group(targets))


def test_four_source_ranks_to_two_target_ranks():
    assert route(ranks(4), ranks(2)) == (
        Route(Rank(0, 0), Rank(0, 0), (0, 1), 0, 1, 0, 0, 16, None),
        Route(Rank(0, 1), Rank(0, 0), (0, 1), 1, 2, 0, 0, 16, None),
        Route(Rank(0, 2), Rank(0, 1), (0, 1), 2, 3, 0, 0, 16, None),
        Route(Rank(0, 3), Rank(0, 1), (0, 1), 3, 4, 0, 0, 16, None),
    )


def test_pipeline_stages_on_both_sides_meet_at_every_cut():
    found = route(ranks(1, 2, num_layers=5), ranks(1, 3, num_layers=5))
    assert [(each.source.pp_rank, each.target.pp_rank, each.layers) for each in found] == [
        (0, 0, (0, 1)),
        (0, 1, (2,)),
        (1, 1, (3,)),
        (1, 2, (4,)),
    ]


def test_helpers_select_by_either_end():
    routes = route(ranks(1), ranks(4))
    assert routes_to(routes, Rank(0, 2)) == (routes[2],)
    assert routes_from(routes, Rank(0, 0)) == routes
    assert consumers_of(routes, Rank(0, 0)) == tuple(Rank(0, rank) for rank in range(4))
    assert consumers_of(routes, Rank(0, 1)) == ()


@pytest.mark.parametrize(("source_tp", "target_tp"), [(8, 8), (8, 4), (4, 8), (8, 2), (2, 8)])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_replicas_share_the_work_evenly(source_tp, target_tp, num_kv_heads):
    sources = ranks(source_tp, num_kv_heads=num_kv_heads)
    work = Counter({rank: 0 for rank in sources})
    for each in route(sources, ranks(target_tp, num_kv_heads=num_kv_heads)):
        work[each.source] += each.head_stop - each.head_start
    assert max(work.values()) - min(work.values()) <= 1


def test_a_latent_cache_is_taken_from_one_replica_per_target():
    model = {"kind": CacheKind.LATENT, "num_kv_heads": 1}
    found = route(ranks(4, **model), ranks(4, **model))
    assert [(each.source, each.target) for each in found] == [
        (Rank(0, rank), Rank(0, rank)) for rank in range(4)
    ]


def test_replicas_share_cells_and_not_targets():
    """One target takes four layers, two take one each: the second replica serves both."""
    model = {"kind": CacheKind.LATENT, "num_kv_heads": 1, "num_layers": 6}
    whole = ranks(1, **model)[Rank(0, 0)]
    targets = {
        Rank(stage, 0): replace(whole, layers=layers)
        for stage, layers in enumerate([(0, 1, 2, 3), (4,), (5,)])
    }
    found = route(ranks(2, **model), targets)
    assert [each.source.tp_rank for each in found] == [0, 1, 1]


def test_layers_are_ascending_in_whatever_order_a_rank_places_them():
    turned = {rank: replace(each, layers=(1, 0)) for rank, each in ranks(1).items()}
    assert [each.layers for each in route(turned, turned)] == [(0, 1)]


TP_SIZES = (1, 2, 4, 8)


@check
@given(st.data())
def test_every_cell_of_every_target_has_one_holder(data):
    num_kv_heads = data.draw(st.integers(1, 8))
    num_layers = data.draw(st.integers(1, 7))
    fitting = [n for n in TP_SIZES if num_kv_heads % n == 0 or n % num_kv_heads == 0]
    sources, targets = (
        ranks(
            data.draw(st.sampled_from(fitting)),
            data.draw(st.integers(1, min(3, num_layers))),
            num_kv_heads=num_kv_heads,
            num_layers=num_layers,
        )
        for _ in range(2)
    )
    routes = route(sources, targets)
    taken = Counter(
        (each.target, layer, head)
        for each in routes
        for layer in each.layers
        for head in range(each.head_start, each.head_stop)
    )
    wanted = {
        (rank, layer, head)
        for rank, geometry in targets.items()
        for layer in geometry.layers
        for head in range(geometry.head_start, geometry.head_stop)
    }
    assert taken == Counter(wanted)
    for each in routes:
        held = sources[each.source]
        assert set(each.layers) <= set(held.layers)
        assert held.head_start <= each.head_start < each.head_stop <= held.head_stop
    shuffled = dict(data.draw(st.permutations(list(sources.items()))))
    assert route(shuffled, dict(reversed(targets.items()))) == routes


def test_overlapping_holders_still_give_an_exact_cover():
    whole = ranks(1)[Rank(0, 0)]
    sources = {
        Rank(0, 0): replace(whole, head_start=0, head_stop=3),
        Rank(0, 1): replace(whole, head_start=1, head_stop=4),
    }
    found = route(sources, ranks(1))
    assert [(each.source.tp_rank, each.head_start, each.head_stop) for each in found] == [
        (0, 0, 1),
        (1, 1, 3),
        (1, 3, 4),
    ]


def test_a_layer_that_no_source_holds_is_named():
    with pytest.raises(MappingError, match="layer 2: held by a target rank, but by no source"):
        route(ranks(1, num_layers=2), ranks(1, num_layers=3))


def test_a_layer_that_no_target_wants_is_named():
    with pytest.raises(MappingError, match="layer 2: held by a source rank, but by no target"):
        route(ranks(2, num_layers=3), ranks(2, num_layers=2))


def test_a_head_that_no_source_holds_is_named():
    partial = {rank: each for rank, each in ranks(4).items() if rank.tp_rank != 2}
    with pytest.raises(MappingError, match="layer 0, heads 2 to 3: wanted by a target rank"):
        route(partial, ranks(2))


def test_a_layer_listed_twice_in_one_rank_is_named():
    twice = {rank: replace(each, layers=(0, 1, 1)) for rank, each in ranks(1).items()}
    with pytest.raises(MappingError, match="target rank pp0tp0: holds layer 1 more than once"):
        route(ranks(1), twice)


def test_a_layer_of_two_stages_is_named():
    staged = ranks(1, 2, num_layers=4)
    staged[Rank(1, 0)] = replace(staged[Rank(1, 0)], layers=(1, 2, 3))
    whole = ranks(1, num_layers=4)
    for sides in ((staged, whole), (whole, staged)):
        with pytest.raises(MappingError, match=r"layer 1: expected on one .* stages 0 and 1"):
            route(*sides)


@pytest.mark.parametrize(("head_start", "head_stop"), [(-1, 2), (2, 2), (3, 5)])
def test_heads_outside_the_model_are_named(head_start, head_stop):
    whole = ranks(1)[Rank(0, 0)]
    wrong = {Rank(0, 0): replace(whole, head_start=head_start, head_stop=head_stop)}
    with pytest.raises(MappingError, match=f"within 0 to 4, found {head_start} to {head_stop}"):
        route(wrong, ranks(1))


@pytest.mark.parametrize("sides", [({}, ranks(1)), (ranks(1), {})])
def test_an_instance_without_ranks_is_refused(sides):
    with pytest.raises(MappingError, match="expected at least one on either side"):
        route(*sides)


def test_all_differences_are_named_at_once():
    with pytest.raises(MappingError, match=r"head_dim: source has 4, .* 8; dtype: source has"):
        route(ranks(1), ranks(1, head_dim=8, dtype="bfloat16"))
