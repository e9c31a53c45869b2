"""What the router tells of one dispatch: its story, and its spans where somebody collects them.

Decides which entry begins and ends which span, and which headers make an instance's spans children
of its leg. Refuses to know what follows from what (`dispatch`).
"""

from typing import Any

from kvcourier.config import USUAL_BINDING
from kvcourier.router.events import Action, Cancel, Event, Finish, LegName
from kvcourier.router.legs import Call
from kvcourier.router.telling import told_of
from kvcourier.runtime.diary import Diary
from kvcourier.tracing.interface import (
    UNTRACED,
    Carrier,
    Kind,
    LiveSpan,
    Tracing,
    trace_headers,
)

_LEG_ENDS = {
    "prefill_answered": LegName.PREFILL,
    "prefill_lost": LegName.PREFILL,
    "decode_answered": LegName.DECODE,
    "decode_ended": LegName.DECODE,
    "decode_lost": LegName.DECODE,
}


class DispatchStory:
    """One dispatch, from `begin` to its end."""

    def __init__(self, diary: Diary, tracing: Tracing | None, call: Call) -> None:
        self._diary = diary
        self._tracing = tracing
        self._call = call
        self._whole: LiveSpan | None = None
        self._legs: dict[LegName, LiveSpan] = {}

    def begin(self) -> None:
        """It is about to start."""
        call = self._call
        details = {
            "request_id": str(call.request_id),
            "transfer_id": str(call.transfer_id),
            "mode": call.mode.value,
            "binding": (call.binding or USUAL_BINDING[call.mode]).value,
        }
        self._diary.alias(call.request_id, call.transfer_id)
        self._diary.note(call.transfer_id, "dispatched", **details)
        if self._tracing is not None:
            self._whole = self._tracing.begin(
                "dispatch",
                Kind.SERVER,
                trace_headers(call.headers),
                self._diary.now_unix_s(),
                {f"kvcourier.{name}": value for name, value in details.items()},
            )

    def send(self, name: LegName, url: str) -> Carrier:
        """A leg is about to be sent there; returns what names its span, if it has one."""
        # Another one in its place: the instance did not begin soon enough.
        self._end_leg(name, "given up")
        self._diary.note(self._call.transfer_id, f"{name}_sent", to=url)
        if self._whole is None:
            return UNTRACED
        attributes = {"kvcourier.transfer_id": str(self._call.transfer_id), "url.full": url}
        now = self._diary.now_unix_s()
        span = self._whole.child(f"{name} leg", Kind.CLIENT, now, attributes)
        self._legs[name] = span
        return span.carrier()

    def happened(self, happening: Event | Action) -> None:
        """An event of the dispatch, or an action that it leads to."""
        if isinstance(happening, Cancel):
            self._end_leg(happening.leg, "cancelled")
        if (told := told_of(happening)) is None:
            return
        what, details = told
        self._diary.note(self._call.transfer_id, what, **details)
        if what in _LEG_ENDS:
            self._end_leg(_LEG_ENDS[what], _failure(details))
        if isinstance(happening, Finish) and self._whole is not None:
            outcome = happening.outcome.value
            failure = "" if outcome == "ok" else outcome
            self._whole.end(self._diary.now_unix_s(), failure)

    def _end_leg(self, name: LegName, failure: str) -> None:
        span = self._legs.pop(name, None)
        if span is not None:
            span.end(self._diary.now_unix_s(), failure)


def _failure(details: dict[str, Any]) -> str:
    if "reason" in details:
        return str(details["reason"])
    if details.get("status", 0) >= 400:
        return f"answered {details['status']}"
    return "" if details.get("ending", "done") == "done" else f"stream: {details['ending']}"
