"""A queued prompt that its holder says nothing of: D's engine need not wait for its end."""

import pytest

from pair import Pair

BEAT_S = 5.1
BOTH = pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])


def queued(pair: Pair, reads: bool) -> None:
    pair.want_push("d1", "t1", reads=reads)
    pair.deliver_all()


def beats(pair: Pair, num_beats: int) -> None:
    for _ in range(num_beats):
        pair.advance(BEAT_S)
        pair.deliver_all()


@BOTH
def test_a_prompt_that_is_computed_is_waited_for_as_long_as_it_takes(reads):
    pair = Pair()
    pair.hold("p1", "t1")
    queued(pair, reads)
    beats(pair, 40)
    assert not pair.decode.held
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.held == {"d1"}


@BOTH
def test_a_prompt_that_its_holder_does_not_know_is_not_waited_for_for_ever(reads):
    pair = Pair()
    queued(pair, reads)
    beats(pair, 11)
    assert not pair.decode.held, "it may be on its way to P"
    beats(pair, 1)
    assert pair.decode.held == {"d1"}
    assert pair.reserve("d1", "hello", 0, 40)
    pair.settle()
    assert "receive_failed" in pair.decode.outcomes("d1"), "with blocks it is found out"


@BOTH
def test_a_holder_that_is_not_there_any_more_is_not_waited_for(reads):
    pair = Pair()
    pair.hold("p1", "t1")
    queued(pair, reads)
    pair.restart(pair.prefill)
    assert not pair.decode.held
    pair.tell_of_lost_lives()
    assert pair.decode.held == {"d1"}


def test_a_prompt_whose_blocks_were_called_back_is_waited_for_as_before():
    pair = Pair()
    pair.hold("p1", "t1")
    queued(pair, False)
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    pair.recall("d1")
    pair.deliver_all()
    pair.abort(pair.prefill, "p1")
    beats(pair, 11)
    assert not pair.decode.held
    beats(pair, 1)
    assert pair.decode.held == {"d1"}
