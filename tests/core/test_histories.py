"""What is kept of earlier turns: for its time, for one, by its own id; what of it may be used."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.config import Timing
from kvcourier.core.events import HoldBegun, PrefillFinished
from kvcourier.core.histories import Miss, usable_tokens
from kvcourier.core.outcomes import Outcome
from kvcourier.core.params import History, HolderAddress, PullIntent
from kvcourier.core.token_proof import prove
from kvcourier.core.workspace import Counted
from kvcourier.ids import EngineId, HoldId, Incarnation, RequestId, hold_id_of
from kvcourier.layout.geometry import TokenSpan
from pair import Pair

KEEP_S = 100.0
RECEIVED = {Outcome.RECEIVED, Outcome.RELEASED}
FAILED = {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


def keep(pair: Pair, name: str = "r1/kept", num_tokens: int = 40):
    """Somebody's engine keeps a turn; its blocks."""
    blocks = pair.prefill.take_whole(name, num_tokens)
    pair.prefill.write("hello", blocks, TokenSpan(0, num_tokens))
    hold_id = hold_id_of(pair.prefill.incarnation, 1)
    pair.note_hold_id(name, hold_id)
    pair.note_held(name, num_tokens)
    pair.engine(pair.prefill, HoldBegun(RequestId(name), hold_id, None))
    finished = PrefillFinished(RequestId(name), blocks, num_tokens, keep_s=KEEP_S)
    pair.engine(pair.prefill, finished)
    return blocks


def fetch(pair: Pair, blocks, *, is_written: bool, name: str = "r2/fetched", stop: int = 32):
    """Another engine wants the beginning of it."""
    intent = replace(pair.pull_intent("r1/kept", blocks), is_written=is_written)
    pair.want(name, intent)
    assert pair.reserve(name, "hello", 0, stop)
    pair.deliver_all()


def count(pair: Pair, counted: Counted) -> int:
    return sum(each.counts[counted] for each in pair.prefill.endpoints.values())


@pytest.mark.parametrize("is_written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("after_s", [0.0, 31.0, 99.0])
def test_it_is_had_for_as_long_as_it_is_kept(is_written, after_s):
    pair = Pair()
    blocks = keep(pair)
    pair.advance(after_s)
    fetch(pair, blocks, is_written=is_written)
    assert pair.decode.outcomes("r2/fetched") == RECEIVED
    assert pair.prefill.outcomes("r1/kept") == {Outcome.SENT, Outcome.RELEASED}
    assert count(pair, Counted.HISTORIES_EXPIRED) == 0
    pair.settle()


def test_nobody_comes_and_that_is_no_failure():
    pair = Pair()
    keep(pair)
    pair.advance(KEEP_S - 1)
    assert not pair.prefill.outcomes("r1/kept")
    pair.advance(2.0)
    assert pair.prefill.outcomes("r1/kept") == {Outcome.RELEASED}
    assert count(pair, Counted.HISTORIES_EXPIRED) > 0
    assert count(pair, Counted.LEASES_EXPIRED) == 0
    pair.settle()


@pytest.mark.parametrize("is_written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("end", ["too late", "given up"])
def test_what_is_not_kept_any_more_is_refused_at_once(is_written, end):
    pair = Pair()
    blocks = keep(pair)
    if end == "too late":
        pair.advance(KEEP_S + 1)
    else:
        pair.abort(pair.prefill, "r1/kept")
    assert pair.prefill.outcomes("r1/kept") == {Outcome.RELEASED}
    fetch(pair, blocks, is_written=is_written)
    assert pair.decode.outcomes("r2/fetched") == FAILED
    assert any("not held any more" in reason for reason in pair.decode.reasons["r2/fetched"])
    pair.settle()


@pytest.mark.parametrize("is_written", [False, True], ids=["read", "written"])
def test_one_request_may_have_it(is_written):
    pair = Pair()
    blocks = keep(pair)
    fetch(pair, blocks, is_written=is_written)
    fetch(pair, blocks, is_written=is_written, name="r3/fetched")
    assert pair.decode.outcomes("r3/fetched") == FAILED
    pair.settle()


@pytest.mark.parametrize("is_written", [False, True], ids=["read", "written"])
def test_its_name_is_not_enough(is_written):
    pair = Pair(timing=Timing(registration_ttl_s=5.0))
    blocks = keep(pair)
    intent = replace(pair.pull_intent("r1/kept", blocks), is_written=is_written, hold_id=None)
    pair.want("r2/fetched", intent)
    assert pair.reserve("r2/fetched", "hello", 0, 32)
    for _ in range(8):
        pair.deliver_all()
        pair.advance(1.0)
    assert pair.decode.outcomes("r2/fetched") == FAILED
    assert not pair.prefill.outcomes("r1/kept")
    pair.settle()


def test_a_heartbeat_of_the_last_moment_outlives_the_time():
    """The fetch begins in time, and its blocks come later."""
    pair = Pair()
    blocks = keep(pair)
    pair.advance(KEEP_S - 1)
    pair.want("r2/fetched", pair.pull_intent("r1/kept", blocks))
    pair.deliver_all()
    for _ in range(20):
        pair.advance(1.0)
        pair.deliver_all()
    assert pair.reserve("r2/fetched", "hello", 0, 32)
    pair.deliver_all()
    assert pair.decode.outcomes("r2/fetched") == RECEIVED
    pair.settle()


# What may be used.

TOKENS = list(range(100, 200))


def history(tokens=TOKENS, **changes) -> History:
    """Of so many tokens, in full or with something missing."""
    proof = changes.pop("proof", prove(tokens))
    source = PullIntent(
        HolderAddress(EngineId("d"), "h", 1, 1, 1),
        RequestId("r1/kept"),
        ((1, 2),),
        len(tokens),
        HoldId("life:1"),
        Incarnation("life"),
        None,
    )
    return History(replace(source, **changes), proof)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 64))
def test_what_may_be_used_is_what_is_the_same_and_not_the_last_token(num_same, num_more, threshold):
    prompt = [*TOKENS[:num_same], *range(1, num_more + 2)]
    same = num_same // 16 * 16
    found = usable_tokens(history(), prompt, threshold)
    if isinstance(found, Miss):
        assert min(same, len(prompt) - 1) < threshold
        assert found in (Miss.REWRITTEN, Miss.NOT_NEEDED)
    else:
        assert threshold <= found <= same < len(prompt)


@pytest.mark.parametrize(
    "missing",
    [
        {"proof": None},
        {"hold_id": None},
        {"incarnation": None},
        {"num_tokens": None},
        {"block_ids": ((),)},
    ],
    ids=str,
)
def test_what_says_too_little_is_not_used(missing):
    assert usable_tokens(history(**missing), [*TOKENS, 1], 16) is Miss.UNPROVEN


def test_no_more_is_used_than_is_held():
    assert usable_tokens(history(num_tokens=20), [*TOKENS, 1], 16) == 20


def test_why_a_history_is_not_used():
    other = [7, *TOKENS[1:]]
    assert usable_tokens(history(), other, 64) is Miss.REWRITTEN
    assert usable_tokens(history(), TOKENS[:40], 64) is Miss.NOT_NEEDED
    assert usable_tokens(history(TOKENS[:40]), [*TOKENS, 1], 64) is Miss.NOT_NEEDED
