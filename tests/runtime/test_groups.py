"""Caches of several groups through real couriers: what a window needs arrives, byte by byte."""

from dataclasses import replace

import pytest

from endpoint_rig import Rig
from kv_content import group_of, touched_blocks, write_prompt, wrong_cells
from kvcourier.errors import ParamsError
from kvcourier.ids import Rank, RequestId
from kvcourier.layout import TokenSpan, instance_geometries
from kvcourier.runtime.reports import Outcome
from layout_builders import make_rank, model_cache
from runtime.courier_world import World

NUM_TOKENS = 100
SPAN = TokenSpan(0, NUM_TOKENS)
WINDOW = 20
FIRST_LOOKED_AT = 81
# The window begins in the block of positions 80 to 95.
SOURCE = ((5, 3, 9, 1, 12, 7, 2), (4, 11))
TARGET = ((2, 4, 6, 8, 10, 12, 14), (1, 3))
LIST_STARTS = (0, 80)


def cache_of_two_groups():
    whole = instance_geometries(model_cache(num_layers=3, num_blocks=16), 1)[Rank(0, 0)]
    common = {"num_reserved_blocks": 1}
    return make_rank(
        (
            replace(whole, layers=(0, 2), **common),
            replace(whole, layers=(1,), window=WINDOW, **common),
        )
    )


@pytest.fixture
def pair(world: World) -> tuple[Rig, ...]:
    return tuple(
        world.rig(name, rank_caches={Rank(0, 0): cache_of_two_groups()}) for name in ("p", "d")
    )


def compute(rig: Rig) -> None:
    for group, (blocks, start) in enumerate(zip(SOURCE, LIST_STARTS, strict=True)):
        instance = group_of(rig.rank_caches, group)
        write_prompt(instance, "hello", blocks, TokenSpan(start, NUM_TOKENS), start)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_each_group_gets_what_it_needs(pair, mode) -> None:
    prefill, decode = pair
    prefill.hold("p1", "t1")
    if mode == "push":
        decode.expect("d1", {**prefill.coordinates(), "transfer_id": "t1"})
        decode.endpoint.receive(RequestId("d1"), TARGET, SPAN)
    compute(prefill)
    params = prefill.endpoint.finish_prefill(RequestId("p1"), SOURCE, NUM_TOKENS)
    if mode == "pull":
        decode.expect("d1", params)
        decode.endpoint.receive(RequestId("d1"), TARGET, SPAN)
    decode.wait_for("d1", Outcome.RECEIVED, Outcome.RELEASED)
    prefill.wait_for("p1", Outcome.SENT, Outcome.RELEASED)
    for group, looked_at in enumerate((SPAN, TokenSpan(FIRST_LOOKED_AT, NUM_TOKENS))):
        instance = group_of(decode.rank_caches, group)
        assert not wrong_cells(instance, "hello", TARGET[group], looked_at, LIST_STARTS[group])
        assert touched_blocks(instance) <= {block for blocks in TARGET for block in blocks}


def test_the_holders_lists_must_be_as_many_as_the_groups(pair) -> None:
    prefill, decode = pair
    prefill.hold("p1", "t1")
    compute(prefill)
    params = prefill.endpoint.finish_prefill(RequestId("p1"), SOURCE, NUM_TOKENS)
    with pytest.raises(ParamsError, match="a list for each of 2 cache groups"):
        decode.expect("d1", params | {"remote_block_ids": [[1, 2]]})


def test_an_engine_s_lists_that_do_not_fit_fail_its_request(pair) -> None:
    prefill, decode = pair
    prefill.hold("p1", "t1")
    decode.expect("d1", {**prefill.coordinates(), "transfer_id": "t1"})
    decode.endpoint.receive(RequestId("d1"), TARGET[:1], SPAN)
    compute(prefill)
    prefill.endpoint.finish_prefill(RequestId("p1"), SOURCE, NUM_TOKENS)
    failed, _ = decode.wait_for("d1", Outcome.RECEIVE_FAILED, Outcome.RELEASED)
    assert "target blocks: expected a list for each of 2 cache groups" in failed.reason
