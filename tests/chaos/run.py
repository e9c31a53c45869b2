"""`make chaos`: every case once, as a table, and as JSON where it is asked for.

python -m chaos.run [--json FILE] [--page FILE] [--only WORD ...]
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import page_table
from chaos import paths
from chaos.cases import PHASES, Case, Finding, staged
from page_table import markdown

HEAD = ("what", "mode", "phase", "other side knows", "client gets", "blocks back", "next is right")
ON_MEMORY = [
    *(
        Case(mode, phase, what, whom)
        for what in ("kill", "stop")
        for whom in "PD"
        for mode, phase in PHASES
    ),
    Case("push", "registered, not written", "seize", "P"),
]
ON_NETWORK = [
    Case(mode, phase, "drop", way)
    for way in ("side channel", "data path", "both")
    for mode, phase in (("push", "in mid-write"), ("pull", "in mid-READ"))
]
_WORDS = {"kill": "kill -9", "stop": "SIGSTOP", "seize": "interpreter kept for 2 s", "drop": "cut"}


def row(finding: Finding) -> tuple[str, ...]:
    """A line of the table."""
    case = finding.case
    known = "-" if finding.known_s is None else f"{finding.known_s * 1000:.0f} ms"
    return (
        f"{_WORDS[case.what]}: {case.whom}",
        case.mode,
        case.phase,
        known,
        f"{finding.client} ({finding.client_s:.2f} s)",
        f"{finding.blocks_s:.2f} s",
        "yes" if finding.next_is_right else "NO",
    )


def table(findings: Iterable[Finding]) -> str:
    """All lines, as markdown."""
    return markdown(HEAD, map(row, findings))


def filled(page: str, findings: Iterable[Finding]) -> str:
    """A page with the table between its markers."""
    return page_table.filled(page, "chaos", table(findings))


def read(path: Path) -> list[Finding]:
    """The findings of an earlier run."""
    rows = json.loads(path.read_text())
    return [Finding(**{**each, "case": Case(**each["case"])}) for each in rows]


def play(cases: list[Case], environment: dict[str, str]) -> list[Finding]:
    """Every case on one cluster, one after the other."""
    if not cases:
        return []
    findings = []
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        staged(Path(folder), environment) as scene,
    ):
        for case in cases:
            findings.append(scene.play(case))
            print(" | ".join(row(findings[-1])), f"| {findings[-1].reason}", flush=True)
    return findings


def main() -> int:
    """Play, show, and say by the exit code whether all next requests were right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the findings")
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case must have")
    options = parser.parse_args()
    has_network = paths.is_inside() or paths.enter()
    if has_network:
        paths.prepare()
    else:
        print("no network of our own can be had here: ways are not cut", file=sys.stderr)
    chosen = [
        [case for case in cases if all(word in str(case) for word in options.only)]
        for cases in (ON_MEMORY, ON_NETWORK if has_network else [])
    ]
    slow = {"CHAOS_TIMING": json.dumps({"transfer_timeout_s": 3.0})}
    findings = [*play(chosen[0], {}), *play(chosen[1], paths.DATA_PATH | slow)]
    print(table(findings))
    if options.json:
        rows = [dataclasses.asdict(each) for each in findings]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        options.page.write_text(filled(options.page.read_text(), findings))
    return int(not all(each.next_is_right for each in findings))


if __name__ == "__main__":
    sys.exit(main())
