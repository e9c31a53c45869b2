"""Early binding and READ: what goes wrong between a registration and the READ it leads to."""

import pytest

from kvcourier.config import Timing, TransferMode
from kvcourier.core.messages import Held, decode, encode, sender_fields
from kvcourier.core.outcomes import Outcome
from pair import LIMITS, Pair

RECEIVED = {Outcome.RECEIVED, Outcome.RELEASED}
FAILED = {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
SENT = {Outcome.SENT, Outcome.RELEASED}


def registered(pair: Pair, num_tokens: int = 40) -> None:
    """D's registration is at P, which computes."""
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1", reads=True)
    assert pair.reserve("d1", "hello", 0, num_tokens)
    pair.deliver_all()


def kinds(pair: Pair) -> list[str]:
    return [item.kind for item in pair.items]


def told(pair: Pair, side: str, name: str) -> list[str]:
    (endpoint,) = pair.sides[side].endpoints.values()
    return [entry.what for entry in endpoint.story(name) or ()]


@pytest.mark.parametrize("first", ["registration", "prefill"])
def test_registration_and_prompt_meet_in_either_order(first):
    pair = Pair()
    pair.want_push("d1", "t1", reads=True)
    assert pair.reserve("d1", "hello", 0, 40)
    if first == "registration":
        pair.deliver_all()
    pair.hold("p1", "t1")
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT


def test_nothing_is_written_whatever_is_computed():
    pair = Pair()
    registered(pair)
    pair.advance_prefill("p1", "hello", 40, 32, None)
    assert kinds(pair) == []
    pair.finish("p1", "hello", 40)
    assert kinds(pair) == ["message"]  # Held
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert "offered" in told(pair, "p", "p1") and "offered" in told(pair, "d", "d1")


def test_a_prompt_that_is_computed_anew_is_read_as_it_is_in_the_end():
    pair = Pair()
    registered(pair)
    pair.advance_prefill("p1", "hello", 40, 32, None)
    pair.roll_back("p1")
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


def test_a_lost_offer_is_made_again_at_the_next_heartbeat():
    pair = Pair()
    registered(pair)
    pair.finish("p1", "hello", 40)
    pair.drop(pair.items[0])
    pair.deliver_all()
    assert not pair.decode.outcomes("d1")
    pair.advance(Timing().heartbeat_s + 0.1)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


def test_an_offer_that_comes_twice_is_read_once():
    pair = Pair()
    registered(pair)
    pair.finish("p1", "hello", 40)
    pair.duplicate(pair.items[0])
    pair.deliver_kind("message")
    assert kinds(pair).count("read") == 1
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


@pytest.mark.parametrize("when", ["waiting", "registered", "offered", "reading"])
def test_an_abort_frees_both_sides(when):
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1", reads=True)
    assert pair.reserve("d1", "hello", 0, 40)
    if when != "waiting":
        pair.deliver_all()
    if when in ("offered", "reading"):
        pair.finish("p1", "hello", 40)
    if when == "reading":
        pair.deliver_kind("message")
        assert "read" in kinds(pair)
    pair.abort(pair.decode, "d1")
    if when in ("waiting", "registered"):
        assert Outcome.RELEASED in pair.decode.outcomes("d1")  # nobody can write to them
        pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RELEASED}
    if when == "waiting":
        pair.settle()  # P was never told of this request, so it waits for its lease's end
    assert Outcome.RELEASED in pair.prefill.outcomes("p1")


def test_a_lease_that_ends_is_told():
    pair = Pair()
    registered(pair)
    pair.finish("p1", "hello", 40)
    pair.items.clear()  # the offer, and what follows it, is lost
    pair.advance(Timing().kv_lease_duration + 1)
    pair.items[:] = [item for item in pair.items if item.sender.engine_id == "p"]
    pair.deliver_all()
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}
    assert pair.decode.outcomes("d1") == FAILED
    pair.settle()


def test_a_prompt_that_is_aborted_is_told():
    pair = Pair()
    registered(pair)
    pair.abort(pair.prefill, "p1")
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == FAILED


def test_more_tokens_than_were_computed():
    pair = Pair()
    registered(pair, num_tokens=40)
    pair.finish("p1", "hello", 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == FAILED
    assert "40 tokens are wanted, 20 were computed" in str(pair.decode.reasons["d1"])
    pair.settle()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_ids": []}, "a list for each of 1 cache groups"),
        ({"num_tokens": 39}, "40 tokens are wanted, 39 were computed"),
        ({"block_ids": [[0]]}, ""),
        ({"block_ids": [[0, 1, 10**6]]}, ""),
    ],
)
def test_an_offer_that_makes_no_sense_fails_the_request_alone(changes, reason, monkeypatch):
    pair = Pair()
    registered(pair)
    send = pair._send

    def tampered(me, peer, payload, kind):
        message = decode(payload, LIMITS)
        if isinstance(message, Held):
            values = {name: getattr(message, name) for name in message.__struct_fields__}
            payload = encode(Held(**values | changes))
        send(me, peer, payload, kind)

    monkeypatch.setattr(pair, "_send", tampered)
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == FAILED
    assert reason in str(pair.decode.reasons["d1"])
    monkeypatch.undo()
    pair.settle()


def test_an_offer_nobody_asked_for_changes_nothing():
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    me, other = (pair.sides[name].rank(next(iter(pair.sides[name].endpoints))) for name in "pd")
    pair._send(me, other, encode(Held(sender_fields(me), "d1", "x:1", [[0, 1, 2]], 40)), "message")
    pair.deliver_all()
    assert "read" not in told(pair, "d", "d1")
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


def test_pull_is_all_that_both_need():
    pair = Pair()
    for side in pair.sides.values():
        side.modes = frozenset({TransferMode.PULL})
    registered(pair)
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


def test_a_restarted_holder_fails_the_request():
    pair = Pair()
    registered(pair)
    pair.restart(pair.prefill)
    pair.tell_of_lost_lives()
    pair.settle()
    assert pair.decode.outcomes("d1") == FAILED
