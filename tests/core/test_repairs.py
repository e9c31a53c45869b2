"""What D is told of a failure at P, and what it tries before it gives up."""

import pytest

from kvcourier.config import TransferMode
from kvcourier.core.events import ConnectFailed
from kvcourier.core.messages import Fail
from kvcourier.core.outcomes import Outcome
from kvcourier.core.workspace import Counted
from kvcourier.ids import Rank
from pair import Pair, Side

RANK = Rank(0, 0)


def early(pair: Pair) -> Pair:
    """D has registered for a prompt that P still computes."""
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    return pair


def told(pair: Pair) -> list[tuple[str, bool, bool]]:
    """Of each failure that is on its way to D: reason, whether it is held, whether all is quiet."""
    messages = [item.message for item in pair.items if isinstance(item.message, Fail)]
    return [(each.reason, each.held, each.quiet) for each in messages]


def fail(pair: Pair, kinds: str, times: int) -> None:
    """All that is under way arrives, but the first so many of these operations fail."""
    while pair.items:
        item = pair.items[0]
        if item.kind in kinds.split() and times:
            times -= 1
            pair.drop(item)
        else:
            pair.deliver(item)


def steps(pair: Pair, name: str = "d1") -> list[str]:
    story = pair.decode.endpoints[RANK].story(name) or []
    return [entry.details["step"] for entry in story if entry.what == "repairing"]


# Every cause at P, as D is told it.


def write_failed(pair: Pair) -> None:
    pair.finish("p1", "hello", 40)
    (write,) = [item for item in pair.items if item.kind == "write"]
    pair.drop(write)


def write_failed_in_mid_stream(pair: Pair) -> None:
    pair.advance_prefill("p1", "hello", 40, 16)
    (write,) = [item for item in pair.items if item.kind == "write"]
    pair.drop(write)


def aborted(pair: Pair) -> None:
    pair.abort(pair.prefill, "p1")


def lease_expired(pair: Pair) -> None:
    endpoint = pair.prefill.endpoints[RANK]
    endpoint._holder._deliveries.advance = lambda delivery: None  # it cannot post
    pair.finish("p1", "hello", 40)
    pair.items.clear()
    for _ in range(8):
        pair.advance(5.0)
        pair.items[:] = [item for item in pair.items if isinstance(item.message, Fail)]


def handshake_failed(pair: Pair) -> None:
    pair.restart(pair.decode)  # nobody is registered any more
    pair.tell_of_lost_lives()
    pair.deliver_all()
    pair.hold("p2", "t2")
    pair.want_push("d2", "t2")
    assert pair.reserve("d2", "hello", 0, 40)
    pair.deliver_kind("handshake")
    pair.deliver_kind("notification")
    pair.engine(pair.prefill, ConnectFailed(pair.decode.address, "nobody listens there"))


def unknown_transfer(pair: Pair) -> None:
    pair.want_push("d2", "t-unknown")
    assert pair.reserve("d2", "hello", 0, 20)
    pair.deliver_all()
    for _ in range(70):
        pair.advance(1.0)
        if told(pair):
            return
        pair.deliver_all()


def over_already(pair: Pair) -> None:
    pair.abort(pair.prefill, "p1")
    pair.deliver_all()
    pair.want_push("d2", "t1")
    assert pair.reserve("d2", "hello", 0, 20)
    pair.deliver_kind("notification")


CAUSES = [
    (write_failed, "it broke", True),
    (write_failed_in_mid_stream, "it broke", True),
    (aborted, "the prefill instance ended the request", False),
    (lease_expired, "the lease ran out before the KV was collected", False),
    (handshake_failed, "nobody listens there", False),
    (unknown_transfer, "no such prompt came to the prefill instance in time", False),
    (over_already, "the KV is not held any more: the prefill instance ended the request", False),
]


@pytest.mark.parametrize(
    ("happens", "reason", "held"), CAUSES, ids=[each[0].__name__ for each in CAUSES]
)
def test_every_cause_at_p_reaches_d_with_its_reason(happens, reason, held):
    pair = early(Pair())
    happens(pair)
    assert told(pair) == [(reason, held, True)]


# The ladder.


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_failed_write_is_tried_again_and_then_read(num_failures):
    pair = early(Pair())
    pair.finish("p1", "hello", 40)
    fail(pair, "write", num_failures)
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVED, Outcome.RELEASED}
    assert pair.prefill.outcomes("p1") == {Outcome.SENT, Outcome.RELEASED}
    assert steps(pair) == ["write again", "read"][:num_failures]
    assert pair.decode.endpoints[RANK].counts[Counted.REPAIRS] == num_failures


def test_a_write_in_place_of_a_read_is_tried_again_and_then_read():
    pair = Pair(written_pulls=True)
    pair.hold("p1", "t1")
    pair.want_pull("d1", "p1", pair.finish("p1", "hello", 40))
    assert pair.reserve("d1", "hello", 0, 40)
    fail(pair, "write", 2)
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVED, Outcome.RELEASED}
    assert steps(pair) == ["write again", "read"]


def test_after_the_last_step_the_engine_decides():
    pair = early(Pair())
    pair.finish("p1", "hello", 40)
    fail(pair, "write read", 3)
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert pair.decode.reasons["d1"] == {"it broke"}
    assert pair.prefill.is_over("p1")


def without_pull(side: Side) -> None:
    side.modes = frozenset({TransferMode.PUSH})


def test_what_a_peer_does_not_do_is_not_asked_for():
    pair = Pair()
    without_pull(pair.prefill)
    early(pair).finish("p1", "hello", 40)
    fail(pair, "write", 2)
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert steps(pair) == ["write again"]


def test_answers_to_the_first_registration_mean_nothing_to_the_second():
    """A `Fenced` that comes late must not free blocks that are written to again."""
    pair = early(Pair())
    write_failed(pair)
    late = [item for item in pair.items if item.kind == "message"]
    (failed,) = [item for item in late if isinstance(item.message, Fail)]
    pair.deliver(failed)
    pair.duplicate(failed)
    pair.deliver_kind("notification")
    assert [item.kind for item in pair.items].count("write") == 1
    for item in [each for each in pair.items if each.kind == "message"]:
        pair.deliver(item)
    pair.abort(pair.decode, "d1")
    assert pair.decode.outcomes("d1") == set(), "the second write is in flight over its blocks"
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RELEASED}


def test_a_repair_is_sent_again_until_it_arrives():
    pair = early(Pair())
    write_failed(pair)
    pair.deliver_kind("message")
    for _ in range(3):
        for item in [each for each in pair.items if each.kind == "notification"]:
            pair.drop(item)
        pair.advance(0.6)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVED, Outcome.RELEASED}
