"""How layers and heads are split over ranks."""

import pytest

from kvcourier.errors import ConfigError
from kvcourier.ids import Rank
from kvcourier.layout import instance_geometries, shard_geometry, split_heads, split_layers
from layout_builders import model_cache


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "sizes"),
    [
        (8, 1, [8]),
        (8, 2, [4, 4]),
        (10, 4, [2, 3, 3, 2]),
        (9, 4, [2, 2, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (3, 3, [1, 1, 1]),
        (7, 2, [4, 3]),
    ],
)
def test_left_over_layers_go_to_the_stages_before_the_last(num_layers, pp_size, sizes):
    stages = [split_layers(num_layers, pp_size, rank) for rank in range(pp_size)]
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "held"),
    [
        (4, 1, [range(0, 4)]),
        (4, 2, [range(0, 2), range(2, 4)]),
        (2, 4, [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]),
        (1, 2, [range(0, 1), range(0, 1)]),
    ],
)
def test_heads_are_divided_or_replicated(num_kv_heads, tp_size, held):
    assert [split_heads(num_kv_heads, tp_size, rank) for rank in range(tp_size)] == held


@pytest.mark.parametrize(("num_kv_heads", "tp_size"), [(6, 4), (4, 6), (3, 2)])
def test_heads_that_cannot_be_divided_are_refused(num_kv_heads, tp_size):
    with pytest.raises(ConfigError, match=f"the model's {num_kv_heads} KV heads, found {tp_size}"):
        split_heads(num_kv_heads, tp_size, 0)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"pp_size: expected 1 to 2 \(layers\), found 3"):
        split_layers(2, 3, 0)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank, size):
    with pytest.raises(ConfigError, match=f"tp_rank: .* found {rank} of tp_size {size}"):
        split_heads(4, size, rank)
    with pytest.raises(ConfigError, match=f"pp_rank: .* found {rank} of pp_size {size}"):
        split_layers(4, size, rank)


def test_an_instance_has_a_geometry_for_every_rank():
    model = model_cache(num_layers=3)
    found = instance_geometries(model, tp_size=2, pp_size=2)
    assert list(found) == [Rank(0, 0), Rank(0, 1), Rank(1, 0), Rank(1, 1)]
    assert found[Rank(0, 1)] == shard_geometry(model, 2, 1, [0, 1])
    assert found[Rank(1, 0)].layers == (2,)
    assert (found[Rank(1, 1)].head_start, found[Rank(1, 1)].head_stop) == (2, 4)
    assert found[Rank(1, 1)].block_bytes == 16 * 2 * 4 * 2
