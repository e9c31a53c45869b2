"""Findings as text and as JSON.

Decides their form. Refuses to know what was found. Pure.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from kvcourier.doctor.checks import CHECKS
from kvcourier.doctor.findings import Finding, Severity, exit_code, worst

_STYLES = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.WARNING: "yellow",
    Severity.ERROR: "bold red",
}
_WORDS = (
    (Severity.ERROR, "error", "errors"),
    (Severity.WARNING, "warning", "warnings"),
    (Severity.NOTE, "note", "notes"),
    (Severity.OK, "well", "well"),
)
_WIDTH = max(len(each) for each in Severity)


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """JSON-ready: what was found, by check, and what it comes to."""
    counts = Counter(each.severity for each in findings)
    return {
        "worst": worst(findings).value,
        "exit_code": exit_code(findings),
        "counts": {severity.value: counts[severity] for severity in Severity},
        "checks": {check.name: check.title for check in CHECKS},
        "findings": [
            {
                "check": each.check,
                "severity": each.severity.value,
                "subject": each.subject,
                "evidence": each.evidence,
                "advice": each.advice,
            }
            for each in findings
        ],
    }


def as_text(findings: Sequence[Finding]) -> Text:
    """For a terminal: what was found, check by check, and a last line that sums up."""
    text = Text()
    for check in CHECKS:
        found = [each for each in findings if each.check == check.name]
        if found:
            text.append(f"{check.name}: {check.title}\n", "bold")
        for each in found:
            text.append(f"  {each.severity.upper():<{_WIDTH}}", _STYLES[each.severity])
            text.append(f"  {printable(each.subject)}: {printable(each.evidence)}\n")
            if each.advice:
                text.append(f"  {'':<{_WIDTH}}  -> {printable(each.advice)}.\n", "italic")
    counts = Counter(each.severity for each in findings)
    text.append(
        ", ".join(
            f"{counts[severity]} {word if counts[severity] == 1 else plural}"
            for severity, word, plural in _WORDS
        )
    )
    return text


def printable(text: str) -> str:
    """A text that may repeat what an instance said, without what would steer a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
