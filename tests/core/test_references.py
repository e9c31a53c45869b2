"""A READ counts only from the blocks of the very hold that it names."""

import dataclasses

import pytest

from kvcourier.config import Timing
from kvcourier.core.outcomes import Outcome
from kvcourier.core.references import DIGEST_BYTES, block_digest
from kvcourier.core.workspace import Counted
from kvcourier.ids import HoldId, hold_id_of
from pair import Pair

RECEIVED = {Outcome.RECEIVED, Outcome.RELEASED}
FAILED = {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
SENT = {Outcome.SENT, Outcome.RELEASED}


def two_prompts(pair: Pair, num_tokens: int = 40):
    """P holds one prompt for us and one for somebody else; the intents of both."""
    intents = []
    for name, prompt in (("p1", "ours"), ("p2", "secret")):
        pair.hold(name)
        intents.append(pair.pull_intent(name, pair.finish(name, prompt, num_tokens)))
    return intents


def counted(pair: Pair, side: str, what: Counted) -> int:
    (endpoint,) = pair.sides[side].endpoints.values()
    return endpoint.counts[what]


def names_other_blocks(ours, secret):
    return dataclasses.replace(ours, block_ids=secret.block_ids)


def names_one_other_block(ours, secret):
    (own,), (other,) = ours.block_ids, secret.block_ids
    return dataclasses.replace(ours, block_ids=((*own[:-1], other[-1]),))


def names_one_block_more(ours, secret):
    (own,), (other,) = ours.block_ids, secret.block_ids
    return dataclasses.replace(ours, block_ids=((*own, other[0]),))


def names_too_many_tokens(ours, secret):
    return dataclasses.replace(ours, num_tokens=48)


def names_no_hold_id(ours, secret):
    return dataclasses.replace(ours, block_ids=secret.block_ids, hold_id=None, num_tokens=None)


FORGERIES = (
    names_other_blocks,
    names_one_other_block,
    names_one_block_more,
    names_too_many_tokens,
    names_no_hold_id,
)


@pytest.mark.parametrize("is_asked_first", [True, False], ids=["queued", "at once"])
@pytest.mark.parametrize("forge", FORGERIES)
def test_blocks_of_another_prompt_are_never_taken_for_ones_own(forge, is_asked_first):
    pair = Pair()
    ours, secret = two_prompts(pair)
    pair.want("d1", forge(ours, secret))
    if is_asked_first:
        pair.deliver_all()
    stop = 48 if forge is names_too_many_tokens else 40
    assert pair.reserve("d1", "ours", 0, stop)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == FAILED
    (reason,) = pair.decode.reasons["d1"]
    assert "does not hold this KV in the blocks" in reason
    assert counted(pair, "p", Counted.REFERENCES_REFUSED) >= 1
    # What is held is nobody's to end but its own request's.
    assert not pair.prefill.outcomes("p1") and not pair.prefill.outcomes("p2")
    for name, prompt, intent in (("d2", "ours", ours), ("d3", "secret", secret)):
        pair.want(name, intent)
        assert pair.reserve(name, prompt, 0, 40)
        pair.deliver_all()
        assert pair.decode.outcomes(name) == RECEIVED
    assert pair.prefill.outcomes("p1") == pair.prefill.outcomes("p2") == SENT


def test_what_is_known_to_be_refused_is_not_even_read():
    pair = Pair()
    ours, secret = two_prompts(pair)
    pair.want("d1", names_other_blocks(ours, secret))
    pair.deliver_all()
    assert pair.reserve("d1", "ours", 0, 40)
    assert not [item for item in pair.items if item.kind == "read"]
    assert pair.decode.outcomes("d1") == FAILED


def test_a_part_of_what_is_held_may_be_read():
    pair = Pair()
    ours, _ = two_prompts(pair)
    pair.want("d1", dataclasses.replace(ours, num_tokens=33))
    assert pair.reserve("d1", "ours", 16, 33)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


def test_an_answer_from_before_the_blocks_were_named_confirms_nothing():
    # Without a number of tokens D cannot name them before it knows how far it READs.
    pair = Pair()
    ours, secret = two_prompts(pair)
    pair.want("d1", dataclasses.replace(ours, block_ids=secret.block_ids, num_tokens=None))
    pair.deliver_all()
    assert pair.reserve("d1", "ours", 0, 40)
    pair.deliver_kind("read")
    assert not pair.decode.outcomes("d1"), "the lease was proven before, the blocks were not"
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == FAILED


def test_a_lost_question_is_asked_again():
    pair = Pair()
    ours, _ = two_prompts(pair)
    pair.want("d1", ours)
    pair.deliver_kind("handshake")
    for item in list(pair.items):
        pair.drop(item)
    assert pair.reserve("d1", "ours", 0, 40)
    for item in [each for each in pair.items if each.kind == "message"]:
        pair.drop(item)
    pair.deliver_kind("read")
    assert not pair.decode.outcomes("d1")
    pair.advance(0.6)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED


def foretold(pair: Pair):
    """A reference to a hold that P's engine has not told of: the next one, in this block."""
    pair.hold("p0")
    pair.note_hold_id("p1", hold_id_of(pair.prefill.incarnation, 2))
    pair.note_held("p1", 16)
    return pair.pull_intent("p1", ((0,),))


def test_a_hold_that_will_never_begin_is_not_waited_for():
    pair = Pair(timing=Timing(handshake_timeout_s=60.0))
    intent = foretold(pair)
    pair.want("d1", dataclasses.replace(intent, hold_id=HoldId(f"{intent.hold_id}000")))
    assert pair.reserve("d1", "made up", 0, 16)
    pair.deliver_all()
    assert not pair.decode.outcomes("d1"), "it might begin in a moment"
    for _ in range(4):
        pair.advance(0.5)
        pair.deliver_all()
    assert pair.decode.outcomes("d1") == FAILED
    (reason,) = pair.decode.reasons["d1"]
    assert "not held any more" in reason


def deliver_but_reads(pair: Pair) -> None:
    while others := [item for item in pair.items if item.kind != "read"]:
        pair.deliver(others[0])


@pytest.mark.parametrize("is_begun", [False, True], ids=["unknown yet", "computing"])
def test_a_hold_that_its_engine_tells_of_late_is_confirmed_when_it_is_told(is_begun):
    # An engine in another process tells of it by a way of its own, and D may be faster.
    pair = Pair(continues=False)
    if is_begun:
        pair.hold("p1")
    else:
        pair.note_hold_id("p1", hold_id_of(pair.prefill.incarnation, 1))
    pair.note_held("p1", 16)
    blocks = ((pair.prefill.free[-1],),)
    pair.want_pull("d1", "p1", blocks)
    assert pair.reserve("d1", "ours", 0, 16)
    deliver_but_reads(pair)
    if not is_begun:
        pair.hold("p1")
    assert pair.finish("p1", "ours", 16) == blocks
    pair.deliver_kind("read")
    assert not pair.decode.outcomes("d1"), "nobody has confirmed it"
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == RECEIVED
    assert pair.prefill.outcomes("p1") == SENT


def test_digests_tell_order_groups_and_number_apart():
    one_group = [((1, 2, 3),), ((1, 3, 2),), ((1, 2),)]
    more_groups = [((1, 2), (3,)), ((1,), (2, 3)), ((), (1, 2, 3))]
    digests = {block_digest(each) for each in one_group + more_groups}
    assert len(digests) == 6
    assert {len(each) for each in digests} == {DIGEST_BYTES}
