"""The words between a dispatch and its driver: events in, actions out.

Decides the closed sets of both, of the ways a leg can fail, and which of those a client sees as
which status. Refuses to know what follows from what (`dispatch`) and how it is done (`attempt`).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from kvcourier.router.legs import Params


class LegName(enum.StrEnum):
    """One of the two requests of a dispatch."""

    PREFILL = "prefill"
    DECODE = "decode"


class FailureKind(enum.StrEnum):
    """How a leg failed; a label of the failure counter."""

    CONNECT = "connect"
    DROPPED = "dropped"
    TIMEOUT = "timeout"
    ROUTER_STOPPED = "router_stopped"
    STATUS = "status"
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    NO_HANDOFF = "no_handoff"
    WRONG_MODE = "wrong_mode"
    STALE_COORDINATES = "stale_coordinates"
    INCOMPLETE = "incomplete"
    ERROR_TOLD = "error_told"
    STALLED = "stalled"
    NO_KV = "no_kv"
    NO_INSTANCE = "no_instance"


STATUS_OF: Mapping[FailureKind, int] = {
    FailureKind.CONNECT: 503,
    FailureKind.DROPPED: 502,
    FailureKind.TIMEOUT: 504,
    FailureKind.ROUTER_STOPPED: 503,
    FailureKind.STATUS: 502,
    FailureKind.UNREADABLE: 502,
    FailureKind.TOO_LARGE: 502,
    FailureKind.NO_HANDOFF: 502,
    FailureKind.WRONG_MODE: 502,
    FailureKind.STALE_COORDINATES: 502,
    FailureKind.INCOMPLETE: 502,
    FailureKind.ERROR_TOLD: 502,
    FailureKind.STALLED: 504,
    FailureKind.NO_KV: 503,
    FailureKind.NO_INSTANCE: 503,
}
"""The client's status for each failure that is not an instance's own answer."""

RETRYABLE = frozenset({FailureKind.CONNECT, FailureKind.DROPPED})
"""Failures after which another instance may do better."""

REBINDABLE = RETRYABLE | {FailureKind.INCOMPLETE, FailureKind.STALLED}
"""Failures of D before its first byte after which P's prompt is offered to another D."""

RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
"""Likewise: an instance that answers so is full, is being stopped, or has lost what it needs."""

AT_FAULT = frozenset(
    {FailureKind.CONNECT, FailureKind.DROPPED, FailureKind.TIMEOUT, FailureKind.UNREADABLE}
)
"""Failures that speak against the instance itself."""


class CallOutcome(enum.StrEnum):
    """How a call ended; a label of the request counter."""

    OK = "ok"
    REFUSED = "refused"
    UPSTREAM_ERROR = "upstream_error"
    FAILED = "failed"
    BROKEN_STREAM = "broken_stream"
    CLIENT_LEFT = "client_left"


class StreamEnding(enum.Enum):
    """What the last event of a relayed stream says."""

    DONE = enum.auto()
    ERROR_TOLD = enum.auto()
    TORN = enum.auto()


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP answer of an instance."""

    status: int
    content_type: str
    content: bytes

    @property
    def ok(self) -> bool:
        """Whether it is a 2xx."""
        return 200 <= self.status < 300

    @property
    def lacks_kv(self) -> bool:
        """Whether D says that the prompt's KV did not come, which may be anybody's fault."""
        return self.status == 503 and b'"kv_transfer_failed"' in self.content


def may_do_better(kind: FailureKind, answer: Answer | None) -> bool:
    """Whether the same leg may go well on another instance."""
    if answer is not None:
        return answer.status in RETRYABLE_STATUSES
    return kind in RETRYABLE


# Events.


@dataclass(frozen=True, slots=True)
class PrefillAnswered:
    """P answered, with any status."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class PrefillNear:
    """P has nearly computed the prompt."""


@dataclass(frozen=True, slots=True)
class DecodeStalled:
    """P has answered, D has not begun for a while, and another would be less busy."""


@dataclass(frozen=True, slots=True)
class DecodeAnswered:
    """D gave an answer that is not a stream, with any status."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class DecodeStreaming:
    """D's stream has its first bytes; they are kept until `Relay`."""


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """D's stream ended without a failure of the connection."""

    ending: StreamEnding


@dataclass(frozen=True, slots=True)
class LegLost:
    """A leg ended without an answer, or in the middle of one."""

    leg: LegName
    kind: FailureKind
    reason: str


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The call's total time is over."""


@dataclass(frozen=True, slots=True)
class RouterStopped:
    """The router is being shut down and can wait no longer."""


Event = (
    PrefillAnswered
    | PrefillNear
    | DecodeStalled
    | DecodeAnswered
    | DecodeStreaming
    | DecodeEnded
    | LegLost
    | ClientLeft
    | TimeUp
    | RouterStopped
)


def verdict(event: Event) -> tuple[LegName, bool] | None:
    """Which instance an event speaks for (True) or against; None if it says nothing of one."""
    match event:
        case PrefillAnswered(answer):
            return _verdict_of(LegName.PREFILL, answer)
        case DecodeAnswered(answer):
            return _verdict_of(LegName.DECODE, answer)
        case DecodeStreaming():
            return LegName.DECODE, True
        case DecodeEnded(StreamEnding.TORN):
            return LegName.DECODE, False
        case LegLost(leg, kind) if kind in AT_FAULT:
            return leg, False
        case _:
            return None


def _verdict_of(leg: LegName, answer: Answer) -> tuple[LegName, bool] | None:
    if answer.status == 429 or answer.lacks_kv:
        # It has enough to do, or is not to blame.
        return None
    return leg, answer.status < 500


# Actions.


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Send P its leg."""


@dataclass(frozen=True, slots=True)
class AwaitNear:
    """Say `PrefillNear` when P is nearly done, unless it has answered by then."""


@dataclass(frozen=True, slots=True)
class WatchDecode:
    """Say `DecodeStalled` if D does not begin for a while from now on."""


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Choose a D, none that was tried before, and send it its leg with these `kv_transfer_params`.

    Events of a leg to another D before it are not told any more.
    """

    params: Params


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a running leg by closing its connection; nothing to do if it has ended."""

    leg: LegName


@dataclass(frozen=True, slots=True)
class Note:
    """Count and log a failure of a leg; `rebound`: after which another D gets it."""

    leg: LegName
    kind: FailureKind
    reason: str
    rebound: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Give the client an instance's answer as it is."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class ReplyError:
    """Give the client an error, unless another dispatch does better; `leg` says whose it was.

    `answer` is the instance's own, which the client gets as it is; None: one of ours.
    """

    leg: LegName
    kind: FailureKind
    reason: str
    answer: Answer | None = None

    @property
    def retryable(self) -> bool:
        """Whether a dispatch to another instance may do better."""
        return may_do_better(self.kind, self.answer)


@dataclass(frozen=True, slots=True)
class Relay:
    """Pass D's stream on, from its first byte."""


@dataclass(frozen=True, slots=True)
class EndStream:
    """The relayed stream is over."""


@dataclass(frozen=True, slots=True)
class BreakStream:
    """End the relayed stream with an explicit error event."""

    kind: FailureKind
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The dispatch is over. Legs that still run may run out on their own."""

    outcome: CallOutcome


Action = (
    StartPrefill
    | AwaitNear
    | WatchDecode
    | StartDecode
    | Cancel
    | Note
    | Reply
    | ReplyError
    | Relay
    | EndStream
    | BreakStream
    | Finish
)
