"""A real Prometheus beside real processes, with time that runs faster for its rules.

Decides how the rules are made to look at short stretches, and how Prometheus is started and asked.
Refuses to know what happens to the processes it watches.
"""

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvcourier.demo.processes import Children
from ports import free_port

PROMETHEUS = shutil.which(os.environ.get("KVCOURIER_PROMETHEUS", "prometheus"))
SCRAPE_S = 0.5
_READY_S = 30.0
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_IN_EXPR = re.compile(r"(\[|offset )(\d+)([smh])")
_ALONE = re.compile(r"^(\d+)([smh])$")


def faster(rules: Any, times: float) -> Any:
    """The rules with every range, offset and `for` shorter by so many times; others as they are.

    So a minute with them is as `times` minutes with the rules that are shipped, if what is counted
    comes as often.
    """
    if isinstance(rules, list):
        return [faster(each, times) for each in rules]
    if not isinstance(rules, dict):
        return rules
    made = {key: faster(value, times) for key, value in rules.items()}
    if "alert" in made:
        made["expr"] = _IN_EXPR.sub(lambda m: m[1] + _shorter(m[2], m[3], times), made["expr"])
        if "for" in made:
            made["for"] = _ALONE.sub(lambda m: _shorter(m[1], m[2], times), made["for"])
    return made


def _shorter(number: str, unit: str, times: float) -> str:
    return f"{round(int(number) * _SECONDS[unit] / times * 1000)}ms"


@dataclass(frozen=True)
class Watcher:
    """A Prometheus that runs."""

    url: str
    client: httpx.Client

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        alerts = self._get("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def targets_up(self) -> int:
        """How many of its targets answer."""
        targets = self._get("targets")["activeTargets"]
        return sum(each["health"] == "up" for each in targets)

    def _get(self, what: str) -> Any:
        response = self.client.get(f"{self.url}/api/v1/{what}")
        response.raise_for_status()
        return response.json()["data"]


@contextlib.contextmanager
def watching(
    folder: Path, rules: Path, targets: Mapping[str, str], times: float
) -> Iterator[Watcher]:
    """Prometheus with the rules, `times` as fast; `targets` maps a job to its `host:port`."""
    assert PROMETHEUS is not None, "no prometheus: install it, or name it in KVCOURIER_PROMETHEUS"
    quick = folder / "rules.yml"
    quick.write_text(yaml.safe_dump(faster(yaml.safe_load(rules.read_text()), times)))
    pace = f"{round(SCRAPE_S * 1000)}ms"
    settings = {
        "global": {
            "scrape_interval": pace,
            "scrape_timeout": pace,
            "evaluation_interval": pace,
        },
        "rule_files": [str(quick)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in targets.items()
        ],
    }
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings))
    port = free_port()
    command = [
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with Children(folder) as children, httpx.Client(trust_env=False, timeout=10) as client:
        children.start("prometheus", command)
        watcher = Watcher(f"http://127.0.0.1:{port}", client)
        deadline = time.monotonic() + _READY_S
        while not _is_ready(watcher, len(targets)):
            children.check()
            if time.monotonic() > deadline:
                sys.exit(f"Prometheus does not see all targets; see {folder}/prometheus.log")
            time.sleep(0.1)
        yield watcher


def _is_ready(watcher: Watcher, num_targets: int) -> bool:
    try:
        return watcher.targets_up() == num_targets
    except httpx.HTTPError:
        return False
