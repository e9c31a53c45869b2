"""What has come is compared with what its holder has: between two cores, with real bytes."""

import pytest

from core.test_pair import RECEIVED, SENT, SHAPES, WAYS, late_push, pull, push
from core.test_repairs import steps
from kvcourier.config import Integrity, TransferMode
from kvcourier.core.messages import Digest, Digested, encode
from kvcourier.core.outcomes import Outcome
from kvcourier.core.workspace import Counted
from kvcourier.ids import Rank
from pair import Item, Pair

FAILED = {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
CHECKED = [Integrity.SAMPLE, Integrity.ALL]


def counted(pair: Pair, what: Counted) -> int:
    return sum(each.counts[what] for each in pair.decode.endpoints.values())


def deliver(pair: Pair, *, spoilt: int) -> int:
    """Let everything arrive, but the first so many operations bring something wrong; returns how
    many that were."""
    done = 0
    while pair.items:
        item = pair.items[0]
        if item.kind in ("write", "read") and done < spoilt:
            item.spoils = True
            done += 1
        pair.deliver(item)
    return done


def messages(pair: Pair, kind: type) -> list[Item]:
    return [item for item in pair.items if isinstance(item.message, kind)]


@pytest.mark.parametrize("integrity", CHECKED)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("prefill", "decode"), SHAPES)
def test_what_is_right_is_accepted_whatever_the_layouts(prefill, decode, way, integrity):
    pair = Pair(prefill, decode, integrity=integrity)
    way(pair)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT
    assert counted(pair, Counted.INTEGRITY_CHECKS) >= 1
    assert counted(pair, Counted.INTEGRITY_FAILURES) == 0
    pair.settle()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("prefill", "decode"), SHAPES)
def test_what_is_wrong_once_is_repaired(prefill, decode, way):
    pair = Pair(prefill, decode, integrity=Integrity.ALL)
    way(pair)
    assert deliver(pair, spoilt=1) == 1
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT
    assert counted(pair, Counted.INTEGRITY_FAILURES) == 1
    assert counted(pair, Counted.REPAIRS) == 1
    pair.settle()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("prefill", "decode"), SHAPES)
def test_what_stays_wrong_is_never_accepted(prefill, decode, way):
    pair = Pair(prefill, decode, integrity=Integrity.ALL)
    way(pair)
    deliver(pair, spoilt=1000)
    assert pair.decode.outcomes("d1") == FAILED
    (reason, *_) = pair.decode.reasons["d1"]
    assert reason.startswith("integrity: the KV that came differs"), reason
    pair.settle()
    assert pair.prefill.is_over("p1")


@pytest.mark.parametrize("way", WAYS)
def test_with_off_it_is_accepted(way):
    """The cost of off: nothing notices, except the pair's own look at the bytes."""
    pair = Pair(integrity=Integrity.OFF)
    way(pair)
    with pytest.raises(AssertionError, match="S2: d1 received, but"):
        deliver(pair, spoilt=1)
    assert counted(pair, Counted.INTEGRITY_CHECKS) == 0


def test_the_steps_of_a_push_are_a_write_and_a_read():
    pair = Pair(integrity=Integrity.ALL)
    push(pair)
    deliver(pair, spoilt=2)
    assert pair.decode.outcomes("d1") == RECEIVED
    assert steps(pair) == ["write again", "read"]


def test_a_read_is_repaired_by_a_read():
    pair = Pair(integrity=Integrity.ALL)
    pull(pair)
    deliver(pair, spoilt=1)
    assert pair.decode.outcomes("d1") == RECEIVED
    assert steps(pair) == ["read"]


def test_a_holder_that_only_writes_is_not_read():
    pair = Pair(integrity=Integrity.ALL)
    pair.prefill.modes = frozenset({TransferMode.PUSH})
    push(pair)
    deliver(pair, spoilt=2)
    assert pair.decode.outcomes("d1") == FAILED
    assert steps(pair) == ["write again"]


def test_only_the_ranks_that_differ_write_again():
    pair = Pair({"tp_size": 2}, {}, integrity=Integrity.ALL)
    push(pair)
    deliver(pair, spoilt=1)
    story = pair.decode.endpoints[Rank(0, 0)].story("d1") or []
    assert [entry.details["differing"] for entry in story if entry.what == "checked"] == [
        ["pp0tp0"],
        [],
    ]
    again = [
        entry.what
        for endpoint in pair.prefill.endpoints.values()
        for entry in endpoint.story("p1") or []
        if entry.what == "registered_again"
    ]
    assert len(again) == 1


@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_write_in_place_of_a_read_is_compared(spoilt):
    pair = Pair(written_pulls=True, integrity=Integrity.ALL)
    pull(pair)
    assert deliver(pair, spoilt=spoilt) == spoilt
    assert pair.decode.outcomes("d1") == RECEIVED
    assert counted(pair, Counted.INTEGRITY_FAILURES) == spoilt


@pytest.mark.parametrize("tile", range(3))
def test_a_tile_that_was_spoilt_while_the_prompt_was_computed_is_found_at_the_end(tile):
    pair = Pair(integrity=Integrity.ALL)
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 48)
    pair.deliver_all()
    for number in range(3):
        if number < 2:
            assert pair.advance_prefill("p1", "hello", 48, 16 * (number + 1))
        else:
            pair.finish("p1", "hello", 48)
        deliver(pair, spoilt=int(number == tile))
    assert pair.decode.outcomes("d1") == RECEIVED
    assert counted(pair, Counted.INTEGRITY_FAILURES) == 1


def test_a_preempted_prompt_is_compared_in_its_last_form():
    pair = Pair(integrity=Integrity.ALL)
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    assert pair.advance_prefill("p1", "hello", 40, 32)
    pair.deliver_all()
    pair.roll_back("p1")
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert counted(pair, Counted.INTEGRITY_FAILURES) == 0


@pytest.mark.parametrize("groups", [(((0,), None), ((1,), 20)), (((0, 1), 20),)])
def test_groups_with_a_window_are_compared_where_they_are_kept(groups):
    shape = {"groups": groups, "num_blocks": 24}
    for spoilt in (0, 1):
        for way in (push, pull, late_push):
            pair = Pair(shape, shape, integrity=Integrity.ALL)
            way(pair, num_tokens=70)
            deliver(pair, spoilt=spoilt)
            assert pair.decode.outcomes("d1") == RECEIVED
            assert counted(pair, Counted.INTEGRITY_FAILURES) == spoilt


def test_the_holder_keeps_what_it_has_written_until_it_is_checked():
    pair = Pair(integrity=Integrity.ALL)
    push(pair)
    while not messages(pair, Digested):
        pair.deliver(pair.items[0])
    assert pair.prefill.outcomes("p1") == set()
    assert pair.decode.outcomes("d1") == set()
    pair.deliver_all()
    assert pair.prefill.outcomes("p1") == SENT


@pytest.mark.parametrize("kind", [Digest, Digested])
@pytest.mark.parametrize("way", WAYS)
def test_a_lost_question_or_answer_is_asked_again(way, kind):
    pair = Pair(integrity=Integrity.ALL)
    way(pair)
    for _ in range(2):
        while not messages(pair, kind):
            if not pair.items:
                pair.advance(0.6)
            pair.deliver(pair.items[0])
        pair.drop(messages(pair, kind)[0])
    pair.deliver_all()
    pair.advance(0.6)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT


def test_an_answer_that_comes_twice_or_to_another_question_means_nothing():
    pair = Pair(integrity=Integrity.ALL)
    pull(pair)
    spoilt = 0
    while not messages(pair, Digested):
        if pair.items[0].kind == "read":
            pair.items[0].spoils = True
            spoilt += 1
        pair.deliver(pair.items[0])
    assert spoilt == 1
    (answer,) = messages(pair, Digested)
    # Once more now, and once when the READ that repairs has been asked about by another question.
    pair.duplicate(answer)
    pair.duplicate(answer)
    pair.deliver(answer)
    late = pair.items.pop()
    while not messages(pair, Digest):
        pair.deliver(pair.items[0])
    pair.items.insert(0, late)
    pair.deliver_all()
    assert counted(pair, Counted.INTEGRITY_FAILURES) == 1
    assert counted(pair, Counted.MESSAGES_IGNORED) >= 1
    assert pair.decode.outcomes("d1") == RECEIVED


@pytest.mark.parametrize("way", WAYS)
def test_an_abort_while_it_is_compared_gives_everything_back(way):
    pair = Pair(integrity=Integrity.ALL)
    way(pair)
    while not any(item.kind == "digest" and item.sender.engine_id == "d" for item in pair.items):
        pair.deliver(pair.items[0])
    pair.abort(pair.decode, "d1")
    assert pair.decode.outcomes("d1") == {Outcome.RELEASED}, "a digest only reads"
    pair.deliver_all()
    assert pair.prefill.is_over("p1")
    pair.settle()


def test_a_refusal_after_an_abort_means_nothing():
    """The READ is still in flight when P lets go and says so."""
    pair = Pair(integrity=Integrity.ALL)
    pull(pair)
    while not any(item.kind == "read" for item in pair.items):
        pair.deliver(pair.items[0])
    pair.abort(pair.prefill, "p1")
    pair.abort(pair.decode, "d1")
    (read,) = [item for item in pair.items if item.kind == "read"]
    for item in [each for each in pair.items if each is not read]:
        pair.deliver(item)
    pair.deliver_kind("message")
    assert pair.decode.outcomes("d1") == set()
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RELEASED}


@pytest.mark.parametrize("way", WAYS)
def test_a_holder_that_ends_its_hold_meanwhile_fails_the_request(way):
    pair = Pair(integrity=Integrity.ALL)
    way(pair)
    while not messages(pair, Digest):
        pair.deliver(pair.items[0])
    pair.abort(pair.prefill, "p1")
    pair.settle()
    assert pair.decode.outcomes("d1") == FAILED
    assert any("does not hold this KV" in reason for reason in pair.decode.reasons["d1"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whose", ["p", "d"])
def test_a_digest_that_cannot_be_taken_fails_the_request(way, whose):
    pair = Pair(integrity=Integrity.ALL)
    way(pair)
    while not any(i.kind == "digest" and i.sender.engine_id == whose for i in pair.items):
        pair.deliver(pair.items[0])
    for item in [i for i in pair.items if i.kind == "digest" and i.sender.engine_id == whose]:
        pair.drop(item)
    pair.deliver_all()
    pair.settle()
    assert pair.decode.outcomes("d1") == FAILED
    assert pair.prefill.is_over("p1")


@pytest.mark.parametrize("way", WAYS)
def test_a_holder_that_dies_before_it_has_answered_fails_the_request(way):
    pair = Pair(integrity=Integrity.ALL)
    way(pair)
    while not messages(pair, Digested):
        pair.deliver(pair.items[0])
    for item in messages(pair, Digested):
        pair.drop(item)
    pair.restart(pair.prefill)
    pair.tell_of_lost_lives()
    pair.settle()
    assert pair.decode.outcomes("d1") == FAILED


def test_a_wanter_that_dies_before_it_has_checked_is_not_waited_for():
    pair = Pair(integrity=Integrity.ALL)
    push(pair)
    while not messages(pair, Digest):
        pair.deliver(pair.items[0])
    pair.restart(pair.decode)
    pair.settle()
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}


def test_a_holder_that_never_answers_ends_by_time():
    pair = Pair(integrity=Integrity.ALL)
    pull(pair)
    for _ in range(200):
        for item in messages(pair, Digest):
            pair.drop(item)
        while pair.items:
            pair.deliver(pair.items[0])
            for item in messages(pair, Digest):
                pair.drop(item)
        pair.advance(1.0)
        if pair.decode.outcomes("d1"):
            break
    assert pair.decode.outcomes("d1") == FAILED
    assert pair.decode.reasons["d1"] == {"integrity: what has come could not be compared in time"}


def test_a_question_about_more_than_is_held_is_refused():
    pair = Pair(integrity=Integrity.ALL)
    pull(pair)
    while not messages(pair, Digest):
        pair.deliver(pair.items[0])
    (item,) = messages(pair, Digest)
    many = [*item.message.shares] * 2
    question = Digest(
        item.message.sender, item.message.name, "d1", many, whole=True, seed=item.message.seed
    )
    pair.items.remove(item)
    pair._send(item.sender, item.target, encode(question), "message")
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == FAILED
    assert any("shares: expected" in reason for reason in pair.decode.reasons["d1"])


def test_a_holder_that_gives_no_digests_is_refused_in_words():
    pair = Pair(integrity=Integrity.SAMPLE)
    pair.prefill.gives_digests = False
    pull(pair)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == FAILED
    assert any("gives no digests" in reason for reason in pair.decode.reasons["d1"])
