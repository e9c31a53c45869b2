"""What happens next in one dispatch of a call to P and D.

Decides, for every event of the two legs and of the client, which legs start and end and what the
client gets. Refuses to know HTTP clients, tasks and clocks: a driver posts events and performs
actions in order (`attempt`).

    late:  PREFILLING --P's handoff--> WAITING --D's first bytes--> STREAMING --> ENDED
    near:  PREFILLING --P nearly done-> WAITING --D's first bytes--> STREAMING --> ENDED
    early:                             WAITING --D's first bytes--> STREAMING --> ENDED

A pull is bound late and a push early, unless the call says otherwise. Bound early or near, P runs
beside D through WAITING and may still run in STREAMING. In WAITING the prompt may be bound anew:
D's leg has failed, P has the KV or computes it, and another D gets the same params. A call that
needs no P begins in WAITING as well. Whatever is not in the table changes nothing.
"""

import enum
from collections.abc import Callable, Mapping

from kvcourier.config import Binding
from kvcourier.router.events import (
    REBINDABLE,
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
    RouterStopped,
    StartDecode,
    StartPrefill,
    StreamEnding,
    TimeUp,
    WatchDecode,
    may_do_better,
)
from kvcourier.router.legs import (
    HANDOFF_KEYS,
    Call,
    Params,
    bound,
    early_params,
    late_params,
    read_handoff,
)


class Phase(enum.Enum):
    """Where a dispatch stands; see the module's docstring."""

    PREFILLING = enum.auto()
    WAITING = enum.auto()
    STREAMING = enum.auto()
    ENDED = enum.auto()


class Dispatch:
    """The state of one dispatch. `start` once, then `handle` each event, in order."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._params: Params = {}
        self._told_early = call.when is Binding.EARLY and not call.is_alone
        self._has_prefill = call.is_alone
        self._num_bound = 0
        self._failed: tuple[LegLost, Answer | None] | None = None
        starts_waiting = call.is_alone or call.when is Binding.EARLY
        self.phase = Phase.WAITING if starts_waiting else Phase.PREFILLING

    def start(self) -> list[Action]:
        """The first actions.

        Raises:
            ValueError: bound before P has answered, without coordinates.
        """
        call = self._call
        if call.is_alone:
            return [self._bind({})]
        if call.when is Binding.LATE:
            return [StartPrefill()]
        if call.coordinates is None:
            raise ValueError(f"{call.when} binding needs the prefill instance's coordinates")
        if call.when is Binding.NEAR:
            return [StartPrefill(), AwaitNear()]
        return [StartPrefill(), self._bind(early_params(call, call.coordinates))]

    def handle(self, event: Event) -> list[Action]:
        """What to do about `event`; nothing if the dispatch has ended and it is no news."""
        reaction = _TABLE.get((self.phase, type(event)))
        return reaction(self, event) if reaction else []

    def _bind(self, params: Params) -> StartDecode:
        """D, or the next one, gets its leg."""
        self._params = params
        self._num_bound += 1
        return StartDecode(bound(self._call, params, self._num_bound - 1))

    # One method per reaction. `event` has the type of the table's key.

    def _start_decode(self, event: PrefillAnswered) -> list[Action]:
        problem = judge_prefill(self._call, event.answer, told_early=False)
        if problem is not None:
            return self._fail_prefill(event.answer, problem)
        handoff = read_handoff(event.answer.content)
        assert handoff is not None, "judge_prefill lets no answer without a handoff pass"
        self.phase = Phase.WAITING
        self._has_prefill = True
        return [self._bind(late_params(self._call, handoff)), *self._watched()]

    def _start_decode_near(self, _event: PrefillNear) -> list[Action]:
        assert self._call.coordinates is not None, "start would have refused"
        self.phase = Phase.WAITING
        self._told_early = True
        return [self._bind(early_params(self._call, self._call.coordinates))]

    def _check_prefill(self, event: PrefillAnswered) -> list[Action]:
        if not self._told_early:
            return []
        problem = judge_prefill(self._call, event.answer, told_early=True)
        if problem is not None:
            return self._fail_prefill(event.answer, problem)
        self._has_prefill = True
        return self._watched()

    def _watched(self) -> list[Action]:
        """From now on D has all it needs, if it may be followed by another."""
        return [WatchDecode()] if self._may_rebind else []

    @property
    def _may_rebind(self) -> bool:
        return self._num_bound <= self._call.max_rebinds

    def _rebind(self, problem: LegLost, answer: Answer | None) -> list[Action]:
        """Another D for the same prompt; under the same transfer id, for that is P's name of it."""
        self._failed = problem, answer
        note = Note(problem.leg, problem.kind, problem.reason, rebound=True)
        start = self._bind(self._params)
        watched = self._watched() if self._has_prefill else []
        return [Cancel(LegName.DECODE), note, start, *watched]

    def _stalled(self, _event: DecodeStalled) -> list[Action]:
        if not (self._may_rebind and self._has_prefill):
            return []
        reason = "did not begin its answer, and another is less busy"
        return self._rebind(LegLost(LegName.DECODE, FailureKind.STALLED, reason), None)

    def _lost(self, event: LegLost) -> list[Action]:
        is_decode = event.leg is LegName.DECODE
        if is_decode and event.kind is FailureKind.NO_INSTANCE and self._failed is not None:
            # Nobody is left: what matters is why the last one failed. It is noted already.
            problem, answer = self._failed
            ending = self._fail(problem) if answer is None else self._refused(problem, answer)
            return [action for action in ending if not isinstance(action, Note)]
        if is_decode and self._may_rebind and event.kind in REBINDABLE:
            return self._rebind(event, None)
        return self._fail(event)

    def _note_prefill(self, event: PrefillAnswered) -> list[Action]:
        problem = judge_prefill(self._call, event.answer, self._told_early)
        return [] if problem is None else [_note(problem)]

    def _fail_prefill(self, answer: Answer, problem: LegLost) -> list[Action]:
        if problem.kind is not FailureKind.STATUS or answer.status < 400:
            return self._fail(problem)
        return self._refused(problem, answer)

    def _refused(self, problem: LegLost, answer: Answer) -> list[Action]:
        """An instance answered with an error: the client's, unless another one may do better."""
        self.phase = Phase.ENDED
        other = {LegName.PREFILL: LegName.DECODE, LegName.DECODE: LegName.PREFILL}[problem.leg]
        error = ReplyError(problem.leg, problem.kind, problem.reason, answer)
        return [
            Cancel(other),
            _note(problem),
            error if error.retryable else Reply(answer),
            Finish(CallOutcome.UPSTREAM_ERROR),
        ]

    def _fail(self, event: LegLost) -> list[Action]:
        self.phase = Phase.ENDED
        return [
            *_CANCEL_BOTH,
            _note(event),
            ReplyError(event.leg, event.kind, event.reason),
            Finish(CallOutcome.FAILED),
        ]

    def _answer(self, event: DecodeAnswered) -> list[Action]:
        answer = event.answer
        if answer.ok:
            self.phase = Phase.ENDED
            # Bound early, P may not have told yet that it is done; it is left to.
            return [Reply(answer), Finish(CallOutcome.OK)]
        kind = FailureKind.NO_KV if answer.lacks_kv else FailureKind.STATUS
        problem = LegLost(LegName.DECODE, kind, f"answered {answer.status}")
        # One that comes after another and gets no KV: P has it no more, since the one before had
        # received it and failed then. Only computing it anew helps.
        is_lost = answer.lacks_kv and self._num_bound > 1
        if self._may_rebind and may_do_better(kind, answer) and not is_lost:
            return self._rebind(problem, answer)
        return self._fail(problem) if answer.status < 400 else self._refused(problem, answer)

    def _relay(self, _event: DecodeStreaming) -> list[Action]:
        self.phase = Phase.STREAMING
        return [Relay()]

    def _end_stream(self, event: DecodeEnded) -> list[Action]:
        if event.ending is StreamEnding.TORN:
            reason = "ended the stream without [DONE]"
            return self._break(LegLost(LegName.DECODE, FailureKind.INCOMPLETE, reason))
        self.phase = Phase.ENDED
        if event.ending is StreamEnding.DONE:
            return [EndStream(), Finish(CallOutcome.OK)]
        reason = "ended the stream with an error"
        return [
            *_CANCEL_BOTH,
            Note(LegName.DECODE, FailureKind.ERROR_TOLD, reason),
            EndStream(),
            Finish(CallOutcome.BROKEN_STREAM),
        ]

    def _lost_while_streaming(self, event: LegLost) -> list[Action]:
        # D has every byte it needs once it streams: P's end is only worth a note.
        return [_note(event)] if event.leg is LegName.PREFILL else self._break(event)

    def _break(self, event: LegLost) -> list[Action]:
        self.phase = Phase.ENDED
        return [
            *_CANCEL_BOTH,
            _note(event),
            BreakStream(event.kind, event.reason),
            Finish(CallOutcome.BROKEN_STREAM),
        ]

    def _leave(self, _event: ClientLeft) -> list[Action]:
        self.phase = Phase.ENDED
        return [*_CANCEL_BOTH, Finish(CallOutcome.CLIENT_LEFT)]

    def _cut_short(self, event: TimeUp | RouterStopped) -> list[Action]:
        prefilling = self.phase is Phase.PREFILLING
        leg = LegName.PREFILL if prefilling else LegName.DECODE
        lost = LegLost(leg, *_CUTS[type(event)])
        return self._break(lost) if self.phase is Phase.STREAMING else self._fail(lost)

    def _note_late(self, event: LegLost) -> list[Action]:
        return [_note(event)] if event.leg is LegName.PREFILL else []


_CANCEL_BOTH = (Cancel(LegName.DECODE), Cancel(LegName.PREFILL))


def _note(problem: LegLost) -> Note:
    return Note(problem.leg, problem.kind, problem.reason)


def judge_prefill(call: Call, answer: Answer, told_early: bool) -> LegLost | None:
    """Why D cannot use P's answer, or None if it can; `told_early`: it has its params already."""
    if not answer.ok:
        return _prefill_problem(FailureKind.STATUS, f"answered {answer.status}")
    try:
        handoff = read_handoff(answer.content)
    except ValueError:
        return _prefill_problem(FailureKind.UNREADABLE, "did not answer with a JSON object")
    if handoff is None:
        return _prefill_problem(
            FailureKind.NO_HANDOFF,
            "answered without kv_transfer_params, so the decode instance would compute the whole "
            "prompt again; is a KV connector configured there?",
        )
    said = handoff.get("transfer_mode")
    if said is not None and said != call.mode and not call.modes_known:
        return _prefill_problem(
            FailureKind.WRONG_MODE, f"takes part in {said} only; this call asks for {call.mode}"
        )
    return _judge_early(call, handoff) if told_early else _judge_late(handoff)


def _judge_late(handoff: Params) -> LegLost | None:
    missing = [key for key in HANDOFF_KEYS if handoff.get(key) is None]
    if not missing:
        return None
    return _prefill_problem(
        FailureKind.NO_HANDOFF, f"left {', '.join(missing)} out of its kv_transfer_params"
    )


def _judge_early(call: Call, handoff: Params) -> LegLost | None:
    """D was told where P is before P answered; both must mean the same place."""
    told = call.coordinates
    if told is None:
        return None
    for key, expected in (("remote_engine_id", told.engine_id), ("remote_port", told.port)):
        found = handoff.get(key)
        if found is not None and found != expected:
            return _prefill_problem(
                FailureKind.STALE_COORDINATES,
                f"says {key} {found!r}, but the decode instance was told {expected!r}; it was "
                "restarted just now, or its coordinates are configured wrongly",
            )
    return None


def _prefill_problem(kind: FailureKind, reason: str) -> LegLost:
    return LegLost(LegName.PREFILL, kind, reason)


_CUTS: Mapping[type, tuple[FailureKind, str]] = {
    TimeUp: (FailureKind.TIMEOUT, "was not done within the total time of a call"),
    RouterStopped: (FailureKind.ROUTER_STOPPED, "was not done when the router was stopped"),
}
_LIVE = (Phase.PREFILLING, Phase.WAITING, Phase.STREAMING)
_UNANSWERED = (Phase.PREFILLING, Phase.WAITING)

_TABLE: Mapping[tuple[Phase, type], Callable[..., list[Action]]] = {
    (Phase.PREFILLING, PrefillAnswered): Dispatch._start_decode,
    (Phase.WAITING, PrefillAnswered): Dispatch._check_prefill,
    (Phase.STREAMING, PrefillAnswered): Dispatch._note_prefill,
    (Phase.ENDED, PrefillAnswered): Dispatch._note_prefill,
    (Phase.WAITING, DecodeAnswered): Dispatch._answer,
    (Phase.WAITING, DecodeStreaming): Dispatch._relay,
    (Phase.STREAMING, DecodeEnded): Dispatch._end_stream,
    (Phase.PREFILLING, PrefillNear): Dispatch._start_decode_near,
    (Phase.WAITING, DecodeStalled): Dispatch._stalled,
    **dict.fromkeys([(phase, LegLost) for phase in _UNANSWERED], Dispatch._lost),
    (Phase.STREAMING, LegLost): Dispatch._lost_while_streaming,
    (Phase.ENDED, LegLost): Dispatch._note_late,
    **dict.fromkeys([(phase, ClientLeft) for phase in _LIVE], Dispatch._leave),
    **dict.fromkeys([(phase, cut) for phase in _LIVE for cut in _CUTS], Dispatch._cut_short),
}
