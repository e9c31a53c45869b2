"""`make alerts`: the alert rules in a real Prometheus, in good times and bad.

    python -m alerts.run [--json FILE] [--page FILE] [--only WORD ...]

P, D and a router run, and a Prometheus with the rules that are shipped, but with every duration in
them shorter by `TIMES`. In good times no alert may fire; whatever is done to the processes must
lead to the alerts that are said to tell of it, and these must end when it has ended.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import page_table
from alerts.prometheus import Watcher, watching
from alerts.situations import SITUATIONS, Situation
from chaos.cases import Scene, staged
from page_table import markdown

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "kvcourier.rules.yml"
TIMES = 30.0
HEALTHY_S = 120.0
LONGEST_S = 75.0
"""Until everything that should fire does."""
QUIET_S = 150.0
"""Until nothing fires any more: the longest range of a rule, and what the processes take."""
TIMING = {
    "kv_lease_duration": 3.0,
    "heartbeat_s": 1.0,
    "registration_ttl_s": 3.0,
    "push_registration_timeout": 6.0,
}
"""Deadlines of the protocol, so that the run is short."""
_LOOK_S = 0.25
HEAD = ("what happened", "alerts that had to fire, and after how long", "others that fired")


@dataclasses.dataclass
class Finding:
    """What fired in one situation: seconds since it began, by alert."""

    what: str
    expected: list[str]
    is_healthy: bool
    lasted_s: float
    fired_s: dict[str, float]
    ended: bool = True

    @property
    def problems(self) -> list[str]:
        """What is not as it should be."""
        found = [f"{name} has not fired" for name in self.expected if name not in self.fired_s]
        if self.is_healthy:
            found += [f"{name} has fired" for name in self.fired_s]
        if not self.ended:
            found.append("something fires on when all is well again")
        return [f"{self.what}: {each}" for each in found]


def play(situation: Situation, scene: Scene, watcher: Watcher) -> Finding:
    """Let it happen, note what fires, and wait until nothing does."""
    began = time.monotonic()
    finding = Finding(
        situation.what, sorted(situation.expected), situation.is_healthy, 0.0, fired_s={}
    )
    limit_s = HEALTHY_S if situation.is_healthy else LONGEST_S

    def look() -> set[str]:
        firing = watcher.firing()
        for name in firing:
            finding.fired_s.setdefault(name, round(time.monotonic() - began, 1))
        time.sleep(_LOOK_S)
        return firing

    with situation.happens(scene):
        while time.monotonic() - began < limit_s:
            look()
            if situation.expected and situation.expected <= finding.fired_s.keys():
                break
        finding.lasted_s = round(time.monotonic() - began, 1)
    over = time.monotonic()
    while look():
        if time.monotonic() - over > QUIET_S:
            finding.ended = False
            break
    return finding


def row(finding: Finding) -> tuple[str, str, str]:
    """A line of the table."""
    others = {k: v for k, v in finding.fired_s.items() if k not in finding.expected}
    expected = [
        f"`{name}` {finding.fired_s[name]:.0f} s" if name in finding.fired_s else f"`{name}` NEVER"
        for name in finding.expected
    ]
    what = f"{finding.what} ({finding.lasted_s:.0f} s)"
    return what, ", ".join(expected) or "none", ", ".join(f"`{name}`" for name in others) or "none"


def table(findings: Iterable[Finding]) -> str:
    """All lines, as markdown."""
    return markdown(HEAD, map(row, findings))


def filled(page: str, findings: Iterable[Finding]) -> str:
    """A page with the table between its markers."""
    return page_table.filled(page, "alerts", table(findings))


def read(path: Path) -> list[Finding]:
    """The findings of an earlier run."""
    return [Finding(**each) for each in json.loads(path.read_text())]


def run(situations: Sequence[Situation]) -> list[Finding]:
    """All situations on one cluster, one after the other."""
    findings = []
    with tempfile.TemporaryDirectory(prefix="alerts-") as name:
        folder = Path(name)
        (folder / "prometheus").mkdir()
        environment = {"CHAOS_TIMING": json.dumps(TIMING)}
        with staged(folder, environment) as scene:
            targets = {
                f"kvcourier-{each.name}": f"127.0.0.1:{each.port}" for each in scene.cluster.servers
            }
            with watching(folder / "prometheus", RULES, targets, TIMES) as watcher:
                for situation in situations:
                    print(f"... {situation.what}", flush=True)
                    findings.append(play(situation, scene, watcher))
                    print(" | ".join(row(findings[-1])), flush=True)
    return findings


def main() -> int:
    """Play, show, and say by the exit code whether all was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the findings")
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    parser.add_argument("--only", nargs="*", default=[], help="words that a situation must have")
    options = parser.parse_args()
    findings = run([each for each in SITUATIONS if all(w in each.what for w in options.only)])
    problems = [each for finding in findings for each in finding.problems]
    print(table(findings), *problems, f"{len(problems)} problems", sep="\n")
    if options.json:
        rows = [dataclasses.asdict(each) for each in findings]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        options.page.write_text(filled(options.page.read_text(), findings))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
