"""D takes a registration back for now, for a request whose KV is there: nothing is lost by it."""

import pytest

from kvcourier.core.messages import Cancel, Fenced, Register
from kvcourier.core.outcomes import Outcome
from kvcourier.core.workspace import Counted
from pair import Pair

RECEIVED = {Outcome.RECEIVED, Outcome.RELEASED}
SENT = {Outcome.SENT, Outcome.RELEASED}
TP_PAIRS = [({}, {}), ({"tp_size": 2}, {}), ({}, {"tp_size": 2})]
BOTH = pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])


def registered(pair: Pair, reads: bool = False, num_tokens: int = 40) -> None:
    """D's registration is at P, which computes."""
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1", reads=reads)
    assert pair.reserve("d1", "hello", 0, num_tokens)
    pair.deliver_all()


def given_back(pair: Pair) -> bool:
    return "d1" in pair.decode.given_back


def received_again(pair: Pair) -> None:
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT
    pair.settle()


def count(pair: Pair, side: str, what: Counted) -> int:
    return sum(each.counts[what] for each in pair.sides[side].endpoints.values())


@pytest.mark.parametrize(("prefill", "decode"), TP_PAIRS)
@BOTH
def test_blocks_come_back_and_the_request_is_served_later(reads, prefill, decode):
    pair = Pair(prefill, decode)
    free = sorted(pair.decode.free)
    registered(pair, reads and not prefill)
    pair.recall("d1")
    assert not given_back(pair), "P may be writing"
    pair.deliver_all()
    assert given_back(pair)
    assert sorted(pair.decode.free) == free
    pair.finish("p1", "hello", 40)
    assert not [item for item in pair.items if item.kind == "write"]
    pair.deliver_all()
    assert "d1" in pair.decode.held, "P says so without being asked"
    assert not pair.prefill.outcomes("p1"), "it is kept"
    received_again(pair)


@BOTH
def test_before_it_is_connected_they_come_back_at_once(reads):
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1", reads=reads)
    assert pair.reserve("d1", "hello", 0, 40)
    pair.recall("d1")
    assert given_back(pair)
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert "d1" in pair.decode.held
    received_again(pair)


@BOTH
def test_a_prompt_that_is_finished_comes_all_the_same(reads):
    pair = Pair()
    registered(pair, reads)
    pair.recall("d1")
    pair.finish("p1", "hello", 40)  # the recall is on its way
    pair.deliver_all()
    assert not given_back(pair)
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT
    pair.settle()


def test_once_it_is_known_to_be_finished_nothing_is_asked():
    pair = Pair()
    registered(pair)
    pair.finish("p1", "hello", 40)
    pair.advance(5.1)
    pair.deliver_kind("message")  # a heartbeat
    pair.deliver_kind("message")
    assert "d1" in pair.decode.held
    pair.recall("d1")
    assert not [item for item in pair.items if isinstance(item.message, Cancel)]
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


def test_what_had_landed_comes_once_more():
    pair = Pair()
    registered(pair)
    assert pair.advance_prefill("p1", "hello", 40, 32)
    pair.deliver_all()
    pair.recall("d1")
    pair.deliver_all()
    assert given_back(pair)
    # Somebody else has had the blocks meanwhile.
    other = pair.decode.take_whole("other", 40)
    pair.decode.write("something else", other, pair.prompts["d1"][1])
    pair.decode.free += pair.decode.lent.pop("other")
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    received_again(pair)


def test_a_write_in_flight_is_waited_for():
    pair = Pair()
    registered(pair)
    assert pair.advance_prefill("p1", "hello", 40, 32)
    pair.recall("d1")
    pair.deliver_kind("message", "notification")
    pair.deliver_kind("message")
    assert not given_back(pair)
    pair.deliver_all()
    assert given_back(pair)
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    received_again(pair)


def test_a_lost_recall_is_sent_again():
    pair = Pair()
    registered(pair)
    pair.recall("d1")
    for item in list(pair.items):
        pair.drop(item)
    pair.advance(0.6)
    pair.deliver_all()
    assert given_back(pair)
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    received_again(pair)


def test_a_recall_that_overtakes_its_registration_voids_it():
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    pair.deliver_all()
    assert pair.reserve("d1", "hello", 0, 40)
    (late,) = [item for item in pair.items if isinstance(item.message, Register)]
    pair.items.remove(late)
    pair.recall("d1")
    pair.deliver_all()
    assert given_back(pair)
    pair.items.append(late)
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    assert not [item for item in pair.items if item.kind == "write"]
    pair.deliver_all()
    received_again(pair)


def test_a_recall_that_comes_twice_leaves_the_next_registration_alone():
    pair = Pair()
    registered(pair)
    pair.recall("d1")
    twice = [item for item in pair.items if isinstance(item.message, Cancel)]
    assert len(twice) == 2, "it goes by both ways"
    pair.items.remove(twice[1])
    pair.deliver_all()
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    pair.items.append(twice[1])
    pair.deliver_all()
    assert count(pair, "p", Counted.STALE_REFUSED) == 1
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    pair.settle()


@BOTH
def test_it_can_be_called_back_again_and_again(reads):
    pair = Pair()
    registered(pair, reads)
    for _ in range(3):
        pair.recall("d1")
        pair.deliver_all()
        assert given_back(pair)
        assert pair.reserve("d1", "hello", 0, 40)
        pair.deliver_all()
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    pair.settle()


@BOTH
@pytest.mark.parametrize("when", ["called back", "given back"])
def test_an_abort_ends_it_everywhere(when, reads):
    pair = Pair()
    registered(pair, reads)
    pair.recall("d1")
    if when == "given back":
        pair.deliver_all()
    pair.abort(pair.decode, "d1")
    pair.deliver_all()
    assert Outcome.RECEIVED not in pair.decode.outcomes("d1")
    assert sorted(pair.decode.free) == list(pair.decode.pool)
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert Outcome.RELEASED in pair.prefill.outcomes("p1"), "nobody waits for it"
    pair.settle()


def test_no_answer_ends_like_any_other_silence():
    pair = Pair()
    registered(pair)
    pair.recall("d1")
    for _ in range(70):
        for item in list(pair.items):
            if isinstance(item.message, Cancel | Fenced):
                pair.drop(item)
        pair.advance(1.0)
        pair.deliver_kind("message", "probe", "handshake")
    assert Outcome.RECEIVE_FAILED in pair.decode.outcomes("d1")
    pair.abort(pair.prefill, "p1")
    pair.settle()


def test_a_prompt_that_ends_badly_is_told_at_the_next_registration():
    pair = Pair()
    registered(pair)
    pair.recall("d1")
    pair.deliver_all()
    pair.abort(pair.prefill, "p1")
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


def test_a_write_that_fails_in_mid_recall_is_no_loss():
    pair = Pair()
    registered(pair)
    assert pair.advance_prefill("p1", "hello", 40, 32)
    pair.recall("d1")
    (write,) = [item for item in pair.items if item.kind == "write"]
    pair.drop(write)
    pair.deliver_all()
    assert given_back(pair)
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    received_again(pair)


def test_a_prompt_that_ends_in_mid_recall_fails_at_once():
    pair = Pair()
    registered(pair)
    pair.abort(pair.prefill, "p1")
    pair.recall("d1")
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


# What D learns without a registration.


@pytest.mark.parametrize("order", ["asked first", "begun first", "finished first"])
def test_who_waits_without_blocks_is_told_that_it_is_finished(order):
    pair = Pair()
    if order == "asked first":
        pair.want_push("d1", "t1")
        pair.deliver_all()
    pair.hold("p1", "t1")
    if order == "begun first":
        pair.want_push("d1", "t1")
        pair.deliver_all()
    pair.finish("p1", "hello", 40)
    if order == "finished first":
        pair.want_push("d1", "t1")
    assert "d1" not in pair.decode.held
    pair.deliver_all()
    assert "d1" in pair.decode.held
    received_again(pair)


def test_a_lost_word_of_it_comes_with_the_next_heartbeat():
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    for item in list(pair.items):
        pair.drop(item)
    pair.advance(5.1)
    pair.deliver_all()
    assert "d1" in pair.decode.held
    received_again(pair)


def test_who_has_asked_for_a_prompt_that_is_cut_off_is_not_told():
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    pair.deliver_all()
    pair.decline("d1")
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.prefill.outcomes("p1") == SENT
    assert not pair.decode.held
