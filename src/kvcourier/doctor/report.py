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
    """For a terminal: one paragraph a finding, and a last line that sums up."""
    text = Text()
    for each in findings:
        text.append(f"{each.severity.upper():<{_WIDTH}}", _STYLES[each.severity])
        text.append(f"  {each.check}", "bold")
        text.append(f"  {each.subject}: {each.evidence}\n")
        if each.advice:
            text.append(f"{'':<{_WIDTH}}  -> {each.advice}.\n", "italic")
    counts = Counter(each.severity for each in findings)
    text.append(
        f"{counts[Severity.ERROR]} errors, {counts[Severity.WARNING]} warnings, "
        f"{counts[Severity.NOTE]} notes, {counts[Severity.OK]} well"
    )
    return text
