"""The pure dispatch: what follows from what, for any order of events."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.config import TransferMode
from kvcourier.ids import EngineId, RequestId, TransferId
from kvcourier.router.config import Coordinates
from kvcourier.router.dispatch import Dispatch, Phase
from kvcourier.router.events import (
    RETRYABLE,
    RETRYABLE_STATUSES,
    STATUS_OF,
    Action,
    Answer,
    BreakStream,
    CallOutcome,
    Cancel,
    ClientLeft,
    DecodeAnswered,
    DecodeEnded,
    DecodeStreaming,
    EndStream,
    Event,
    FailureKind,
    Finish,
    LegLost,
    LegName,
    Note,
    PrefillAnswered,
    Relay,
    Reply,
    ReplyError,
    StartDecode,
    StartPrefill,
    StreamEnding,
    TimeUp,
    verdict,
)
from kvcourier.router.legs import HANDOFF_KEYS, Call

PULL, PUSH = TransferMode.PULL, TransferMode.PUSH
WHERE = Coordinates(EngineId("p"), "host", 5600, 2, 1)
HANDOFF: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "p",
    "remote_request_id": "r",
    "remote_host": "host",
    "remote_port": 5600,
}


def call(mode: TransferMode, modes_known: bool = False) -> Call:
    return Call(mode, TransferId("t"), RequestId("r"), {}, (), WHERE, modes_known=modes_known)


def handed(**changes: Any) -> PrefillAnswered:
    content = json.dumps({"kv_transfer_params": HANDOFF | changes}).encode()
    return PrefillAnswered(Answer(200, "application/json", content))


def refused(status: int) -> Answer:
    return Answer(status, "application/json", b"no")


LOST_P = LegLost(LegName.PREFILL, FailureKind.DROPPED, "died")
LOST_D = LegLost(LegName.DECODE, FailureKind.DROPPED, "died")
WHOLE = DecodeAnswered(Answer(200, "application/json", b"{}"))


def run(mode: TransferMode, *events: Event) -> list[Action]:
    """Actions of the last event."""
    dispatch = Dispatch(call(mode))
    actions = dispatch.start()
    for event in events:
        actions = dispatch.handle(event)
    return actions


def outcome(actions: list[Action]) -> CallOutcome | None:
    return next((action.outcome for action in actions if isinstance(action, Finish)), None)


def test_pull_starts_decode_with_what_p_answered() -> None:
    assert run(PULL) == [StartPrefill()]
    assert run(PULL, handed()) == [StartDecode(HANDOFF | {"transfer_id": "t"})]
    assert run(PULL, handed(transfer_id="own")) == [StartDecode(HANDOFF | {"transfer_id": "own"})]


def test_push_starts_both_at_once() -> None:
    start_p, start_d = run(PUSH)
    assert start_p == StartPrefill()
    assert isinstance(start_d, StartDecode)
    assert start_d.params["remote_engine_id"] == "p"
    assert "remote_block_ids" not in start_d.params
    with pytest.raises(ValueError, match="coordinates"):
        Dispatch(Call(PUSH, TransferId("t"), RequestId("r"), {})).start()


@pytest.mark.parametrize("mode", TransferMode)
def test_a_stream_from_begin_to_end(mode: TransferMode) -> None:
    begun = [handed(), DecodeStreaming()]
    assert run(mode, *begun) == [Relay()]
    assert run(mode, *begun, DecodeEnded(StreamEnding.DONE)) == [
        EndStream(),
        Finish(CallOutcome.OK),
    ]
    torn = run(mode, *begun, DecodeEnded(StreamEnding.TORN))
    assert any(isinstance(action, BreakStream) for action in torn)
    assert outcome(torn) is CallOutcome.BROKEN_STREAM


def test_an_error_that_d_tells_is_not_told_twice() -> None:
    actions = run(PUSH, DecodeStreaming(), DecodeEnded(StreamEnding.ERROR_TOLD))
    assert EndStream() in actions
    assert not any(isinstance(action, BreakStream) for action in actions)
    assert outcome(actions) is CallOutcome.BROKEN_STREAM


def test_a_whole_answer_leaves_p_to_finish() -> None:
    assert run(PUSH, WHOLE) == [Reply(WHOLE.answer), Finish(CallOutcome.OK)]


def test_errors_of_either_cancel_the_other() -> None:
    for answer in (refused(400), refused(500)):
        actions = run(PUSH, PrefillAnswered(answer))
        assert actions[0] == Cancel(LegName.DECODE)
        assert Reply(answer) in actions
        actions = run(PUSH, DecodeAnswered(answer))
        assert actions[0] == Cancel(LegName.PREFILL)
        assert Reply(answer) in actions


@pytest.mark.parametrize("status", sorted(RETRYABLE_STATUSES))
def test_an_answer_that_another_instance_may_not_give_is_kept_for_a_retry(status: int) -> None:
    answer = refused(status)
    for leg, event in (
        (LegName.PREFILL, PrefillAnswered(answer)),
        (LegName.DECODE, DecodeAnswered(answer)),
    ):
        actions = run(PUSH, event)
        error = next(action for action in actions if isinstance(action, ReplyError))
        assert error.retryable and (error.leg, error.answer) == (leg, answer)
        assert outcome(actions) is CallOutcome.UPSTREAM_ERROR


def test_whose_fault_it_is() -> None:
    said = {
        PrefillAnswered(refused(500)): (LegName.PREFILL, False),
        PrefillAnswered(refused(400)): (LegName.PREFILL, True),
        DecodeAnswered(refused(429)): None,
        DecodeAnswered(Answer(503, "x", b'{"code": "kv_transfer_failed"}')): None,
        DecodeAnswered(refused(503)): (LegName.DECODE, False),
        DecodeStreaming(): (LegName.DECODE, True),
        DecodeEnded(StreamEnding.TORN): (LegName.DECODE, False),
        DecodeEnded(StreamEnding.DONE): None,
        LOST_P: (LegName.PREFILL, False),
        LegLost(LegName.DECODE, FailureKind.WRONG_MODE, "x"): None,
        ClientLeft(): None,
    }
    for event, expected in said.items():
        assert verdict(event) == expected, event


@pytest.mark.parametrize("status", [302, 304])
def test_a_redirect_is_no_answer_for_a_client(status: int) -> None:
    for event in (PrefillAnswered(refused(status)), DecodeAnswered(refused(status))):
        actions = run(PUSH, event)
        (error,) = [action for action in actions if isinstance(action, ReplyError)]
        assert STATUS_OF[error.kind] == 502


@pytest.mark.parametrize("key", HANDOFF_KEYS)
def test_each_key_that_d_needs_is_asked_for(key: str) -> None:
    actions = run(PULL, handed(**{key: None}))
    (error,) = [action for action in actions if isinstance(action, ReplyError)]
    assert error.kind is FailureKind.NO_HANDOFF
    assert key in error.reason


@pytest.mark.parametrize(
    ("mode", "changes", "known", "kind"),
    [
        (PULL, {"transfer_mode": "pull"}, False, None),
        (PULL, {"transfer_mode": "push"}, False, FailureKind.WRONG_MODE),
        (PUSH, {"transfer_mode": "pull"}, False, FailureKind.WRONG_MODE),
        (PUSH, {"transfer_mode": "pull"}, True, None),
        (PUSH, {"remote_engine_id": "q"}, False, FailureKind.STALE_COORDINATES),
        (PUSH, {"remote_port": 5601}, True, FailureKind.STALE_COORDINATES),
        (PULL, {"remote_engine_id": "q"}, False, None),
        (PUSH, {"remote_block_ids": None}, False, None),
    ],
)
def test_what_p_says_must_fit(
    mode: TransferMode, changes: dict[str, Any], known: bool, kind: FailureKind | None
) -> None:
    dispatch = Dispatch(call(mode, known))
    dispatch.start()
    errors = [a for a in dispatch.handle(handed(**changes)) if isinstance(a, ReplyError)]
    assert [error.kind for error in errors] == ([] if kind is None else [kind])


def test_p_failing_after_d_streams_is_only_noted() -> None:
    for event in (LOST_P, PrefillAnswered(refused(500))):
        (note,) = run(PUSH, DecodeStreaming(), event)
        assert isinstance(note, Note) and note.leg is LegName.PREFILL
    (late,) = run(PUSH, WHOLE, LOST_P)
    assert isinstance(late, Note)


def test_only_connections_can_be_retried() -> None:
    for kind in FailureKind:
        lost = LegLost(LegName.PREFILL, kind, "x")
        (error,) = [a for a in run(PULL, lost) if isinstance(a, ReplyError)]
        assert error.retryable == (kind in {FailureKind.CONNECT, FailureKind.DROPPED})
        assert 500 <= STATUS_OF[kind] < 600
    assert set(FailureKind) > RETRYABLE


# Properties, over any order of events that two legs, a client and a clock can produce.

PREFILL_RESULTS = st.sampled_from(
    [
        handed(),
        handed(remote_host=None),
        handed(remote_engine_id="q"),
        PrefillAnswered(Answer(200, "x", b"{}")),
        PrefillAnswered(Answer(200, "x", b"<")),
        PrefillAnswered(refused(500)),
        PrefillAnswered(refused(400)),
        PrefillAnswered(refused(503)),
        LOST_P,
    ]
)
DECODE_RESULTS: st.SearchStrategy[list[Event]] = st.sampled_from(
    [
        [WHOLE],
        [DecodeAnswered(refused(400))],
        [DecodeAnswered(refused(503))],
        [LOST_D],
        [DecodeStreaming(), DecodeEnded(StreamEnding.DONE)],
        [DecodeStreaming(), DecodeEnded(StreamEnding.TORN)],
        [DecodeStreaming(), DecodeEnded(StreamEnding.ERROR_TOLD)],
        [DecodeStreaming(), LOST_D],
    ]
)


@settings(derandomize=True, deadline=None)
@given(st.data(), st.sampled_from(TransferMode))
def test_any_order_ends_in_one_answer_and_leaves_no_leg(
    data: st.DataObject, mode: TransferMode
) -> None:
    """A driver in small: legs post their events only while they run."""
    dispatch = Dispatch(call(mode))
    waiting: dict[str, list[Event]] = {}
    log: list[Action] = []

    def perform(actions: list[Action]) -> None:
        for action in actions:
            log.append(action)
            if isinstance(action, StartPrefill):
                waiting["prefill"] = [data.draw(PREFILL_RESULTS)]
            elif isinstance(action, StartDecode):
                waiting["decode"] = list(data.draw(DECODE_RESULTS))
            elif isinstance(action, Cancel):
                waiting.pop(action.leg, None)

    perform(dispatch.start())
    extra: list[Event] = data.draw(st.lists(st.sampled_from([ClientLeft(), TimeUp()]), max_size=1))
    while any(waiting.values()):
        sources = sorted(leg for leg, events in waiting.items() if events)
        source = data.draw(st.sampled_from(sources + ["extra"] * len(extra)))
        event = extra.pop() if source == "extra" else waiting[source].pop(0)
        perform(dispatch.handle(event))

    kinds = [type(action) for action in log]
    assert dispatch.phase is Phase.ENDED
    assert kinds.count(Finish) == 1
    replies = kinds.count(Reply) + kinds.count(ReplyError)
    ends = kinds.count(EndStream) + kinds.count(BreakStream)
    relayed = kinds.count(Relay)
    # Either one whole answer, or one stream with one end, or a client that did not wait for it.
    if outcome(log) is CallOutcome.CLIENT_LEFT:
        assert (replies, ends) == (0, 0)
    else:
        assert replies + relayed == 1
        assert ends == relayed
    # Nothing but a note follows the end.
    after = log[kinds.index(Finish) + 1 :]
    assert all(isinstance(action, Note) for action in after)
    assert kinds.count(StartPrefill) == 1
    assert kinds.count(StartDecode) <= 1
    # Whoever failed, the client is told so, unless D had already streamed or answered well.
    if outcome(log) is CallOutcome.OK:
        assert ends == 1 or Reply(WHOLE.answer) in log
    # D never runs on in a dispatch that has failed; nor does P.
    if outcome(log) in (CallOutcome.FAILED, CallOutcome.CLIENT_LEFT, CallOutcome.BROKEN_STREAM):
        assert Cancel(LegName.DECODE) in log and Cancel(LegName.PREFILL) in log


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(TransferMode), st.lists(st.one_of(PREFILL_RESULTS, DECODE_RESULTS)))
def test_nothing_it_is_told_after_the_end_changes_anything(
    mode: TransferMode, late: list[Any]
) -> None:
    dispatch = Dispatch(call(mode))
    dispatch.start()
    dispatch.handle(ClientLeft())
    for item in late:
        for event in item if isinstance(item, list) else [item]:
            assert all(isinstance(action, Note) for action in dispatch.handle(event))
            assert dispatch.phase is Phase.ENDED
