"""What a soak has shown, and every sentence against it.

Decides which failures are allowed and what counts as a leak. Refuses to know how it was found out.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence

from soak.memory import Growth, Sample
from soak.traffic import Outcome

MEMORY_BOUND = 6.0
"""MiB a minute, by resident memory, of any process after its warm-up."""
DESCRIPTORS_BOUND = 15.0
"""Open descriptors in the course of a life. Connections of the moment make a few, however long it
lasts; what is lost one by one is more in the end."""


@dataclasses.dataclass(frozen=True)
class Restart:
    """One kill -9. Until `back` the router did not know the new life; both by `time.monotonic`."""

    whom: str
    killed: float
    back: float


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that was seen.

    Attributes:
        expected: for each prompt of the pool, what a single instance answers.
        leftovers: per process, what should be zero on an idle one and is not.
        samples: of all processes, in order.
        growth: per process; None where it did not live for long enough.
        errors: per process, what its log shows of an unexpected end.
        last_answers: whether requests after all of it, of each kind, were answered right.
        began: when clients began to call, by `time.monotonic`.
        load: processes that wanted to run, on average, in the last minute of it.
    """

    seed: int
    minutes: float
    outcomes: Sequence[Outcome]
    restarts: Sequence[Restart]
    expected: Sequence[Sequence[int]]
    leftovers: Mapping[str, Mapping[str, float]]
    samples: Sequence[Sample]
    growth: Mapping[str, Growth | None]
    errors: Mapping[str, Sequence[str]]
    last_answers: Mapping[str, bool]
    began: float
    load: float


def is_right(outcome: Outcome, expected: Sequence[Sequence[int]]) -> bool:
    """Whether all tokens that came are those of a single instance, and all came that were due."""
    for index, tokens in zip(outcome.call.prompts, outcome.tokens, strict=True):
        whole = list(expected[index][: outcome.call.num_tokens])
        due = whole if outcome.end == "answered" else whole[: len(tokens)]
        if tokens != due:
            return False
    return True


def is_hit(outcome: Outcome, restarts: Sequence[Restart]) -> bool:
    """Whether a process was down at some time of the call."""
    return any(each.killed <= outcome.ended and outcome.began <= each.back for each in restarts)


def violations(evidence: Evidence) -> list[str]:
    """A sentence for everything that must not be."""
    found = []
    for outcome in evidence.outcomes:
        span = _span(evidence, outcome.began, outcome.ended)
        if not is_right(outcome, evidence.expected):
            found.append(
                f"wrong tokens: {outcome.call} got {outcome.tokens}, a single instance says "
                f"{[list(evidence.expected[index][:48]) for index in outcome.call.prompts]}"
            )
        if outcome.end == "hung":
            found.append(f"no end: {outcome.call} had no answer {span}")
        if outcome.end == "failed" and not is_hit(outcome, evidence.restarts):
            found.append(
                f"failed, though nothing was down: {outcome.call}: {outcome.reason} {span}"
            )
    for name, gauges in evidence.leftovers.items():
        found += [
            f"left behind: {name} has {gauge} {value:g} when all is over, expected 0"
            for gauge, value in gauges.items()
        ]
    for name, growth in evidence.growth.items():
        if growth is None:
            continue
        if growth.mib_per_minute > MEMORY_BOUND:
            found.append(
                f"memory: {name} grows by {growth.mib_per_minute:.1f} MiB a minute, at most "
                f"{MEMORY_BOUND:g} is allowed"
            )
        if growth.descriptors_per_life > DESCRIPTORS_BOUND:
            found.append(
                f"descriptors: {name} opens {growth.descriptors_per_life:.0f} more in the course "
                f"of a life, at most {DESCRIPTORS_BOUND:g} are allowed"
            )
    for name, errors in evidence.errors.items():
        found += [f"log of {name}: {error}" for error in errors]
    found += [
        f"not right afterwards: a fresh {kind} request"
        for kind, right in evidence.last_answers.items()
        if not right
    ]
    if not any(outcome.end == "answered" for outcome in evidence.outcomes):
        found.append("nothing was answered, so nothing was shown")
    if len(evidence.restarts) < max(1, int(evidence.minutes)):
        found.append(f"only {len(evidence.restarts)} restarts in {evidence.minutes:g} minutes")
    return found


def summary(evidence: Evidence) -> list[str]:
    """What to print in any case."""
    counts = Counter(outcome.end for outcome in evidence.outcomes)
    kinds = Counter(_kind(each) for each in evidence.outcomes if each.end == "answered")
    reasons = Counter(each.reason for each in evidence.outcomes if each.end == "failed")
    silent = sum(each.end == "left" and not any(each.tokens) for each in evidence.outcomes)
    lines = [
        f"seed {evidence.seed}, {evidence.minutes:g} minutes, {len(evidence.outcomes)} calls",
        f"{evidence.load:.1f} processes wanted to run on {os.cpu_count()} cores",
        f"answered {counts['answered']}: {_listed(kinds)}",
        f"left by the client {counts['left']}, {silent} of them before the first token",
        f"failed {counts['failed']}: {_listed(reasons)}",
        "restarts "
        + ", ".join(
            f"{each.whom} {_span(evidence, each.killed, each.back)}" for each in evidence.restarts
        ),
    ]
    for name, growth in evidence.growth.items():
        grows = (
            "no life was long enough to compare"
            if growth is None
            else f"{growth.mib_per_minute:+.2f} MiB and {growth.descriptors_per_minute:+.1f} "
            f"descriptors a minute over {growth.minutes:.1f} minutes of {growth.num_lives} lives"
        )
        lines.append(f"{name}: {grows}")
    return lines


def _span(evidence: Evidence, first: float, last: float) -> str:
    return f"from {first - evidence.began:.2f} s to {last - evidence.began:.2f} s"


def _kind(outcome: Outcome) -> str:
    call = outcome.call
    if call.whom != "router":
        return "several prompts"
    return call.mode if call.binding is None else f"{call.mode} {call.binding}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items())) or "none"
