"""Two copies of a prompt's KV: what arrived, what did not, and what was written elsewhere."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.planted import instance, offer_of
from kvcourier.config import Limits
from kvcourier.core.handshake import check_offer
from kvcourier.doctor.facts import Role
from kvcourier.doctor.scratch import COPIES, Scratch
from kvcourier.errors import MappingError
from kvcourier.layout import CacheLayout, route, validate_cache

TOKENS = 40


def scratch_of(tokens: int = TOKENS, **model: object) -> tuple[Scratch, dict]:
    """Scratch memory like an instance's cache, and that instance's geometries."""
    peer = check_offer(offer_of("p", **model), Limits())
    return Scratch(peer, tokens), peer.geometries


def fill(scratch: Scratch, copy: int, content: int, tokens: int = TOKENS) -> None:
    """What a transfer would do: the same bytes into every block of a copy."""
    for cache in scratch.caches:
        ids = scratch.blocks(copy, tokens)
        for group, blocks in zip(cache.groups, ids, strict=True):
            memory = scratch.memory[cache.rank]
            for offset in group.placement.offset_bytes.ravel():
                for block in blocks:
                    start = int(offset) + block * group.geometry.block_bytes
                    memory[start : start + group.geometry.block_bytes] = content


@given(
    tokens=st.integers(1, 200),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    layout=st.sampled_from(CacheLayout),
    block_size=st.sampled_from([1, 16, 32]),
)
@settings(max_examples=40, deadline=None)
def test_it_is_a_cache_that_an_instance_can_be_mapped_on(
    tokens: int, tp: int, pp: int, layout: CacheLayout, block_size: int
) -> None:
    scratch, theirs = scratch_of(
        tokens, tp_size=tp, pp_size=pp, cache_layout=layout, block_size=block_size
    )
    for cache in scratch.caches:
        validate_cache(cache, Limits())
    ours = {cache.rank: cache.geometries for cache in scratch.caches}
    routes = route(theirs, ours)
    assert all(each.source == each.target for each in routes)
    left, right = ({*ids} for copy in range(COPIES) for ids in scratch.blocks(copy, tokens))
    assert not left & right
    assert len(left) == len(right) == -(-tokens // block_size)


def test_equal_copies_are_equal() -> None:
    scratch, _ = scratch_of()
    fill(scratch, 0, 7)
    fill(scratch, 1, 7)
    compared = scratch.compare(TOKENS)
    assert (compared.differing, compared.untouched, compared.outside) == (0, 0, 0)
    # Two whole blocks of 16 tokens, 4 heads of 4 lanes of 2 bytes, 2 planes, 2 layers.
    assert compared.num_bytes == 2 * 16 * 4 * 4 * 2 * 2 * 2


def test_of_a_sliding_window_only_the_window_comes() -> None:
    peer = check_offer(offer_of("p", tp_size=1), Limits())
    (contact,) = peer.ranks.values()
    (group,) = contact.cache.groups
    windowed = dataclasses.replace(group, geometry=dataclasses.replace(group.geometry, window=20))
    cache = dataclasses.replace(contact.cache, groups=(windowed,))
    rank = dataclasses.replace(contact, cache=cache)
    scratch = Scratch(dataclasses.replace(peer, ranks={cache.rank: rank}), 100)
    # Position 100 looks at 81 to 100, so blocks 5 and 6 of 16 tokens move, and 6 is not whole.
    assert [len(ids) for ids in scratch.blocks(0, 100)] == [2]
    fill(scratch, 0, 7, 100)
    fill(scratch, 1, 7, 100)
    compared = scratch.compare(100)
    assert compared.num_bytes == 16 * 4 * 4 * 2 * 2 * 2
    assert (compared.differing, compared.untouched, compared.outside) == (0, 0, 0)


def test_what_never_came_is_seen() -> None:
    scratch, _ = scratch_of()
    fill(scratch, 0, 7)
    compared = scratch.compare(TOKENS)
    assert compared.untouched > 0 and compared.differing == compared.num_bytes


@given(place=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_a_single_bit_is_found_wherever_it_is(place: int, bit: int) -> None:
    scratch, _ = scratch_of(tp_size=1)
    fill(scratch, 0, 7)
    fill(scratch, 1, 7)
    (cache,) = scratch.caches
    memory = scratch.memory[cache.rank]
    at = place % memory.nbytes
    memory[at] ^= np.uint8(1 << bit)
    (geometry,) = cache.geometries
    block = at // geometry.block_bytes % geometry.num_blocks
    # Of the last block 8 of 16 tokens belong to the prompt; it is not compared.
    partial = {scratch.blocks(copy, TOKENS)[0][-1] for copy in range(COPIES)}
    compared = scratch.compare(TOKENS)
    assert compared.differing + compared.outside == (0 if block in partial else 1)
    if compared.differing:
        assert compared.first.startswith("rank pp0tp0, layer ")


def test_one_that_would_be_too_large_is_refused() -> None:
    peer = check_offer(offer_of("p", num_kv_heads=4, head_dim=4096), Limits())
    with pytest.raises(MappingError, match="scratch memory"):
        Scratch(peer, 1 << 20)


def test_the_healthy_instance_has_a_shape() -> None:
    offer = instance(Role.PREFILL).offer
    assert offer is not None
    assert Scratch(offer, 20).num_bytes > 0
