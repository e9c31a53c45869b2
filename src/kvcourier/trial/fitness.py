"""Whether the traffic is such that the change can help at all, and where it cannot be told.

Decides this from the lengths, the rates and a few requests that were sent one by one to the
baseline. Refuses to know how they were sent. Pure.

What push does better than pull happens between the end of prefill and D's first step: D has set up
and registered by then, and most of the KV may be there. So there must be a prefill to hide it
behind, and the time after prefill must be a part of the time to the first token that is worth it.
"""

import enum
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

LITTLE = 0.05
"""A smaller part of the time to the first token is not worth a change."""
MUCH = 0.15
"""From this part on, a change can be expected to show."""
SET_UP_MS = 5.0
"""D takes about so long to set up and register: a shorter prefill hides only a part of it."""
SHORT_TOKENS = 256
"""Where prefill cannot be timed: a shorter prompt is computed about as fast as D sets up."""
BUSY = 0.9
"""Of an instance's time. Above it queues grow, and they decide about times to the first token."""


class Fit(enum.StrEnum):
    """What a finding says of the change."""

    CAN_HELP = "can help"
    LITTLE_TO_GAIN = "little to gain"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason for or against, in a sentence."""

    fit: Fit
    sentence: str


@dataclass(frozen=True, slots=True)
class Alone:
    """Medians of requests of one length that had the baseline to themselves, in ms.

    `after_prefill_ms` is None where the instances tell no stories; `tpot_ms` for single tokens.
    """

    input_tokens: int
    ttft_ms: float
    after_prefill_ms: float | None
    tpot_ms: float | None

    @property
    def prefill_ms(self) -> float | None:
        """Until prefill had ended, the way to P included."""
        return None if self.after_prefill_ms is None else self.ttft_ms - self.after_prefill_ms


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before the trial.

    Attributes:
        brings_push: the baseline pulls and the candidate pushes.
        input_tokens, output_tokens: lengths of prompts and answers, a sample of the traffic's.
        rates: at which both sides will be measured.
        alone: one entry per length that was tried.
        num_prefill: prefill instances of the baseline; 0: there is no router to tell.
    """

    brings_push: bool
    input_tokens: Sequence[int]
    output_tokens: Sequence[int]
    rates: Sequence[float]
    alone: Sequence[Alone]
    num_prefill: int


def examine(facts: Facts) -> list[Finding]:
    """Everything there is to say, by the table of rules."""
    return [finding for rule in RULES for finding in rule(facts)]


def _what_can_be_hidden(facts: Facts) -> Iterator[Finding]:
    if not facts.brings_push:
        return
    for alone in facts.alone:
        if alone.after_prefill_ms is None:
            yield Finding(
                Fit.CANNOT_TELL,
                f"{alone.input_tokens:,} tokens: the instances do not tell when prefill ended, so "
                "what push could hide is not known before it is measured",
            )
            continue
        hidden_ms = max(0.0, alone.after_prefill_ms - (alone.tpot_ms or 0.0))
        part = hidden_ms / alone.ttft_ms
        yield Finding(
            _fit_of(part),
            f"{alone.input_tokens:,} tokens: of {alone.ttft_ms:.0f} ms to the first token of a "
            f"request alone, {alone.after_prefill_ms:.0f} pass after prefill; what is more than "
            f"a decode step, {hidden_ms:.0f} ms or {part:.0%}, is the most that push can hide",
        )


def _fit_of(part: float) -> Fit:
    """What it means that push can hide this part of the time to the first token."""
    if part >= MUCH:
        return Fit.CAN_HELP
    return Fit.LITTLE_TO_GAIN if part < LITTLE else Fit.CANNOT_TELL


def _what_it_hides_behind(facts: Facts) -> Iterator[Finding]:
    if not facts.brings_push:
        return
    for alone in facts.alone:
        prefill_ms = alone.prefill_ms
        if prefill_ms is not None and prefill_ms < SET_UP_MS:
            yield Finding(
                Fit.LITTLE_TO_GAIN,
                f"{alone.input_tokens:,} tokens: prefill is over after {prefill_ms:.1f} ms, which "
                "is hardly longer than D takes to register its blocks",
            )
    if any(each.prefill_ms is not None for each in facts.alone):
        return
    num_short = sum(tokens < SHORT_TOKENS for tokens in facts.input_tokens)
    if 2 * num_short > len(facts.input_tokens):
        yield Finding(
            Fit.LITTLE_TO_GAIN,
            f"{num_short / len(facts.input_tokens):.0%} of the prompts are shorter than "
            f"{SHORT_TOKENS} tokens: there is hardly a prefill to hide anything behind",
        )


def _what_queues_decide(facts: Facts) -> Iterator[Finding]:
    timed = [each for each in facts.alone if each.prefill_ms is not None]
    if not timed or not facts.num_prefill:
        return
    per_token_ms = statistics.fmean((each.prefill_ms or 0) / each.input_tokens for each in timed)
    prefill_s = per_token_ms * statistics.fmean(facts.input_tokens) / 1e3
    for rate in facts.rates:
        busy = rate * prefill_s / facts.num_prefill
        if busy >= BUSY:
            yield Finding(
                Fit.CANNOT_TELL,
                f"at {rate:g}/s prefill alone takes about {busy:.0%} of the prefill instances' "
                "time: queues decide about the time to the first token there, not the transfer",
            )


def _what_has_no_tpot(facts: Facts) -> Iterator[Finding]:
    if statistics.median(facts.output_tokens) < 2:
        yield Finding(
            Fit.CANNOT_TELL,
            "most answers are a single token: there is no time per token to compare",
        )


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _what_can_be_hidden,
    _what_it_hides_behind,
    _what_queues_decide,
    _what_has_no_tpot,
)
"""Each says what it has to say about the facts, or nothing."""
