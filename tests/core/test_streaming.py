"""A prompt that is written while it is computed: examples, one behaviour each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.config import Timing
from kvcourier.core.commands import Tell
from kvcourier.core.events import (
    MessageReceived,
    PrefillAdvanced,
    PrefillRolledBack,
    RequestAborted,
)
from kvcourier.core.messages import Computed, Landed, decode, encode, sender_fields
from kvcourier.core.outcomes import Outcome
from kvcourier.core.outgoing import Outgoing
from kvcourier.core.workspace import Counted
from kvcourier.ids import Rank, RequestId
from kvcourier.layout import Route, TokenSpan
from pair import LIMITS, Pair

RECEIVED = {Outcome.RECEIVED, Outcome.RELEASED}
SENT = {Outcome.SENT, Outcome.RELEASED}
R0 = Rank(0, 0)
WINDOWED = {"num_blocks": 40, "groups": [((0,), None), ((1,), 20)]}
SHAPES = [
    ({"num_blocks": 16}, {"num_blocks": 16}),
    ({"num_blocks": 16, "tp_size": 2}, {"num_blocks": 16}),
    ({"num_blocks": 32, "block_size": 8}, {"num_blocks": 16, "pp_size": 2}),
    (WINDOWED, WINDOWED),
]


def registered(pair: Pair, num_tokens: int = 40, start: int = 0) -> Pair:
    """D has registered before P has computed anything."""
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", start, num_tokens)
    pair.deliver_all()
    return pair


def compute(pair: Pair, num_written: int, layers=None, num_tokens: int = 40) -> None:
    assert pair.advance_prefill("p1", "hello", num_tokens, num_written, layers)


def writes(pair: Pair) -> list:
    return [item for item in pair.items if item.kind == "write"]


def tiles(pair: Pair) -> list[tuple[int, int, tuple[int, ...] | None]]:
    """Start, stop and layers of each WRITE in transit, in the order they were posted."""
    notices = [item.notice for item in writes(pair)]
    return [
        (each.first_token, each.first_token + each.num_tokens, each.layers and tuple(each.layers))
        for each in notices
    ]


def received(pair: Pair) -> bool:
    pair.deliver_all()
    return pair.decode.outcomes("d1") == RECEIVED and pair.prefill.outcomes("p1") == SENT


def stale(pair: Pair) -> int:
    return sum(each.counts[Counted.STALE_REFUSED] for each in pair.decode.endpoints.values())


def test_each_chunk_is_sent_when_it_is_written_and_the_rest_at_the_end():
    pair = registered(Pair(), num_tokens=50)
    compute(pair, 16, num_tokens=50)
    assert tiles(pair) == [(0, 16, None)]
    compute(pair, 40, num_tokens=50)
    assert tiles(pair) == [(0, 16, None), (16, 32, None)], "whole units only"
    pair.deliver_all()
    pair.finish("p1", "hello", 50)
    assert tiles(pair) == [(32, 50, None)]
    assert received(pair)


def test_each_layer_of_the_last_chunk_is_sent_when_it_is_written():
    pair = registered(Pair({"num_layers": 4}, {"num_layers": 4}))
    compute(pair, 16)
    for layer in range(4):
        pair.deliver_all()
        compute(pair, 40, (layer,))
        assert tiles(pair) == [(16, 40, (layer,))]
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    assert not tiles(pair)
    assert received(pair)


def test_small_parts_are_gathered_until_they_are_worth_a_write():
    """Each costs a millisecond, whatever its size, and may slow the prefill down."""
    pair = registered(Pair({"num_layers": 32}, {"num_layers": 32}))
    sent = []
    for layer in range(32):
        compute(pair, 40, (layer,))
        sent += tiles(pair)
        pair.deliver_all()
    assert sent == [(0, 40, tuple(range(first, first + 4))) for first in range(0, 32, 4)]
    pair.finish("p1", "hello", 40)
    assert not tiles(pair)
    assert received(pair)


def test_the_last_part_is_sent_when_it_is_written_however_small():
    """Nothing comes after it that it could be gathered with."""
    pair = registered(Pair({"num_layers": 32}, {"num_layers": 32}))
    compute(pair, 40, tuple(range(30)))
    assert tiles(pair) == [(0, 40, tuple(range(30)))]
    pair.deliver_all()
    compute(pair, 40, (30,))
    assert not tiles(pair)
    compute(pair, 40, (31,))
    assert tiles(pair) == [(0, 40, (30, 31))]
    pair.finish("p1", "hello", 40)
    assert received(pair)


def test_a_prompt_is_received_only_when_prefill_has_finished():
    """A D that took it before would give its blocks away, while a preempted P writes again."""
    pair = registered(Pair())
    compute(pair, 40)
    assert tiles(pair) == [(0, 40, None)]
    pair.deliver_all()
    pair.advance(1.0)
    assert not pair.decode.outcomes("d1") and not pair.prefill.outcomes("p1")
    pair.roll_back("p1")
    compute(pair, 40)
    pair.deliver_all()
    assert not pair.decode.outcomes("d1") and not pair.prefill.outcomes("p1")
    pair.finish("p1", "hello", 40)
    assert not tiles(pair)
    assert received(pair)


def test_what_was_said_of_an_older_epoch_does_not_complete_a_newer_one():
    pair = registered(Pair())
    endpoint = pair.decode.endpoints[R0]
    holder = sender_fields(pair.prefill.rank(R0))
    for message in (
        Computed(holder, "d1", 0),
        Landed(holder, "d1", 0, 40, epoch=1),
        Computed(holder, "d1", 0),
    ):
        endpoint.handle(MessageReceived(message), 0.0)
        assert not pair.decode.outcomes("d1")
    assert stale(pair) == 1
    told = endpoint.handle(MessageReceived(Computed(holder, "d1", 1, "go on")), 0.0)
    reports = [each.report for each in told if isinstance(each, Tell)]
    assert [each.outcome for each in reports] == [Outcome.RECEIVED, Outcome.RELEASED]
    assert reports[0].continuation == "go on"


def test_a_lost_word_that_prefill_has_finished_is_made_up_for_by_a_heartbeat():
    pair = registered(Pair())
    compute(pair, 40)
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    (lost,) = [item for item in pair.items if item.kind == "notification"]
    pair.drop(lost)
    pair.deliver_all()
    assert not pair.decode.outcomes("d1")
    pair.advance(Timing().heartbeat_s)
    assert received(pair)


def test_a_late_registration_gets_all_that_is_written_at_once():
    pair = Pair()
    pair.hold("p1", "t1")
    compute(pair, 16)
    compute(pair, 36, (0,))
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_kind("handshake")
    pair.deliver_kind("notification")
    pair.deliver_kind("handshake")
    assert sorted(tiles(pair)) == [(0, 16, (1,)), (0, 32, (0,))]
    pair.finish("p1", "hello", 40)
    assert received(pair)


def test_what_the_decode_instance_has_cached_is_not_sent():
    pair = registered(Pair(), start=16)
    compute(pair, 16)
    assert not tiles(pair)
    compute(pair, 32)
    assert tiles(pair) == [(16, 32, None)]
    pair.finish("p1", "hello", 40)
    assert received(pair)


def test_tiles_keep_to_the_unit_of_both_block_sizes():
    pair = registered(Pair({"block_size": 8, "num_blocks": 16}, {"block_size": 16}))
    compute(pair, 31)
    assert tiles(pair) == [(0, 24, None)]
    pair.finish("p1", "hello", 40)
    assert received(pair)


def test_with_two_tiles_in_flight_the_next_ones_are_gathered():
    pair = registered(Pair({"num_blocks": 16}, {"num_blocks": 16}), num_tokens=112)
    for num_written in (16, 32, 48, 64, 80):
        compute(pair, num_written, num_tokens=112)
    assert tiles(pair) == [(0, 16, None), (16, 32, None)]
    pair.deliver(writes(pair)[0])
    assert tiles(pair) == [(16, 32, None), (32, 80, None)]
    compute(pair, 96, num_tokens=112)
    assert len(tiles(pair)) == 2
    pair.finish("p1", "hello", 112)
    assert tiles(pair)[2:] == [(80, 112, None)], "nothing is left to be gathered"
    assert received(pair)


def test_of_a_sliding_window_only_what_is_needed_in_the_end_is_sent():
    pair = registered(Pair(WINDOWED, WINDOWED), num_tokens=100)
    posted = []
    for num_written in (32, 64, 96):
        compute(pair, num_written, num_tokens=100)
        posted += [
            (each.notice.route, *tile[:2])
            for each, tile in zip(writes(pair), tiles(pair), strict=True)
        ]
        pair.deliver_all()
    assert posted == [(0, 0, 32), (0, 32, 64), (0, 64, 96), (1, 80, 96)]
    pair.finish("p1", "hello", 100)
    assert received(pair)


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "in flight"])
def test_after_a_preemption_everything_is_sent_again(landed):
    """O13, and vllm#50297: what D holds must come from one computation."""
    pair = registered(Pair())
    compute(pair, 32)
    if landed:
        pair.deliver_all()
    pair.roll_back("p1")
    compute(pair, 32)
    again = [item for item in writes(pair) if item.notice.epoch == 1]
    assert len(again) == (1 if landed else 0), "not before the old writes have ended"
    pair.deliver_kind("write")
    assert [item.notice.epoch for item in writes(pair)] == ([] if landed else [1])
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    assert received(pair)


def test_preempted_in_its_last_step_after_all_but_the_last_tile_was_sent():
    pair = registered(Pair())
    compute(pair, 40)
    pair.deliver_all()
    pair.roll_back("p1")
    pair.hold("p2")
    pair.finish("p2", "another", 60)
    pair.finish("p1", "hello", 40)
    assert sorted(tiles(pair)) == [(0, 40, None)]
    assert received(pair)


def test_a_notice_of_an_older_epoch_is_stale_and_counted():
    pair = registered(Pair())
    compute(pair, 32)
    pair.deliver_kind("write")
    (late,) = [item for item in pair.items if item.kind == "notice"]
    pair.items.remove(late)
    pair.roll_back("p1")
    pair.finish("p1", "hello", 40)
    (again,) = writes(pair)
    pair.deliver(again)
    pair.items.insert(0, late)
    pair.deliver_kind("notice")
    assert stale(pair) == 0, "it was before the newer one"
    assert received(pair)


def test_a_notice_that_comes_after_a_newer_epoch_changes_nothing():
    pair = registered(Pair())
    compute(pair, 32)
    pair.deliver_kind("write")
    (late,) = [item for item in pair.items if item.kind == "notice"]
    pair.items.remove(late)
    pair.roll_back("p1")
    compute(pair, 16)
    pair.deliver_all()
    pair.items.append(late)
    pair.deliver_all()
    assert stale(pair) == 1
    pair.finish("p1", "hello", 40)
    assert received(pair)


def test_what_had_landed_before_a_preemption_does_not_count():
    pair = registered(Pair())
    compute(pair, 32)
    pair.deliver_all()
    pair.roll_back("p1")
    compute(pair, 32)
    (first,) = writes(pair)
    pair.finish("p1", "hello", 40)
    for item in [each for each in writes(pair) if each is not first]:
        pair.deliver(item)
    pair.deliver_kind("notice")
    assert not pair.decode.outcomes("d1")
    assert received(pair)


@given(
    shapes=st.sampled_from(SHAPES),
    cached=st.sampled_from([0, 16]),
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.just("compute"),
                st.sampled_from([5, 16, 31, 32, 48, 60]),
                st.sampled_from([None, None, (0,), (1,), (0, 1)]),
            ),
            st.tuples(st.just("roll back"), st.just(0), st.none()),
            st.tuples(st.just("deliver"), st.integers(0, 5), st.none()),
        ),
        max_size=25,
    ),
    order=st.randoms(use_true_random=False),
)
def test_random_lives_of_one_stream(shapes, cached, steps, order):
    """What arrives, arrives in any order; the bytes are compared when D has received."""
    pair = registered(Pair(*shapes), num_tokens=60, start=cached)
    written = 0
    for what, number, layers in steps:
        if what == "compute":
            written = max(written, number)
            compute(pair, written, layers, num_tokens=60)
        elif what == "roll back" and "p1" in pair.computing:
            written = 0
            pair.roll_back("p1")
        elif what == "deliver" and pair.items:
            pair.deliver(pair.items[number % len(pair.items)])
        assert not pair.decode.outcomes("d1"), "before prefill has finished"
    pair.finish("p1", "hello", 60)
    while pair.items:
        pair.deliver(order.choice(pair.items))
    assert received(pair)


def test_a_newer_epoch_voids_what_has_landed():
    pair = registered(Pair())
    endpoint = pair.decode.endpoints[R0]
    holder = sender_fields(pair.prefill.rank(R0))
    first = Landed(holder, "d1", 0, 32)
    assert endpoint.write_target(first) is not None
    assert endpoint.write_target(Landed(holder, "d1", 0, 16, epoch=1)) is not None
    assert endpoint.write_target(first) is None


def test_an_abort_in_mid_stream_keeps_the_blocks_until_the_writes_have_ended():
    pair = registered(Pair())
    compute(pair, 32)
    pair.abort(pair.prefill, "p1")
    assert not pair.prefill.outcomes("p1")
    pair.deliver_kind("message")
    assert Outcome.RECEIVE_FAILED in pair.decode.outcomes("d1")
    assert not pair.decode.is_over("d1")
    pair.deliver_all()
    assert pair.prefill.outcomes("p1") == {Outcome.RELEASED}
    assert pair.decode.is_over("d1")
    pair.settle()


def test_an_abort_that_keeps_blocks_is_answered_even_if_nothing_is_in_flight():
    pair = Pair()
    pair.hold("p1", "t1")
    compute(pair, 16)
    pair.abort(pair.prefill, "p1")
    assert pair.prefill.outcomes("p1") == {Outcome.RELEASED}
    pair.engine(pair.prefill, RequestAborted(RequestId("unheard of"), ((1, 2),)))
    assert pair.prefill.outcomes("unheard of") == {Outcome.RELEASED}


def test_a_cancel_in_mid_stream_is_fenced_once_nothing_flies_and_the_rest_is_not_sent():
    pair = registered(Pair())
    compute(pair, 16)
    pair.abort(pair.decode, "d1")
    pair.deliver_kind("message")
    assert not pair.decode.is_over("d1")
    pair.deliver_kind("write")
    pair.deliver_kind("message")
    assert pair.decode.is_over("d1")
    compute(pair, 32)
    assert not writes(pair)
    pair.finish("p1", "hello", 40)
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}


def test_a_cancel_between_two_tiles_is_answered_at_once():
    pair = registered(Pair())
    compute(pair, 16)
    pair.deliver_all()
    pair.abort(pair.decode, "d1")
    pair.deliver_all()
    assert pair.decode.is_over("d1")


def test_after_writes_that_fail_in_mid_stream_the_prompt_is_read():
    pair = registered(Pair())
    compute(pair, 16)
    while pair.items:
        item = pair.items[0]
        (pair.drop if item.kind == "write" else pair.deliver)(item)
    assert not pair.decode.outcomes("d1")
    compute(pair, 32)
    assert not writes(pair), "P tells what can be READ when it has computed it"
    pair.finish("p1", "hello", 40)
    assert received(pair)


def test_a_prompt_may_be_computed_for_longer_than_a_write_may_take():
    pair = registered(Pair(timing=Timing(transfer_timeout_s=5.0)))
    compute(pair, 16)
    for _ in range(6):
        pair.deliver_all()
        pair.advance(4.0)
    compute(pair, 32)
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    assert received(pair)


def test_a_write_that_does_not_end_is_overdue_while_the_prompt_is_computed():
    pair = registered(Pair(timing=Timing(transfer_timeout_s=5.0)))
    compute(pair, 16)
    pair.advance(6.0)
    pair.deliver_kind("message")
    assert Outcome.RECEIVE_FAILED in pair.decode.outcomes("d1")
    assert not pair.decode.is_over("d1")
    pair.deliver_all()
    assert pair.decode.is_over("d1")
    pair.finish("p1", "hello", 40)
    pair.settle()


def test_a_wanter_that_asks_for_more_than_was_computed_fails_in_mid_stream():
    pair = registered(Pair(), num_tokens=60)
    compute(pair, 32, num_tokens=40)
    pair.finish("p1", "hello", 40)
    assert not pair.decode.is_over("d1")
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert any("40 were computed" in reason for reason in pair.decode.reasons["d1"])
    pair.settle()


def test_a_decode_instance_that_dies_between_two_tiles_gets_no_more():
    pair = registered(Pair())
    compute(pair, 16)
    pair.deliver_all()
    pair.restart(pair.decode)
    pair.tell_of_lost_lives()
    compute(pair, 32)
    assert not writes(pair)
    pair.finish("p1", "hello", 40)
    pair.settle()


def test_news_of_a_prompt_that_is_over_or_finished_means_nothing():
    pair = registered(Pair())
    blocks = pair.finish("p1", "hello", 40)
    assert len(writes(pair)) == 1
    pair.engine(pair.prefill, PrefillAdvanced(RequestId("p1"), blocks, 40))
    assert received(pair)
    for event in (PrefillAdvanced(RequestId("p1"), blocks, 40), PrefillRolledBack(RequestId("p1"))):
        pair.engine(pair.prefill, event)
    assert not tiles(pair)


def test_epoch_and_layers_survive_the_wire():
    notice = Landed(sender_fields(Pair().prefill.rank(R0)), "d1", 0, 16, 1, 3, [0, 2])
    assert decode(encode(notice), LIMITS) == notice


@given(
    span=st.tuples(st.integers(0, 4), st.integers(1, 60)),
    news=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 80)), max_size=12),
    unit=st.sampled_from([1, 4, 8]),
)
def test_every_position_of_every_layer_is_taken_once_and_only_when_written(span, news, unit):
    first, length = span
    wanted = TokenSpan(first * unit, first * unit + length)
    outgoing = Outgoing(Route(R0, R0, (0, 1, 2), 0, 1, 0, 0, unit, None), wanted)
    written = [0, 0, 0]
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def take() -> None:
        tiles = outgoing.ready(written.__getitem__)
        done = outgoing.completed_by(tiles)
        for tile in tiles:
            assert tile.span.start % unit == 0
            assert tile.span.stop % unit == 0 or tile.span.stop == wanted.stop
            outgoing.take(tile)
            for layer in tile.layers:
                assert tile.span.stop <= written[layer]
                taken[layer] += range(tile.span.start, tile.span.stop)
        assert outgoing.complete == done

    for layer, position in news:
        written[layer] = max(written[layer], position)
        take()
    written = [max(position, wanted.stop) for position in written]
    take()
    assert outgoing.complete
    everything = list(range(wanted.start, wanted.stop))
    assert taken == {0: everything, 1: everything, 2: everything}
