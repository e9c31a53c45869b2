"""Transfers between caches of several groups, some with a sliding window, byte by byte."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kv_content import group_of, touched_blocks
from kvcourier.core.events import PrefillFinished
from kvcourier.core.outcomes import Outcome
from kvcourier.ids import RequestId
from kvcourier.layout import TokenSpan
from pair import Pair

RECEIVED = {Outcome.RECEIVED, Outcome.RELEASED}
FAILED = {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
WINDOWED = {"num_layers": 3, "num_blocks": 40, "groups": [((0, 2), None), ((1,), 20)]}
FULL = {"num_layers": 3, "num_blocks": 40}
MODES = ["push", "pull"]


def transfer(pair: Pair, mode: str, num_tokens: int, start: int = 0) -> None:
    """A prompt of which D has the first `start` tokens."""
    if mode == "push":
        pair.hold("p1", "t1")
        pair.want_push("d1", "t1")
        assert pair.reserve("d1", "hello", start, num_tokens)
        pair.deliver_all()
        pair.finish("p1", "hello", num_tokens)
    else:
        pair.hold("p1")
        pair.want_pull("d1", "p1", pair.finish("p1", "hello", num_tokens))
        assert pair.reserve("d1", "hello", start, num_tokens)
    pair.deliver_all()


def moved_bytes(pair: Pair) -> int:
    """Bytes of all operations that either side has posted."""
    stories = [
        endpoint.story(name)
        for side, name in ((pair.prefill, "p1"), (pair.decode, "d1"))
        for endpoint in side.endpoints.values()
    ]
    return sum(entry.details.get("bytes", 0) for story in stories for entry in story or ())


@st.composite
def shapes(draw: st.DrawFn) -> tuple[dict[str, object], dict[str, object]]:
    """P and D of one model whose layers have windows; either may keep some of them in full, but D
    only those that P does."""
    num_layers = draw(st.integers(1, 5))
    windows = [draw(st.sampled_from([None, 2, 7, 16, 17, 33])) for _ in range(num_layers)]
    kept_by_p = [draw(st.sampled_from([window, None])) for window in windows]
    kept_by_d = [
        draw(st.sampled_from([window, kept]))
        for window, kept in zip(windows, kept_by_p, strict=True)
    ]
    return draw(sides(kept_by_p)), draw(sides(kept_by_d))


@st.composite
def sides(draw: st.DrawFn, windows: list[int | None]) -> dict[str, object]:
    layers: dict[tuple[int | None, int], list[int]] = {}
    for layer, window in enumerate(windows):
        # Layers alike may be in one group or in several, as in vLLM.
        layers.setdefault((window, draw(st.integers(0, 1))), []).append(layer)
    groups = [(tuple(held), window) for (window, _), held in layers.items()]
    return {
        "num_layers": len(windows),
        "num_blocks": 400,
        "block_size": draw(st.sampled_from([4, 8, 16, 24])),
        "tp_size": draw(st.sampled_from([1, 2])),
        "groups": draw(st.permutations(groups)),
    }


@settings(max_examples=150, deadline=None)
@given(
    shapes=shapes(),
    mode=st.sampled_from(MODES),
    num_tokens=st.integers(1, 100),
    cached=st.floats(0, 1),
)
def test_every_group_gets_what_it_needs_and_nothing_else_is_touched(
    shapes, mode, num_tokens, cached
):
    """`Pair` compares the bytes of every position that a later query looks at."""
    pair = Pair(*shapes)
    step = pair.decode.block_size
    start = int(cached * (num_tokens - 1)) // step * step
    transfer(pair, mode, num_tokens, start)
    assert pair.decode.outcomes("d1") == RECEIVED, pair.decode.reasons
    _, _, blocks = pair.prompts[RequestId("d1")]
    for index in range(len(blocks)):
        touched = touched_blocks(group_of(pair.decode.caches, index))
        assert touched <= {block for group in blocks for block in group}
    pair.settle()
    for side in (pair.prefill, pair.decode):
        assert sorted(side.free) == list(side.pool)


@pytest.mark.parametrize("mode", MODES)
def test_a_window_moves_its_blocks_only(mode):
    pair = Pair(WINDOWED, WINDOWED)
    transfer(pair, mode, 100)
    block_bytes = 2 * pair.decode.groups[0].block_bytes
    # Two layers of 7 blocks; of the third positions 81 to 99, in blocks 5 and 6.
    assert moved_bytes(pair) == (2 * 7 + 2) * block_bytes


@pytest.mark.parametrize("mode", MODES)
def test_a_full_cache_serves_a_window(mode):
    pair = Pair(FULL, WINDOWED)
    transfer(pair, mode, 100)
    assert pair.decode.outcomes("d1") == RECEIVED


@pytest.mark.parametrize("mode", MODES)
def test_a_window_cannot_serve_a_full_cache_and_says_so(mode):
    pair = Pair(WINDOWED, FULL)
    transfer(pair, mode, 100)
    assert pair.decode.outcomes("d1") == FAILED
    (reason,) = pair.decode.reasons["d1"]
    assert "layer 1: the source keeps a sliding window of 20 tokens" in reason
    pair.settle()
    assert pair.prefill.is_over("p1")


def test_windows_that_shrink_one_way_and_grow_the_other_do_not_connect():
    pair = Pair(WINDOWED, WINDOWED | {"groups": [((0, 2), 20), ((1,), None)]})
    transfer(pair, "push", 100)
    assert pair.decode.outcomes("d1") == FAILED


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda blocks: (blocks[0], (0, *blocks[1][1:])), "expected ids from 1 to 39"),
        (lambda blocks: blocks[:1], "a list for each of 2 cache groups"),
        (lambda blocks: (*blocks, (1,)), "a list for each of 2 cache groups"),
        (lambda blocks: (blocks[0], blocks[1][1:]), "are wanted, 1 blocks of"),
        (lambda blocks: (blocks[0], ()), "are wanted, 0 blocks of"),
    ],
    ids=["a null block", "a list too few", "a list too many", "a block too few", "no blocks"],
)
def test_block_ids_that_do_not_fit_the_groups_fail_by_name(mode, change, sentence):
    pair = Pair(WINDOWED, WINDOWED)
    pair.hold("p1", "t1")
    blocks = pair.prefill.take("p1", TokenSpan(0, 100))
    pair.prefill.write("hello", blocks, TokenSpan(0, 100))
    pair.engine(pair.prefill, PrefillFinished(RequestId("p1"), change(blocks), 100))
    if mode == "push":
        pair.want_push("d1", "t1")
    else:
        pair.note_held("p1", 100)
        pair.want_pull("d1", "p1", change(blocks))
    assert pair.reserve("d1", "hello", 0, 100)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") >= {Outcome.RECEIVE_FAILED}
    assert any(sentence in reason for reason in pair.decode.reasons["d1"])
    pair.settle()


def test_fewer_tokens_than_held_are_refused_where_the_window_has_moved_on():
    """P has computed 101 tokens and keeps the window of the next; D wants to go on after 93."""
    pair = Pair(WINDOWED, WINDOWED)
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 93)
    pair.deliver_all()
    pair.finish("p1", "hello", 101)
    pair.deliver_all()
    (reason,) = pair.decode.reasons["d1"]
    assert "positions 64 to 96 are wanted, 2 blocks of 16 tokens hold 80 to 112" in reason
    pair.settle()


@pytest.mark.parametrize(
    ("num_held", "sentence"),
    [(None, "remote_num_tokens: needed"), (99, "100 tokens are wanted, 99 were computed")],
)
def test_a_pull_must_know_how_many_tokens_are_held(num_held, sentence):
    pair = Pair(WINDOWED, WINDOWED)
    pair.hold("p1")
    blocks = pair.finish("p1", "hello", 100)
    pair.want("d1", dataclasses.replace(pair.pull_intent("p1", blocks), num_tokens=num_held))
    assert pair.reserve("d1", "hello", 0, 100)
    pair.deliver_all()
    (reason,) = pair.decode.reasons["d1"]
    assert sentence in reason
    pair.settle()


def test_a_pull_of_full_caches_need_not_know_it():
    pair = Pair()
    pair.hold("p1")
    blocks = pair.finish("p1", "hello", 100)
    pair.want("d1", dataclasses.replace(pair.pull_intent("p1", blocks), num_tokens=None))
    assert pair.reserve("d1", "hello", 0, 100)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
