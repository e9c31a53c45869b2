"""Where the milliseconds of one request went, from the stories that its instances keep.

Decides which entries of a story open and close a span, how the time to the first token is split
into phases, and the form of a Chrome trace. Refuses to know how stories are fetched. Pure.

Times are seconds since the client sent the request. Stories are told by the instances' clocks: on
one machine that is the client's own. Where a story puts the end of prefill before the request or
after its first token, the clocks differ and the story is not used.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]
"""One entry of a story: `what`, `at_unix_s`, and details."""

# A client reads its first token a moment after the instance wrote it, never before.
_CLOCK_SLACK_S = 0.002


class Lane(enum.StrEnum):
    """Whose view a span or a mark belongs to."""

    CLIENT = "client"
    PREFILL = "P"
    DECODE = "D"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted."""

    lane: Lane
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Mark:
    """An entry of a story, as it was told."""

    lane: Lane
    name: str
    at_s: float
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the time to the first token; phases follow each other without a gap."""

    name: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request. `prefill_finished_s` is None if P did not tell it."""

    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    phases: tuple[Phase, ...]
    prefill_finished_s: float | None


@dataclass(frozen=True, slots=True)
class _Rule:
    """The n-th entry `opens` and the n-th entry `closes` of a lane bound a span."""

    lane: Lane
    name: str
    opens: str
    closes: str


_RULES = (
    _Rule(Lane.PREFILL, "prefill", "hold_begun", "prefill_finished"),
    _Rule(Lane.PREFILL, "write in flight", "posted", "written"),
    _Rule(Lane.DECODE, "set up and register", "want_begun", "registered"),
    _Rule(Lane.DECODE, "set up", "want_begun", "posted"),
    _Rule(Lane.DECODE, "read in flight", "posted", "read"),
    _Rule(Lane.DECODE, "wait for KV", "registered", "received"),
)
_POSTING = "posting"

# The time to the first token is cut at these entries, in this order; one that is missing, or that
# is no later than the one before, cuts nothing.
_CUTS = (
    (Lane.PREFILL, "hold_begun", "to P"),
    (Lane.PREFILL, "prefill_finished", "prefill"),
    (Lane.DECODE, "want_begun", "P's answer, router, to D"),
    (Lane.DECODE, "received", "KV to D"),
)
LAST_PHASE = "D's step, first token"
PHASES = (*(name for _, _, name in _CUTS), LAST_PHASE)
"""Every phase, in order."""


def make_timeline(
    sent_unix_s: float,
    token_s: Sequence[float],
    prefill: Iterable[Entry],
    decode: Iterable[Entry],
) -> Timeline | None:
    """Put both stories on the client's time; None if they tell nothing or by another clock."""
    marks = sorted(
        [
            *_marks(Lane.PREFILL, prefill, sent_unix_s),
            *_marks(Lane.DECODE, decode, sent_unix_s),
        ],
        key=lambda mark: mark.at_s,
    )
    if not marks:
        return None
    first = token_s[0]
    finished = next((m.at_s for m in marks if m.name == "prefill_finished"), None)
    if finished is not None and not -_CLOCK_SLACK_S <= finished <= first + _CLOCK_SLACK_S:
        return None
    spans = [
        Span(Lane.CLIENT, "first token", 0.0, first),
        Span(Lane.CLIENT, "more tokens", first, token_s[-1]),
        *(span for rule in _RULES for span in _paired(rule, marks)),
        *_postings(marks),
    ]
    return Timeline(tuple(spans), tuple(marks), _phases(marks, first), finished)


def _marks(lane: Lane, story: Iterable[Entry], sent_unix_s: float) -> Iterable[Mark]:
    for entry in story:
        at, what = entry.get("at_unix_s"), entry.get("what")
        # A story comes from the network: what is no entry is passed over.
        if isinstance(at, int | float) and isinstance(what, str):
            details = {k: v for k, v in entry.items() if k not in ("at_unix_s", "what")}
            yield Mark(lane, what, at - sent_unix_s, details)


def _paired(rule: _Rule, marks: Sequence[Mark]) -> Iterable[Span]:
    own = [mark for mark in marks if mark.lane is rule.lane]
    opened = [mark.at_s for mark in own if mark.name == rule.opens]
    closed = [mark.at_s for mark in own if mark.name == rule.closes]
    for start, end in zip(opened, closed, strict=False):
        if end >= start:
            yield Span(rule.lane, rule.name, start, end)


def _postings(marks: Sequence[Mark]) -> Iterable[Span]:
    """An operation is noted once it is posted; how long that took is told with it."""
    for mark in marks:
        took = mark.details.get("post_s")
        if mark.name == "posted" and isinstance(took, int | float) and took >= 0:
            yield Span(mark.lane, _POSTING, mark.at_s - took, mark.at_s)


def _phases(marks: Sequence[Mark], first_s: float) -> tuple[Phase, ...]:
    phases, reached = [], 0.0
    for lane, what, name in _CUTS:
        at = next((m.at_s for m in marks if m.lane is lane and m.name == what), None)
        if at is None or at <= reached:
            continue
        at = min(at, first_s)
        phases.append(Phase(name, at - reached))
        reached = at
    return (*phases, Phase(LAST_PHASE, first_s - reached))


def trace_events(named: Sequence[tuple[str, float, Timeline]]) -> dict[str, Any]:
    """A Chrome trace, for Perfetto and the like: a process per request, a thread per lane.

    Args:
        named: name of each request, when it was sent (unix seconds), its timeline.
    """
    start_unix_s = min((sent for _, sent, _ in named), default=0.0)
    lanes = {lane: number for number, lane in enumerate(Lane, start=1)}
    events: list[dict[str, Any]] = []
    for pid, (name, sent_unix_s, timeline) in enumerate(named, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for lane, tid in lanes.items():
            where = {"pid": pid, "tid": tid}
            events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": lane}})
        offset_s = sent_unix_s - start_unix_s
        for span in timeline.spans:
            events.append(
                {
                    **{"ph": "X", "name": span.name, "cat": "span"},
                    **{"pid": pid, "tid": lanes[span.lane]},
                    "ts": (offset_s + span.start_s) * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                }
            )
        for mark in timeline.marks:
            events.append(
                {
                    **{"ph": "i", "s": "t", "name": mark.name, "cat": "story"},
                    **{"pid": pid, "tid": lanes[mark.lane]},
                    "ts": (offset_s + mark.at_s) * 1e6,
                    "args": dict(mark.details),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
