"""What a peer may say of its cache."""

from dataclasses import replace

import numpy as np
import pytest

from kvcourier.config import Limits
from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout import CacheKind, RankCache, instance_geometries
from kvcourier.layout import validate_cache as validate_groups
from layout_builders import GUARD_BYTES, PlacementStyle, make_cache, model_cache

LIMITS = Limits(max_layers=8, max_ranks=4)


def cache(style=PlacementStyle.SEPARATE, **changes):
    found, _ = make_cache(instance_geometries(model_cache(**changes), 1)[Rank(0, 0)], style)
    return found


def validate_cache(cache, limits):
    """The check of a rank with one group."""
    validate_groups(RankCache((cache,)), limits)


@pytest.mark.parametrize("style", PlacementStyle)
@pytest.mark.parametrize("kind", CacheKind)
@pytest.mark.parametrize("num_blocks", [1, 8])
def test_every_placement_of_a_sane_cache_passes(style, kind, num_blocks):
    heads = 1 if kind is CacheKind.LATENT else 4
    validate_cache(cache(style, kind=kind, num_kv_heads=heads, num_blocks=num_blocks), LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "number of layers: expected 1 to 8, found 0"),
        ({"layers": tuple(range(9))}, "number of layers: expected 1 to 8, found 9"),
        ({"layers": (0, 8)}, "layer: expected 0 to 7, found 8"),
        ({"layers": (-1, 0)}, "layer: expected 0 to 7, found -1"),
        ({"layers": (1, 1)}, r"layers: expected each once, found \(1, 1\)"),
        ({"block_size": 0}, "block_size: expected 1 to"),
        ({"block_size": 1 << 40}, "block_size: expected 1 to"),
        ({"block_size": 1 << 19}, "block_size x heads: expected 1 to 1048576, found 2097152"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected 1 to"),
        ({"num_kv_heads": 1 << 40}, "num_kv_heads: expected 1 to"),
        ({"head_start": -1}, "head_start: expected 0 to 3, found -1"),
        ({"head_start": 4}, "head_start: expected 0 to 3, found 4"),
        ({"head_stop": 0}, "head_stop: expected 1 to 4, found 0"),
        ({"head_stop": 5}, "head_stop: expected 1 to 4, found 5"),
        ({"head_dim": 0}, "head_dim: expected 1 to"),
        ({"head_dim": 1 << 17}, "head_dim: expected 1 to 65536, found 131072"),
        ({"itemsize": 0}, "itemsize: expected 1 to 16, found 0"),
        ({"itemsize": 17}, "itemsize: expected 1 to 16, found 17"),
        ({"num_blocks": 0}, "num_blocks: expected 1 to"),
        ({"num_blocks": 1 << 40}, "num_blocks: expected 1 to"),
        ({"num_blocks": 9}, "layer 1, plane 1: expected all blocks within the"),
        ({"kind": CacheKind.LATENT}, "num_kv_heads: expected 1 for a latent cache, found 4"),
        ({"dtype": ""}, "dtype: expected a name of 1 to 256 characters, found 0"),
        ({"dtype": "x" * 257}, "dtype: expected a name of 1 to 256 characters, found 257"),
    ],
)
def test_an_insane_geometry_is_refused(changes, message):
    wrong = cache(PlacementStyle.ONE_REGION)
    wrong = replace(wrong, geometry=replace(wrong.geometry, **changes))
    with pytest.raises(MappingError, match=f"cache of rank pp0tp0: {message}"):
        validate_cache(wrong, LIMITS)


@pytest.mark.parametrize("rank", [Rank(4, 0), Rank(0, 4), Rank(-1, 0), Rank(0, -1)])
def test_a_rank_out_of_bounds_is_refused(rank):
    with pytest.raises(MappingError, match=r"_rank: expected 0 to 3, found (4|-1)"):
        validate_cache(replace(cache(), rank=rank), LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": -1}, "region 1: address: expected 0 to"),
        ({"address": 1 << 63}, "region 1: address: expected 0 to"),
        ({"size_bytes": 0}, "region 1: size_bytes: expected 1 to"),
        ({"size_bytes": (1 << 63) - 1}, "region 1: expected an end below 2"),
        ({"size_bytes": 100}, "expected all blocks within the 100 bytes of region 1"),
        ({"device_id": -1}, "region 1: device_id: expected 0 to 65535, found -1"),
    ],
)
def test_an_insane_region_is_refused(changes, message):
    sane = cache()
    first, second, *others = sane.regions
    regions = (first, replace(second, **changes), *others)
    with pytest.raises(MappingError, match=message):
        validate_cache(replace(sane, regions=regions), LIMITS)


@pytest.mark.parametrize("count", [0, 5])
def test_a_number_of_regions_that_makes_no_sense_is_refused(count):
    sane = cache()
    regions = tuple([*sane.regions, sane.regions[0]][:count])
    with pytest.raises(MappingError, match=f"number of regions: expected 1 to 4, found {count}"):
        validate_cache(replace(sane, regions=regions), LIMITS)


def edited(field, value):
    """A cache with one entry of one placement array replaced."""
    sane = cache()
    array = getattr(sane.placement, field).copy()
    array[1, 0] = value
    return replace(sane, placement=replace(sane.placement, **{field: array}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("region", 4, "expected a region from 0 to 3, found 4"),
        ("region", -1, "expected a region from 0 to 3, found -1"),
        ("offset_bytes", -1, "expected all blocks within"),
        ("offset_bytes", GUARD_BYTES * 2 + 1, "expected all blocks within"),
        ("offset_bytes", (1 << 63) - 1, "expected all blocks within"),
        ("block_stride_bytes", 511, r"expected a block stride of at least 512 bytes \(one block\)"),
        ("block_stride_bytes", -512, "expected a block stride of at least 512 bytes"),
        ("block_stride_bytes", (1 << 63) - 1, "expected all blocks within"),
    ],
)
def test_a_block_outside_its_region_is_refused(field, value, message):
    with pytest.raises(MappingError, match=f"layer 1, plane 0: {message}"):
        validate_cache(edited(field, value), LIMITS)


def test_the_last_byte_of_a_region_may_be_used():
    validate_cache(edited("offset_bytes", GUARD_BYTES * 2), LIMITS)


@pytest.mark.parametrize("field", ["region", "offset_bytes", "block_stride_bytes"])
@pytest.mark.parametrize(
    "array", [np.zeros((2, 1), np.int64), np.zeros(4, np.int64), np.zeros((2, 2), np.int32)]
)
def test_placement_arrays_have_one_shape_and_type(field, array):
    sane = cache()
    wrong = replace(sane, placement=replace(sane.placement, **{field: array}))
    expected = rf"placement.{field}: expected int64 of shape \(2, 2\), found {array.dtype}"
    with pytest.raises(MappingError, match=expected):
        validate_cache(wrong, LIMITS)
