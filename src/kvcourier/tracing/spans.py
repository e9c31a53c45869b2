"""From the story of a request on one instance to its spans.

Decides which entries bound which span, and what is an event of the whole. Refuses to know clocks
and exporters. Pure.

A story may have lost its middle, and a request may end at any point: a span whose end is not told
lasts until the story's end, and says so.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcourier.tracing.interface import Event, Kind, Span, Value

Entry = Mapping[str, Any]
PREFIX = "kvcourier."

FAILURES = frozenset(
    {"failed", "refused", "delivery_failed", "send_failed", "receive_failed", "operation_failed"}
)
"""Entries that say that what they end has failed; `reason` says why."""

_ENDS = ("answered", "failed", "refused", "ended_early")
_MOVED = ("received", "receive_failed", "sent", "send_failed")
"""How a transfer ends; a story that couriers alone tell has no other end."""
_OVER = frozenset({"released", "dropped"})


class Side(enum.Enum):
    """What a request is to its transfer; the name of its span."""

    NONE = "request"
    PREFILL = "prefill request"
    DECODE = "decode request"


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry `opens` a span, the next one of `closes` that has the same `same` details ends it.

    Attributes:
        same: names of details. Without any, only the first of `opens` counts.
        where: a detail that the opening entry must have.
        side: whose requests have it; None: all.
    """

    name: str
    opens: str
    closes: tuple[str, ...]
    same: tuple[str, ...] = ("rank",)
    where: tuple[str, str] | None = None
    side: Side | None = None


_OPERATION_ENDS = ("completed", "operation_failed")

RULES = (
    Rule("queue", "queued", ("scheduled", *_ENDS), ()),
    # P.
    Rule("prefill", "scheduled", ("prefill_finished", *_ENDS), (), side=Side.PREFILL),
    Rule("hold", "prefill_finished", ("released",), side=Side.PREFILL),
    Rule("write", "posted", _OPERATION_ENDS, ("rank", "id"), ("operation", "WRITE")),
    # D.
    Rule("register", "want_begun", ("registered", "posted", "receive_failed", "dropped")),
    # P tells of a registration as well.
    Rule("wait for KV", "registered", ("received", "receive_failed"), side=Side.DECODE),
    Rule("read", "posted", _OPERATION_ENDS, ("rank", "id"), ("operation", "READ")),
    Rule("decode", "first_token", _ENDS, (), side=Side.DECODE),
)


def is_over(story: Sequence[Entry], side: Side) -> bool:
    """Whether nothing more is to come: the answer has ended, and no transfer is left open.

    What D keeps of a conversation for its next turn is not waited for.
    """
    begins = {"want_begun"} if side is Side.DECODE else {"hold_begun", "want_begun"}
    is_answered = any(entry["what"] in _ENDS for entry in story)
    begun = Counter(entry.get("rank") for entry in story if entry["what"] in begins)
    over = Counter(entry.get("rank") for entry in story if entry["what"] in _OVER)
    return is_answered and begun <= over


def instance_spans(
    story: Sequence[Entry], side: Side, attributes: Mapping[str, Value]
) -> tuple[Span, list[Span]]:
    """The span of the whole request, and those within it.

    Args:
        story: at least one entry, in order.
        side: what the request is to its transfer.
        attributes: of the whole.
    """
    start, end = story[0]["at_unix_s"], story[-1]["at_unix_s"]
    answered = [each for each in story if each["what"] in _ENDS]
    ends = answered or [each for each in story if each["what"] in _MOVED]
    children = [span for rule in RULES for span in _spans_of(rule, story, side, end)]
    root = Span(
        name=side.value,
        start_unix_s=start,
        end_unix_s=answered[-1]["at_unix_s"] if answered else end,
        kind=Kind.SERVER,
        failure=_failure(ends[-1]) if ends else "",
        attributes=attributes,
        events=tuple(_events(story)),
    )
    return root, children


def _spans_of(rule: Rule, story: Sequence[Entry], side: Side, end: float) -> Iterable[Span]:
    for index, entry in enumerate(story):
        if entry["what"] != rule.opens or not _applies(rule, entry, side):
            continue
        closing = next(
            (
                later
                for later in story[index + 1 :]
                if later["what"] in rule.closes
                and all(later.get(name) == entry.get(name) for name in rule.same)
            ),
            None,
        )
        # An operation is noted once it is posted; how long that took is told with it.
        start = entry["at_unix_s"] - float(entry.get("post_s", 0.0))
        told = attributes_of(entry) | ({} if closing else {f"{PREFIX}open": True})
        yield Span(
            name=rule.name,
            start_unix_s=start,
            end_unix_s=max(start, closing["at_unix_s"] if closing else end),
            failure=_failure(closing) if closing else "",
            attributes=told,
        )
        if not rule.same:
            return


def _applies(rule: Rule, entry: Entry, side: Side) -> bool:
    if rule.side not in (None, side):
        return False
    return rule.where is None or entry.get(rule.where[0]) == rule.where[1]


def _failure(entry: Entry) -> str:
    return str(entry.get("reason") or entry["what"]) if entry["what"] in FAILURES else ""


def _events(story: Iterable[Entry]) -> Iterable[Event]:
    for entry in story:
        yield Event(entry["at_unix_s"], str(entry["what"]), attributes_of(entry))


def attributes_of(entry: Entry) -> dict[str, Value]:
    """The details of an entry, but for a first token, which is content."""
    return {
        PREFIX + name: value if isinstance(value, str | bool | int | float) else str(value)
        for name, value in entry.items()
        if name not in ("at_unix_s", "what", "continuation") and value is not None
    }
