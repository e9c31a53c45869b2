"""What the ratios of a trial say: better, worse, equal, or nothing that is sure.

Decides that for each quantity at each rate, from which rate on the candidate is better, and what
follows from all of it. Refuses to know how the ratios were measured. Pure.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcourier.bench.report import Comparison
from kvcourier.bench.samples import METRICS, Metric
from kvcourier.bench.stats import LEVEL, MIN_TURNS, Ratio, Verdict

JUDGED = tuple(each for each in METRICS if each.key in ("ttft_ms", "tpot_ms", "token2_ms"))
"""What users notice. The time after prefill is a part of the first one."""


class Judgement(enum.StrEnum):
    """What is known of the candidate against the baseline."""

    BETTER = "better"
    WORSE = "worse"
    EQUAL = "equal"
    UNSURE = "cannot tell"


class Advice(enum.StrEnum):
    """What follows."""

    SWITCH = "switch"
    KEEP = "keep the baseline"
    TRADE_OFF = "a trade-off: weigh it"
    EQUAL = "no difference that matters"
    UNDECIDED = "undecided: measure longer"


def judge(ratio: Ratio | None, margin: float) -> Judgement:
    """Equal if the whole interval is within the margin around 1; else as the verdict says."""
    if ratio is None or ratio.num_turns < MIN_TURNS:
        return Judgement.UNSURE
    if ratio.estimate.low > 1 - margin and ratio.estimate.high < 1 + margin:
        return Judgement.EQUAL
    return _OF_VERDICT[ratio.verdict]


_OF_VERDICT: Mapping[Verdict, Judgement] = {
    Verdict.A_BETTER: Judgement.WORSE,
    Verdict.B_BETTER: Judgement.BETTER,
    Verdict.CANNOT_TELL: Judgement.UNSURE,
}


@dataclass(frozen=True, slots=True)
class Point:
    """One quantity at one rate."""

    qps: float
    ratio: Ratio | None
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class Reading:
    """One quantity of prompts of one length, rates ascending."""

    metric: Metric
    input_tokens: int
    points: tuple[Point, ...]

    def at(self, judgement: Judgement) -> list[float]:
        """The rates at which that is so."""
        return [point.qps for point in self.points if point.judgement is judgement]

    @property
    def better_from(self) -> float | None:
        """The lowest rate from which on the candidate is better at every rate; None: nowhere."""
        from_top = itertools.takewhile(
            lambda point: point.judgement is Judgement.BETTER, reversed(self.points)
        )
        return min((point.qps for point in from_top), default=None)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a trial has found.

    Attributes:
        because: what was found of each quantity, a sentence each.
        undecided: what was not found, and why.
    """

    advice: Advice
    readings: tuple[Reading, ...]
    because: tuple[str, ...]
    undecided: tuple[str, ...]


def decide(comparisons: Sequence[Comparison], margin: float) -> Decision:
    """Judge all quantities at all rates and lengths; `b` of a comparison is the candidate."""
    readings = tuple(_readings(comparisons, margin))
    failures = _failures(comparisons)
    return Decision(
        _advice(readings, failures),
        readings,
        tuple([*_failure_sentences(failures), *(_sentence(each) for each in readings)]),
        tuple(_undecided(readings, comparisons)),
    )


def _readings(comparisons: Sequence[Comparison], margin: float) -> Iterator[Reading]:
    lengths = sorted({each.a.cell.input_tokens for each in comparisons})
    for metric, length in itertools.product(JUDGED, lengths):
        own = [each for each in comparisons if each.a.cell.input_tokens == length]
        points = []
        for each in sorted(own, key=lambda each: each.a.cell.qps):
            ratio = each.ratio(metric)
            points.append(Point(each.a.cell.qps, ratio, judge(ratio, margin)))
        yield Reading(metric, length, tuple(points))


def _failures(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    """Failed requests of the baseline and of the candidate."""
    return (
        sum(len(each.a.collected.failures) for each in comparisons),
        sum(len(each.b.collected.failures) for each in comparisons),
    )


def _advice(readings: Sequence[Reading], failures: tuple[int, int]) -> Advice:
    if failures[1] > failures[0]:
        return Advice.KEEP
    found = {point.judgement for reading in readings for point in reading.points}
    # Better at a middle rate and unknown above it is no reason to switch yet.
    lasting = any(reading.better_from is not None for reading in readings)
    match lasting, Judgement.WORSE in found:
        case True, True:
            return Advice.TRADE_OFF
        case True, False:
            return Advice.SWITCH
        case False, True:
            return Advice.KEEP
    return Advice.EQUAL if found == {Judgement.EQUAL} else Advice.UNDECIDED


def _failure_sentences(failures: tuple[int, int]) -> Iterator[str]:
    if any(failures):
        yield f"failed requests: {failures[0]} of the baseline, {failures[1]} of the candidate"


def _sentence(reading: Reading) -> str:
    where = f"{reading.metric.title}, {reading.input_tokens:,} tokens"
    parts = []
    start = reading.better_from
    if start is not None:
        parts.append(f"the candidate is better from {start:g}/s on")
    elsewhere = [qps for qps in reading.at(Judgement.BETTER) if start is None or qps < start]
    for judgement, rates in (
        (Judgement.BETTER, elsewhere),
        (Judgement.WORSE, reading.at(Judgement.WORSE)),
        (Judgement.EQUAL, reading.at(Judgement.EQUAL)),
        (Judgement.UNSURE, reading.at(Judgement.UNSURE)),
    ):
        if rates:
            parts.append(f"{judgement} at {', '.join(f'{qps:g}/s' for qps in rates)}")
    told = [_ratio(point) for point in reading.points if point.ratio is not None]
    numbers = f" (candidate / baseline: {', '.join(told)})" if told else ""
    return f"{where}: {'; '.join(parts)}{numbers}"


def _ratio(point: Point) -> str:
    assert point.ratio is not None, "shown only where there is one"
    found = point.ratio.estimate
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}] at {point.qps:g}/s"


def _undecided(readings: Sequence[Reading], comparisons: Sequence[Comparison]) -> Iterator[str]:
    num_unsure = sum(len(each.at(Judgement.UNSURE)) for each in readings)
    num_judged = sum(len(each.points) for each in readings) - num_unsure
    few = [each for each in comparisons if len(each.a.collected.turns) < MIN_TURNS]
    if few:
        yield (
            f"{len(few)} of {len(comparisons)} cells had fewer than {MIN_TURNS} turns of each "
            "side, which is too few for any judgement"
        )
    if num_unsure:
        yield (
            f"{num_unsure} of {num_unsure + num_judged} ratios could go either way; more turns "
            "may tell"
        )
    if num_judged:
        yield (
            f"each of {num_judged} judgements is made at {LEVEL:.0%}, so about "
            f"{num_judged * (1 - LEVEL):.1f} of them would be wrong between equal sides"
        )
    yield (
        "prompts were random tokens: what prefix caches save in your traffic is saved on both "
        "sides, and less KV moves then"
    )
    yield "other prompt lengths, other rates, and failures of instances were not tried"


def as_json(decision: Decision) -> dict[str, Any]:
    """The decision as data."""
    return {
        "advice": decision.advice.value,
        "readings": [
            {
                "metric": reading.metric.key,
                "input_tokens": reading.input_tokens,
                "better_from_qps": reading.better_from,
                "points": [_point_json(point) for point in reading.points],
            }
            for reading in decision.readings
        ],
    }


def _point_json(point: Point) -> dict[str, Any]:
    data: dict[str, Any] = {"qps": point.qps, "judgement": point.judgement.value}
    if point.ratio is not None:
        found = point.ratio.estimate
        data |= {
            "ratio": round(found.value, 4),
            "interval": [round(found.low, 4), round(found.high, 4)],
            "turns": point.ratio.num_turns,
        }
    return data
