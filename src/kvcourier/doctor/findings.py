"""What a doctor says: one finding per thing looked at, how bad it is, and what to do.

Decides severities, their order and the exit code that follows from them. Refuses to know what is
looked at.
"""

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """How bad; in this order, the worst last."""

    OK = "ok"
    NOTE = "note"
    """Nothing wrong, but worth knowing: mostly what could not be asked, and why."""
    WARNING = "warning"
    """It works, but not as it should, or not under load."""
    ERROR = "error"
    """KV does not move, or requests will fail."""

    @property
    def rank(self) -> int:
        """Its place in the order."""
        return _ORDER[self]


_ORDER = {severity: place for place, severity in enumerate(Severity)}

EXIT_WELL = 0
EXIT_ERRORS = 1
EXIT_WARNINGS = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer to one question.

    Attributes:
        severity: how bad it is.
        subject: whom it concerns, such as `P http://p:8100` or `P -> D`.
        evidence: what was seen, with numbers and names.
        advice: what to do; empty where there is nothing to do.
        check: name of the check that found it.
    """

    severity: Severity
    subject: str
    evidence: str
    advice: str = ""
    check: str = ""

    def of(self, check: str) -> "Finding":
        """The same, found by this check."""
        return dataclasses.replace(self, check=check)


def ok(subject: str, evidence: str) -> Finding:
    """Looked at, and well."""
    return Finding(Severity.OK, subject, evidence)


def note(subject: str, evidence: str, advice: str = "") -> Finding:
    """Nothing wrong, or nothing known."""
    return Finding(Severity.NOTE, subject, evidence, advice)


def warning(subject: str, evidence: str, advice: str) -> Finding:
    """Not as it should be."""
    return Finding(Severity.WARNING, subject, evidence, advice)


def error(subject: str, evidence: str, advice: str) -> Finding:
    """Does not work."""
    return Finding(Severity.ERROR, subject, evidence, advice)


def worst(findings: Iterable[Finding]) -> Severity:
    """The worst severity among them; OK if there are none."""
    return max((each.severity for each in findings), key=lambda each: each.rank, default=_BEST)


_BEST = Severity.OK


def exit_code(findings: Iterable[Finding]) -> int:
    """What the process says: errors before warnings, and notes are no trouble."""
    return {Severity.ERROR: EXIT_ERRORS, Severity.WARNING: EXIT_WARNINGS}.get(
        worst(findings), EXIT_WELL
    )
