"""A trial from the first look to the last sentence.

Decides what is measured in which order and what the report concludes. Refuses to know how a turn
is taken, and how a conclusion is drawn.
"""

import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcourier.bench.compare import Side
from kvcourier.bench.interleave import Plan, interleave
from kvcourier.bench.pair import PairSpec
from kvcourier.bench.plan import ASKED, Burst, Cell, Planned, Prompts, audiences
from kvcourier.bench.report import Comparison, Report, Row, Section
from kvcourier.bench.samples import METRICS, Collected
from kvcourier.bench.session import Session
from kvcourier.bench.target import Target
from kvcourier.config import TransferMode
from kvcourier.trial.decision import as_json, decide
from kvcourier.trial.fitness import Alone, Facts, Finding, examine
from kvcourier.trial.switching import Steps, differences, steps_to
from kvcourier.trial.traffic import Traffic

_TRIED_ALONE = 4
_SAMPLE = 1000


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """What to try.

    Attributes:
        cells: one per length of prompts and rate; with `traffic`, one per rate.
        traffic: a log whose requests are sent; None: Poisson arrivals of the cells' lengths.
        turns: of each side in each cell.
        margin: a ratio that is surely within 1 +- margin counts as equal.
        ends_at_s: when no further turn should begin (monotonic clock); every cell gets its share.
    """

    baseline: Side
    candidate: Side
    cells: Sequence[Cell]
    traffic: Traffic | None
    turns: int
    margin: float
    ends_at_s: float = float("inf")


def run_trial(settings: TrialSettings, session: Session, report: Report) -> None:
    """Measure into `report`, and say there what follows; blocks.

    What was measured before an error or Ctrl-C is judged as well.

    Raises:
        TargetFailed: a side is not there.
        ConfigError: a side does not offer the mode.
        ProcessFailed: a process of a pair ended.
    """
    sides = (settings.baseline, settings.candidate)
    routers = session.start_pairs(s.where for s in sides if isinstance(s.where, PairSpec))
    targets = [
        session.look(side.where if isinstance(side.where, str) else routers[side.where], side.way)
        for side in sides
    ]
    findings = examine(_facts(settings, targets[0], session, report))
    report.sections.append(_fitness_section(findings))
    for finding in findings:
        session.say(f"{finding.fit}: {finding.sentence}")
    try:
        _measure(settings, targets, session, report)
    finally:
        _conclude(settings, findings, report)


def _measure(
    settings: TrialSettings, targets: Sequence[Target], session: Session, report: Report
) -> None:
    names = (settings.baseline.name, settings.candidate.name)
    for cell in settings.cells:
        rows = [Row(name, cell) for name in names]
        report.rows += rows
        report.comparisons.append(Comparison(*rows))
    for number, comparison in enumerate(report.comparisons):
        now_s = time.monotonic()
        share_s = (settings.ends_at_s - now_s) / (len(report.comparisons) - number)
        rows = [comparison.a, comparison.b]
        interleave(
            session,
            report,
            list(zip(rows, targets, strict=True)),
            settings.turns,
            now_s + share_s,
            _plan(settings.traffic, comparison.a.cell, session),
        )


def _plan(traffic: Traffic | None, cell: Cell, session: Session) -> Plan | None:
    """Turns of a log's requests; None leaves it to `interleave`."""
    if traffic is None:
        return None

    def turn(audience: str, number: int) -> Burst:
        def prompts(length: int) -> Prompts:
            return session.settings.prompts(length, audience)

        return traffic.burst(prompts, number, cell.requests, cell.qps)

    return turn


# Before.


def _facts(settings: TrialSettings, baseline: Target, session: Session, report: Report) -> Facts:
    lengths = sorted({cell.input_tokens for cell in settings.cells})
    alone = []
    for length in lengths:
        failures = session.warm_up(baseline, length)
        report.problems += [f"warm-up, {length} tokens: {each}" for each in failures]
        tried = _alone(baseline, length, session)
        if tried is not None:
            alone.append(tried)
    traffic = settings.traffic
    return Facts(
        brings_push=_brings_push(settings),
        input_tokens=lengths if traffic is None else traffic.input_tokens[:_SAMPLE],
        output_tokens=(
            [session.settings.output_tokens] if traffic is None else traffic.output_tokens[:_SAMPLE]
        ),
        rates=sorted({cell.qps for cell in settings.cells}),
        alone=alone,
        num_prefill=len(baseline.prefill_urls),
    )


def _brings_push(settings: TrialSettings) -> bool:
    modes = [
        ASKED[side.way][0] if side.way in ASKED else None
        for side in (settings.baseline, settings.candidate)
    ]
    return modes == [TransferMode.PULL, TransferMode.PUSH]


def _alone(target: Target, length: int, session: Session) -> Alone | None:
    """Requests one after the other, each with the target to itself; None if none was answered."""
    prompts = session.settings.prompts(length, f"{audiences([target.processes])[0]} alone")
    tried = Collected()
    for number in range(_TRIED_ALONE):
        label = f"one by one, {length:,} tokens"
        burst = (Planned(0.0, prompts, f"alone {number}"),)
        tried.turns.append(session.take_turn(label, target, burst))
    values = {metric.key: tried.values(metric) for metric in METRICS}
    if not values["ttft_ms"]:
        return None
    medians = {key: statistics.median(found) if found else None for key, found in values.items()}
    return Alone(length, medians["ttft_ms"] or 0.0, medians["after_prefill_ms"], medians["tpot_ms"])


# After.


def _conclude(settings: TrialSettings, findings: Sequence[Finding], report: Report) -> None:
    decision = decide(report.comparisons, settings.margin)
    forth = steps_to(settings.candidate, settings.baseline)
    back = steps_to(settings.baseline, settings.candidate)
    told = _differing_keys(settings)
    report.sections += [
        Section(f"Advice: {decision.advice}", decision.because),
        Section("Not decided", decision.undecided),
        _switch_section("To switch on", forth, told),
        _switch_section("To switch back", back),
    ]
    report.details["fitness"] = [
        {"fit": each.fit.value, "sentence": each.sentence} for each in findings
    ]
    report.details["decision"] = as_json(decision)


def _fitness_section(findings: Sequence[Finding]) -> Section:
    nothing = "Nothing is known in advance that speaks for or against the change."
    sentences = tuple(f"{each.fit}: {each.sentence}" for each in findings)
    return Section("Does the traffic fit?", sentences or (nothing,))


def _switch_section(heading: str, steps: Steps, told: Sequence[str] = ()) -> Section:
    # Whatever has a command has a sentence.
    sentences = steps.sentences or ("The sides are the same: there is nothing to switch.",)
    return Section(heading, (*sentences, *told), steps.commands)


def _differing_keys(settings: TrialSettings) -> list[str]:
    before, after = settings.baseline.where, settings.candidate.where
    return differences(_settings_of(before), _settings_of(after))


def _settings_of(where: str | PairSpec) -> Mapping[str, Mapping[str, Any]]:
    config: Path | None = where.config if isinstance(where, PairSpec) else None
    if config is None:
        return {}
    content = tomllib.loads(config.read_text(encoding="utf-8"))
    return {name: table for name, table in content.items() if isinstance(table, dict)}
