"""The pure dispatch: what follows from what, for any order of events."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.config import Binding, TransferMode
from kvcourier.ids import EngineId, RequestId, TransferId
from kvcourier.router.config import Coordinates
from kvcourier.router.dispatch import Dispatch, Phase
from kvcourier.router.events import (
    RETRYABLE,
    RETRYABLE_STATUSES,
    STATUS_OF,
    Action,
    Answer,
    AwaitNear,
    BreakStream,
    CallOutcome,
    Cancel,
    ClientLeft,
    DecodeAnswered,
    DecodeEnded,
    DecodeStalled,
    DecodeStreaming,
    EndStream,
    Event,
    FailureKind,
    Finish,
    LegLost,
    LegName,
    Note,
    PrefillAnswered,
    PrefillNear,
    Relay,
    Reply,
    ReplyError,
    StartDecode,
    StartPrefill,
    StreamEnding,
    TimeUp,
    WatchDecode,
    verdict,
)
from kvcourier.router.legs import HANDOFF_KEYS, Call, prefill_params

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


def call(mode: TransferMode, modes_known: bool = False, **options: Any) -> Call:
    return Call(
        mode, TransferId("t"), RequestId("r"), {}, (), WHERE, modes_known=modes_known, **options
    )


def handed(**changes: Any) -> PrefillAnswered:
    content = json.dumps({"kv_transfer_params": HANDOFF | changes}).encode()
    return PrefillAnswered(Answer(200, "application/json", content))


def refused(status: int) -> Answer:
    return Answer(status, "application/json", b"no")


LOST_P = LegLost(LegName.PREFILL, FailureKind.DROPPED, "died")
LOST_D = LegLost(LegName.DECODE, FailureKind.DROPPED, "died")
WHOLE = DecodeAnswered(Answer(200, "application/json", b"{}"))


def run(mode: TransferMode, *events: Event, **options: Any) -> list[Action]:
    """Actions of the last event."""
    dispatch = Dispatch(call(mode, **options))
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


# Bound near, bound anew, and without P.

NEAR = {"binding": Binding.NEAR}


@pytest.mark.parametrize("mode", TransferMode)
def test_near_waits_for_word_of_p(mode: TransferMode) -> None:
    assert run(mode, **NEAR) == [StartPrefill(), AwaitNear()]
    (start,) = run(mode, PrefillNear(), **NEAR)
    assert isinstance(start, StartDecode)
    assert start.params["remote_engine_id"] == "p" and "remote_block_ids" not in start.params
    assert start.params.get("transfer_mode") == ("pull" if mode is PULL else None)
    # P was quicker than expected: D gets what P says, once.
    (start,) = run(mode, handed(), **NEAR)
    assert isinstance(start, StartDecode) and start.params["remote_request_id"] == "r"
    assert run(mode, handed(), PrefillNear(), **NEAR) == []
    # D was told early, so P's answer must name the same place.
    stale = run(mode, PrefillNear(), handed(remote_engine_id="q"), **NEAR)
    assert any(isinstance(action, ReplyError) for action in stale)


DEAD_D = [
    LOST_D,
    LegLost(LegName.DECODE, FailureKind.CONNECT, "refused"),
    LegLost(LegName.DECODE, FailureKind.INCOMPLETE, "empty"),
    DecodeAnswered(refused(503)),
    DecodeAnswered(refused(429)),
]


@pytest.mark.parametrize("event", DEAD_D, ids=str)
@pytest.mark.parametrize("binding", Binding)
@pytest.mark.parametrize("mode", TransferMode)
def test_another_d_gets_the_same_prompt(mode: TransferMode, binding: Binding, event: Event) -> None:
    options = {"binding": binding, "max_rebinds": 1}
    dispatch = Dispatch(call(mode, **options))
    began = dispatch.start()
    if binding is Binding.NEAR:
        began = dispatch.handle(PrefillNear())
    if binding is Binding.LATE:
        began = dispatch.handle(handed())
    first = next(action for action in began if isinstance(action, StartDecode))
    assert first.params["binding"] == 0
    cancel, note, second, *watch = dispatch.handle(event)
    assert cancel == Cancel(LegName.DECODE)
    assert isinstance(note, Note) and note.rebound
    assert second == StartDecode(first.params | {"binding": 1})
    # It is watched from when it has all it needs; the second is the last.
    assert watch == []
    ending = dispatch.handle(event)
    assert outcome(ending) in (CallOutcome.FAILED, CallOutcome.UPSTREAM_ERROR)
    assert dispatch.phase is Phase.ENDED


def test_what_another_d_would_refuse_as_well_ends_the_call() -> None:
    for event in (DecodeAnswered(refused(400)), DecodeAnswered(refused(500))):
        assert outcome(run(PUSH, event, max_rebinds=9)) is CallOutcome.UPSTREAM_ERROR
    timeout = LegLost(LegName.DECODE, FailureKind.TIMEOUT, "late")
    assert outcome(run(PUSH, timeout, max_rebinds=9)) is CallOutcome.FAILED


def test_when_no_other_d_is_left_the_client_reads_why_the_last_one_failed() -> None:
    nobody = LegLost(LegName.DECODE, FailureKind.NO_INSTANCE, "is left")
    for event, kind in ((LOST_D, FailureKind.DROPPED), (DecodeAnswered(refused(503)), None)):
        actions = run(PUSH, event, nobody, max_rebinds=3)
        error = next(action for action in actions if isinstance(action, ReplyError))
        assert error.leg is LegName.DECODE
        assert error.kind is (kind or FailureKind.STATUS)
        assert (error.answer is None) == (kind is not None)
        assert not any(isinstance(action, Note) for action in actions), "it is noted already"


def test_kv_that_p_has_no_more_is_not_asked_for_again() -> None:
    """The first D had received it, and died then; P computes it anew in another dispatch."""
    no_kv = DecodeAnswered(Answer(503, "x", b'{"error": {"code": "kv_transfer_failed"}}'))
    assert any(isinstance(action, StartDecode) for action in run(PUSH, no_kv, max_rebinds=3))
    actions = run(PUSH, LOST_D, no_kv, max_rebinds=3)
    (error,) = [action for action in actions if isinstance(action, ReplyError)]
    assert error.kind is FailureKind.NO_KV and error.retryable


def test_a_d_that_stalls_is_left_for_another_once_p_has_answered() -> None:
    options = {"max_rebinds": 1}
    assert run(PUSH, handed(), **options) == [WatchDecode()]
    assert run(PUSH, DecodeStalled(), **options) == [], "P may be the slow one"
    actions = run(PUSH, handed(), DecodeStalled(), **options)
    assert actions[0] == Cancel(LegName.DECODE)
    assert any(isinstance(action, StartDecode) for action in actions)
    assert run(PULL, handed(), DecodeStreaming(), DecodeStalled(), **options) == []
    assert run(PUSH, handed()) == [], "nobody is watched who cannot be followed"


def test_p_is_told_that_the_prompt_may_be_bound_anew() -> None:
    assert prefill_params(call(PUSH, max_rebinds=1))["rebindable"] is True
    assert "rebindable" not in prefill_params(call(PUSH))
    (_, start) = run(PUSH)
    assert "binding" not in start.params  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", TransferMode)
def test_alone_d_gets_the_clients_body_and_may_be_followed(mode: TransferMode) -> None:
    assert run(mode, is_alone=True) == [StartDecode({})]
    assert run(mode, WHOLE, is_alone=True) == [Reply(WHOLE.answer), Finish(CallOutcome.OK)]
    actions = run(mode, LOST_D, is_alone=True, max_rebinds=1)
    assert StartDecode({}) in actions


# Properties, over any order of events that two legs, a client and a clock can produce.

NOBODY = LegLost(LegName.DECODE, FailureKind.NO_INSTANCE, "is left")
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


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    st.data(),
    st.sampled_from(TransferMode),
    st.sampled_from(Binding),
    st.integers(0, 2),
    st.sampled_from([False, False, True]),
)
def test_any_order_ends_in_one_answer_and_leaves_no_leg(
    data: st.DataObject, mode: TransferMode, binding: Binding, rebinds: int, alone: bool
) -> None:
    """A driver in small: legs post their events only while they run."""
    dispatch = Dispatch(call(mode, binding=binding, max_rebinds=rebinds, is_alone=alone))
    num_instances = data.draw(st.integers(1, 3))
    waiting: dict[str, list[Event]] = {}
    log: list[Action] = []

    def perform(actions: list[Action]) -> None:
        for action in actions:
            log.append(action)
            if isinstance(action, StartPrefill):
                waiting["prefill"] = [data.draw(PREFILL_RESULTS)]
            elif isinstance(action, AwaitNear):
                waiting["near"] = [PrefillNear()]
            elif isinstance(action, WatchDecode):
                waiting["stall"] = [DecodeStalled()]
            elif isinstance(action, StartDecode):
                assert not waiting.get("decode"), "two legs to D at a time"
                is_left = sum(isinstance(each, StartDecode) for each in log) <= num_instances
                waiting["decode"] = list(data.draw(DECODE_RESULTS)) if is_left else [NOBODY]
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
    assert kinds.count(StartPrefill) == (not alone)
    assert kinds.count(StartDecode) <= 1 + rebinds
    numbers = [action.params.get("binding") for action in log if isinstance(action, StartDecode)]
    assert numbers == ([None] * len(numbers) if alone or not rebinds else [*range(len(numbers))])
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
