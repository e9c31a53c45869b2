"""Transfers between two cores in memory: examples, one behaviour each."""

import pytest

from kvcourier.config import Timing, TransferMode
from kvcourier.core.events import HoldBegun, PrefillFinished
from kvcourier.core.outcomes import Outcome
from kvcourier.core.workspace import Counted
from kvcourier.ids import Incarnation, RequestId, hold_id_of
from kvcourier.layout import TokenSpan
from pair import Pair

RECEIVED = {Outcome.RECEIVED, Outcome.RELEASED}
SENT = {Outcome.SENT, Outcome.RELEASED}
SHAPES = [
    ({}, {}),
    ({"tp_size": 4}, {"tp_size": 2}),
    ({"tp_size": 1}, {"tp_size": 2}),
    ({"pp_size": 2}, {}),
    ({"block_size": 8, "num_blocks": 16}, {"block_size": 16}),
    ({"tp_size": 4, "num_kv_heads": 2}, {"num_kv_heads": 2}),
    ({"num_kv_heads": 1, "tp_size": 2}, {"num_kv_heads": 1, "tp_size": 4}),
]


def push(pair: Pair, num_tokens: int = 40, start: int = 0) -> None:
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", start, num_tokens)
    pair.deliver_all()
    pair.finish("p1", "hello", num_tokens)


def pull(pair: Pair, num_tokens: int = 40, start: int = 0) -> None:
    pair.hold("p1")
    blocks = pair.finish("p1", "hello", num_tokens)
    pair.want_pull("d1", "p1", blocks)
    assert pair.reserve("d1", "hello", start, num_tokens)


def late_push(pair: Pair, num_tokens: int = 40, start: int = 0) -> None:
    """Late binding and WRITE: D comes when P has finished, and P writes at once."""
    pair.hold("p1", "t1")
    pair.finish("p1", "hello", num_tokens)
    pair.want_push("d1", "t1", "p1")
    assert pair.reserve("d1", "hello", start, num_tokens)


def early_pull(pair: Pair, num_tokens: int = 40, start: int = 0) -> None:
    """Early binding and READ: D registers, and READs when P tells what it holds."""
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1", reads=True)
    assert pair.reserve("d1", "hello", start, num_tokens)
    pair.deliver_all()
    assert not [item for item in pair.items if item.kind == "read"]
    pair.finish("p1", "hello", num_tokens)


WAYS = [push, pull, late_push, early_pull]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("written_pulls", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("transfer", WAYS)
def test_without_faults_everything_completes(transfer, written_pulls, shapes):
    pair = Pair(*shapes, written_pulls=written_pulls)
    transfer(pair)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT
    assert sorted(pair.prefill.free) == list(pair.prefill.pool)
    pair.settle()


@pytest.mark.parametrize("transfer", WAYS)
def test_a_holder_may_have_no_continuation(transfer):
    pair = Pair(continues=False)
    transfer(pair)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


@pytest.mark.parametrize("cached_blocks", [0, 1, 2])
@pytest.mark.parametrize("transfer", WAYS)
def test_a_partial_prefix_hit_moves_the_tail_only(transfer, cached_blocks):
    pair = Pair()
    transfer(pair, num_tokens=40, start=16 * cached_blocks)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


@pytest.mark.parametrize("first", ["registration", "prefill"])
def test_registration_and_prompt_meet_in_either_order(first):
    pair = Pair()
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 20)
    if first == "registration":
        pair.deliver_all()
        pair.hold("p1", "t1")
        pair.finish("p1", "hello", 20)
    else:
        pair.hold("p1", "t1")
        pair.finish("p1", "hello", 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT


def test_push_without_transfer_ids_matches_by_stripped_request_id():
    pair = Pair()
    pair.hold("cmpl-7-0-0a1b2c3d")
    pair.want_push("cmpl-7-0-ffffffff", None, "cmpl-7-0")
    assert pair.reserve("cmpl-7-0-ffffffff", "hello", 0, 20)
    pair.finish("cmpl-7-0-0a1b2c3d", "hello", 20)
    pair.deliver_all()
    assert pair.decode.outcomes("cmpl-7-0-ffffffff") == RECEIVED


def test_a_lost_registration_is_sent_again():
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_kind("handshake")
    pair.drop(next(item for item in pair.items if item.kind == "notification"))
    pair.finish("p1", "hello", 20)
    pair.deliver_all()
    assert not pair.decode.outcomes("d1")
    pair.advance(1.0)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


def test_a_cancel_that_overtakes_its_registration_stops_it():
    pair = Pair()
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_kind("handshake")
    pair.abort(pair.decode, "d1")
    pair.deliver_kind("message")
    pair.deliver_kind("message")
    assert pair.decode.outcomes("d1") == {Outcome.RELEASED}
    pair.hold("p1", "t1")
    pair.deliver_all()
    pair.finish("p1", "hello", 20)
    pair.settle()
    assert "write" not in {item.kind for item in pair.items}
    assert Outcome.RECEIVED not in pair.decode.outcomes("d1")


def test_aborted_while_written_stays_quarantined_until_the_write_has_ended():
    pair = Pair()
    push(pair)
    write = next(item for item in pair.items if item.kind == "write")
    pair.abort(pair.decode, "d1")
    pair.deliver_kind("message")
    assert not pair.decode.outcomes("d1")
    assert not pair.prefill.is_over("p1")
    pair.deliver(write)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RELEASED}
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}


def test_a_cancel_frees_the_holder_as_soon_as_the_prompt_is_done():
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_all()
    pair.abort(pair.decode, "d1")
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RELEASED}
    pair.finish("p1", "hello", 20)
    assert Outcome.RELEASED in pair.prefill.outcomes("p1")


@pytest.mark.parametrize("written_pulls", [False, True])
def test_a_write_that_fails_again_and_again_is_told_at_once(written_pulls):
    pair = Pair(written_pulls=written_pulls)
    (pull if written_pulls else push)(pair)
    fail_all(pair, "write", "read")
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert pair.decode.reasons["d1"] == {"it broke"}
    assert Outcome.RELEASED in pair.prefill.outcomes("p1")


def fail_all(pair: Pair, *kinds: str) -> None:
    """Everything arrives, but these operations fail."""
    while pair.items:
        item = pair.items[0]
        (pair.drop if item.kind in kinds else pair.deliver)(item)


def test_a_write_that_does_not_end_fails_but_releases_nothing():
    pair = Pair(timing=Timing(transfer_timeout_s=2.0))
    push(pair)
    write = next(item for item in pair.items if item.kind == "write")
    for _ in range(6):
        pair.advance(1.0)
        for item in [each for each in pair.items if each is not write]:
            pair.deliver(item)
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED}
    assert not pair.prefill.is_over("p1")
    pair.deliver(write)
    pair.settle()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert pair.prefill.is_over("p1")


def test_prefill_aborted_after_registration_fails_the_receive_at_once():
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_all()
    pair.abort(pair.prefill, "p1")
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert not pair.prefill.outcomes("p1")


def test_a_pull_of_a_hold_whose_lease_ended_fails():
    pair = Pair()
    pair.hold("p1")
    blocks = pair.finish("p1", "hello", 20)
    pair.advance(31.0)
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}
    pair.want_pull("d1", "p1", blocks)
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


@pytest.mark.parametrize("transfer", [push, pull])
def test_a_queued_request_keeps_the_lease_alive_and_declining_ends_it(transfer):
    pair = Pair()
    pair.hold("p1", "t1")
    blocks = pair.finish("p1", "hello", 20)
    if transfer is push:
        pair.want_push("d1", "t1")
    else:
        pair.want_pull("d1", "p1", blocks)
    for _ in range(100):
        pair.deliver_all()
        pair.advance(1.0)
    assert not pair.prefill.outcomes("p1")
    pair.decline("d1")
    pair.deliver_all()
    assert pair.prefill.outcomes("p1") == SENT


def test_a_registration_whose_prompt_never_comes_is_refused_in_time():
    pair = Pair(timing=Timing(registration_ttl_s=20.0))
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 20)
    for second in range(22):
        pair.deliver_all()
        if second == 19:
            assert not pair.decode.outcomes("d1"), "P may still get it"
        pair.advance(1.0)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    counts = [e.counts[Counted.REGISTRATIONS_EXPIRED] for e in pair.prefill.endpoints.values()]
    assert sum(counts) == 1


def test_a_request_that_is_queued_for_too_long_is_waited_for_no_more():
    # D had reserved its blocks for a prompt that P could not begin for want of those it held for
    # another request, which D could not admit: both kept their word for ever.
    pair = Pair(timing=Timing(hold_limit_s=60.0))
    pair.hold("p1", "t1")
    pair.finish("p1", "hello", 20)
    pair.want_push("d1", "t1")
    for _ in range(100):
        pair.deliver_all()
        pair.advance(1.0)
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    (reason,) = pair.decode.reasons["d1"]
    assert "not held any more: the lease ran out" in reason


@pytest.mark.parametrize("transfer", [push, pull])
def test_a_mode_the_peer_does_not_serve_is_refused_by_name(transfer):
    pair = Pair()
    other = TransferMode.PULL if transfer is push else TransferMode.PUSH
    pair.prefill.modes = frozenset({other})
    pair.hold("p1", "t1")
    blocks = pair.finish("p1", "hello", 20)
    if transfer is push:
        pair.want_push("d1", "t1")
    else:
        pair.want_pull("d1", "p1", blocks)
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert any("mode" in reason for reason in pair.decode.reasons["d1"])


def test_a_second_request_for_the_same_transfer_is_refused():
    pair = Pair()
    push(pair)
    pair.want_push("d2", "t1")
    assert pair.reserve("d2", "hello", 0, 20)
    pair.settle()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.decode.outcomes("d2") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


def test_two_requests_that_race_for_one_transfer_get_one_of_them_served():
    pair = Pair()
    pair.hold("p1", "t1")
    for request_id in ("d1", "d2"):
        pair.want_push(request_id, "t1")
        assert pair.reserve(request_id, "hello", 0, 20)
    pair.deliver_all()
    pair.finish("p1", "hello", 20)
    pair.settle()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.decode.outcomes("d2") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


def test_the_successor_of_a_registered_instance_does_not_inherit_its_hold():
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_all()
    pair.restart(pair.decode)
    pair.want_push("d2", "t1")
    assert pair.reserve("d2", "hello", 0, 20)
    pair.deliver_all()
    pair.finish("p1", "hello", 20)
    pair.settle()
    assert pair.decode.outcomes("d2") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


def test_a_notice_of_an_earlier_life_counts_for_nothing():
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_kind("handshake")
    pair.deliver_kind("notification")
    pair.deliver_kind("handshake")
    pair.finish("p1", "hello", 20)
    pair.deliver_kind("write")
    notice = next(item for item in pair.items if item.kind == "notice")
    for item in [each for each in pair.items if each.kind == "message"]:
        pair.drop(item)
    pair.restart(pair.prefill)
    pair.tell_of_lost_lives()
    pair.deliver_kind("handshake")
    pair.deliver(notice)
    assert not pair.decode.outcomes("d1")
    pair.hold("p2", "t1")
    pair.finish("p2", "hello", 20)
    pair.settle()
    assert pair.decode.outcomes("d1") == RECEIVED


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("transfer", [push, pull])
def test_the_first_failed_operation_releases_nothing_its_sibling_touches(transfer, first):
    shape = {"num_blocks": 20, "groups": [((0,), None), ((1,), 100)]}
    pair = Pair(shape, shape)
    transfer(pair)
    pair.deliver_kind("handshake")
    operations = [item for item in pair.items if item.kind in ("write", "read")]
    assert len(operations) == 2, "one for each cache group"
    pair.drop(operations[first])
    # A failure of which a sibling is in flight is not repaired: it would write over it.
    for _ in range(10):
        for item in [each for each in pair.items if each not in operations]:
            pair.deliver(item)
    assert Outcome.RECEIVE_FAILED in pair.decode.outcomes("d1")
    assert not pair.decode.is_over("d1")
    pair.settle()
    assert pair.decode.is_over("d1")
    assert pair.prefill.is_over("p1")


def test_a_reference_to_an_earlier_hold_of_the_same_request_is_stale():
    pair = Pair()
    pair.hold("p1")
    blocks = pair.finish("p1", "hello", 20)
    pair.want_pull("d1", "p1", blocks)
    pair.advance(31.0)
    pair.hold("p1")
    pair.finish("p1", "world", 20)
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


def test_a_lost_failure_is_told_again_at_the_next_heartbeat():
    pair = Pair()
    push(pair)
    pair.drop(next(item for item in pair.items if item.kind == "write"))
    for item in list(pair.items):
        pair.drop(item)
    assert not pair.decode.outcomes("d1")
    pair.advance(6.0)
    fail_all(pair, "write", "read")
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert Outcome.RELEASED in pair.prefill.outcomes("p1")


def test_a_lost_notice_ends_by_the_registration_timeout():
    pair = Pair()
    push(pair)
    pair.deliver_kind("write")
    pair.drop(next(item for item in pair.items if item.kind == "notice"))
    for _ in range(20):
        pair.deliver_all()
        pair.advance(5.0)
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


def test_pulls_go_on_after_prefill_was_replaced_at_the_same_address():
    pair = Pair()
    pull(pair)
    pair.deliver_all()
    pair.restart(pair.prefill)
    for number in (2, 3):
        pair.hold(f"p{number}")
        blocks = pair.finish(f"p{number}", "world", 20)
        pair.want_pull(f"d{number}", f"p{number}", blocks)
        assert pair.reserve(f"d{number}", "world", 0, 20)
        pair.deliver_all()
        assert pair.decode.outcomes(f"d{number}") == RECEIVED


def test_a_stale_reference_does_not_disturb_the_connection_others_use():
    pair = Pair()
    pair.hold("p1")
    old_blocks = pair.finish("p1", "hello", 20)
    stale = pair.pull_intent("p1", old_blocks)
    pair.restart(pair.prefill)
    pair.hold("p2", "t2")
    pair.want_push("d2", "t2")
    assert pair.reserve("d2", "world", 0, 20)
    pair.deliver_all()
    pair.want("d1", stale)
    assert pair.reserve("d1", "hello", 0, 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    pair.finish("p2", "world", 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d2") == RECEIVED


def test_prefill_replaced_before_the_registration_arrived():
    pair = Pair()
    push(pair)
    pair.deliver_all()
    pair.restart(pair.prefill)
    pair.hold("p2", "t2")
    pair.want_push("d2", "t2")
    assert pair.reserve("d2", "world", 0, 20)
    pair.deliver_all()
    pair.finish("p2", "world", 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d2") == RECEIVED


def test_decode_replaced_at_the_same_address():
    pair = Pair()
    push(pair)
    pair.deliver_all()
    pair.restart(pair.decode)
    pair.hold("p2", "t2")
    pair.want_push("d2", "t2")
    assert pair.reserve("d2", "world", 0, 20)
    pair.deliver_all()
    pair.finish("p2", "world", 20)
    pair.deliver_all()
    assert pair.decode.outcomes("d2") == RECEIVED


def test_a_restarted_holder_fails_a_pull_by_incarnation():
    pair = Pair()
    pair.hold("p1")
    blocks = pair.finish("p1", "hello", 20)
    pair.want_pull("d1", "p1", blocks)
    pair.restart(pair.prefill)
    assert pair.reserve("d1", "hello", 0, 20)
    pair.settle()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert any("restarted" in reason for reason in pair.decode.reasons["d1"])


def leases_run_out(pair: Pair) -> int:
    return sum(e.counts[Counted.LEASES_EXPIRED] for e in pair.prefill.endpoints.values())


@pytest.mark.parametrize("ends", ["declined", "aborted"])
def test_a_prompt_that_nobody_wants_any_more_when_it_comes_is_not_kept(ends):
    """Its blocks would wait for the lease to run out: D will not say so again."""
    pair = Pair()
    pair.want_push("d1", "t1")
    if ends == "declined":
        pair.decline("d1")
    else:
        assert pair.reserve("d1", "hello", 0, 40)
        pair.deliver_all()
        pair.abort(pair.decode, "d1")
    pair.deliver_all()
    pair.hold("p1", "t1")
    pair.finish("p1", "hello", 40)
    assert Outcome.RELEASED in pair.prefill.outcomes("p1")
    assert not leases_run_out(pair)
    pair.settle()


def test_a_prompt_that_was_read_before_its_engine_told_of_it_is_proven_then():
    """An engine in another process speaks by its own socket: D may be heard first."""
    pair = Pair()
    span = TokenSpan(0, 40)
    blocks = pair.prefill.take("p1", span)
    pair.prefill.write("hello", blocks, span)
    hold_id = hold_id_of(pair.prefill.incarnation, 1)
    pair.note_hold_id("p1", hold_id)
    pair.note_held("p1", 40)
    pair.want_pull("d1", "p1", blocks)
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    pair.engine(pair.prefill, HoldBegun(RequestId("p1"), hold_id, None))
    pair.deliver_all()
    assert not pair.decode.outcomes("d1"), "nobody knows yet whether these are its blocks"
    pair.engine(pair.prefill, PrefillFinished(RequestId("p1"), blocks, 40))
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT
    assert not leases_run_out(pair)
    pair.settle()


def test_a_hold_of_another_life_is_not_waited_for():
    pair = Pair()
    pair.hold("p1")
    blocks = pair.finish("p1", "hello", 40)
    pair.note_hold_id("p1", hold_id_of(Incarnation("another life"), 9))
    pair.want_pull("d1", "p1", blocks)
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    assert Outcome.RECEIVE_FAILED in pair.decode.outcomes("d1")
    pair.settle()


@pytest.mark.parametrize("written_pulls", [False, True], ids=["read", "written"])
def test_a_pull_is_read_or_written_as_preferred(written_pulls):
    pair = Pair(written_pulls=written_pulls)
    pull(pair)
    kinds = set()
    while pair.items:
        kinds.add(pair.items[0].kind)
        pair.deliver(pair.items[0])
    assert ("write" in kinds, "read" in kinds) == (written_pulls, not written_pulls)
    assert pair.decode.outcomes("d1") == RECEIVED
    pair.settle()


@pytest.mark.parametrize("written_pulls", [False, True], ids=["read", "written"])
def test_a_used_reference_to_reused_blocks_fails(written_pulls):
    """O6: the blocks are another prompt's by now, under the same request id."""
    pair = Pair(written_pulls=written_pulls)
    pair.hold("p1")
    blocks = pair.finish("p1", "hello", 40)
    stale = pair.pull_intent("p1", blocks)
    pair.abort(pair.prefill, "p1")
    pair.prefill.reports.pop(RequestId("p1"))
    pair.hold("p1")
    pair.finish("p1", "somebody else's", 40)
    pair.want("d1", stale)
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    assert Outcome.RECEIVED not in pair.decode.outcomes("d1")
    assert Outcome.RECEIVE_FAILED in pair.decode.outcomes("d1")
    pair.settle()
