"""Alert rules and the board: they ask for what there is, and the rules say what they should.

That the pages' names are the code's is checked in `tests/runtime/test_metrics.py`.
"""

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

import kvcourier

ROOT = Path(__file__).parents[1]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "kvcourier.rules.yml"
CASES = PROMETHEUS / "kvcourier.tests.yml"
BOARD = ROOT / "deploy" / "grafana" / "kvcourier.json"
STATS = Path(kvcourier.__file__).parent / "vllm_connector" / "stats.py"
PROMTOOL = shutil.which(os.environ.get("KVCOURIER_PROMTOOL", "promtool"))

OF_THE_TARGET = {"job", "instance"}
OF_VLLM = {"model_name", "engine"}
NAME = re.compile(r"(?<![\w:])((?:kvcourier|vllm)[_:][\w:]+)(?:\{([^}]*)\})?")


class Series(NamedTuple):
    """What Prometheus stores: a name, and the labels that it comes with."""

    labels: frozenset[str]
    is_counter: bool


def series_of(name: str, kind: str, labels: set[str]) -> Iterator[tuple[str, Series]]:
    if kind == "histogram":
        yield f"{name}_bucket", Series(frozenset(labels | {"le"}), True)
        for part in ("sum", "count"):
            yield f"{name}_{part}", Series(frozenset(labels), True)
    else:
        yield name, Series(frozenset(labels), kind == "counter")


def existing() -> dict[str, Series]:
    """All series that an instance, a router and vLLM with our connector have."""
    found: dict[str, Series] = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("| `kvcourier"):
            name, kind, labels, _ = (cell.strip() for cell in line.strip("|").split("|"))
            found.update(series_of(name.strip("`"), kind, set(re.findall(r"\w+", labels))))
    histograms, others = STATS.read_text().split("COUNTS: ", 1)
    counters, gauges = others.split("GAUGES: ", 1)
    named = r'"((?:vllm:nixl_|kvcourier:)\w+)"'
    for name in re.findall(named, histograms):
        found.update(series_of(name, "histogram", OF_VLLM))
    for name in re.findall(named, counters):
        found.update(series_of(f"{name}_total", "counter", OF_VLLM))
    for name in re.findall(named, gauges):
        found.update(series_of(name, "gauge", OF_VLLM))
    # vLLM's own, which has it whatever the connector (`vllm/v1/metrics/loggers.py`).
    success = "vllm:request_success_total"
    found.update(series_of(success, "counter", {*OF_VLLM, "finished_reason"}))
    return found


EXISTING = existing()


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return json.loads(BOARD.read_text())["panels"]


def expressions() -> list[tuple[str, str]]:
    alerts = [(rule["alert"], rule["expr"]) for rule in rules()]
    drawn = [
        (panel["title"], target["expr"])
        for panel in panels()
        for target in panel.get("targets", [])
    ]
    return alerts + drawn


def test_the_series_are_those_of_all_three():
    assert len(EXISTING) > 100
    assert EXISTING["kvcourier_outcomes_total"] == Series(frozenset({"outcome"}), True)
    assert EXISTING["kvcourier_holds"] == Series(frozenset({"rank"}), False)
    assert "le" in EXISTING["kvcourier_router_leg_seconds_bucket"].labels
    assert "vllm:nixl_num_kv_expired_reqs_total" in EXISTING
    assert "kvcourier:block_run_length_bucket" in EXISTING
    assert EXISTING["kvcourier:quarantined_bytes"] == Series(frozenset(OF_VLLM), False)


@pytest.mark.parametrize(("who", "expr"), expressions())
def test_an_expression_asks_for_series_and_labels_that_exist(who, expr):
    asked = NAME.findall(expr)
    assert asked or "up{" in expr, who
    known = set(OF_THE_TARGET)
    for name, matchers in asked:
        assert name in EXISTING, f"{who} asks for {name}"
        known |= EXISTING[name].labels
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
            assert label in EXISTING[name].labels | OF_THE_TARGET, f"{who}: {name} has no {label}"
    for grouped in re.findall(r"\bby\s*\(([^)]*)\)", expr):
        assert set(re.findall(r"\w+", grouped)) <= known, who


@pytest.mark.parametrize(("who", "expr"), expressions())
def test_only_what_counts_has_a_rate(who, expr):
    for name, _ in re.findall(r"(?:rate|increase)\(([\w:]+)(\{[^}]*\})?\[", expr):
        assert EXISTING[name].is_counter, f"{who}: {name} is a gauge"


def test_every_alert_says_what_it_means_and_what_to_do():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 25
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        told = rule["annotations"]
        assert set(told) == {"summary", "description", "action"}, rule["alert"]
        assert all(text.endswith(".") for text in told.values()), rule["alert"]
        shown = set(re.findall(r"\$labels\.(\w+)", " ".join(told.values())))
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        assert shown <= grouped | OF_THE_TARGET, f"{rule['alert']}: labels that it lost"


def test_the_page_lists_every_alert_and_no_other():
    page = (ROOT / "docs" / "watching.md").read_text()
    assert set(re.findall(r"KVCourier\w+", page)) == {rule["alert"] for rule in rules()}


def test_every_alert_fires_in_a_case_and_one_case_is_quiet():
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = set(re.findall(r'alertname="(\w+)"', CASES.read_text()))
    assert fired == {rule["alert"] for rule in rules()}
    quiet = cases[0]["promql_expr_test"]
    assert quiet and all(each["exp_samples"] == [] for each in quiet)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: install Prometheus to run its checks")
def test_promtool_finds_that_the_rules_are_sound_and_fire_as_they_should():
    for command in (["check", "rules", RULES.name], ["test", "rules", CASES.name]):
        run = subprocess.run(
            [str(PROMTOOL), *command],
            cwd=PROMETHEUS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stdout


def test_panels_have_ids_places_and_units_of_their_own():
    board = json.loads(BOARD.read_text())
    assert board["uid"] == "kvcourier" and board["id"] is None
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids)) > 20
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            refs = [target["refId"] for target in panel["targets"]]
            assert len(refs) == len(set(refs)) > 0, panel["title"]


def test_the_board_means_to_grafana_what_it_says():
    """Grafana's own types read all of it and write the same again: nothing is misspelt."""
    plugins.register_default_plugins()
    board = json.loads(BOARD.read_text())
    # A board that was never stored has no id; what choices were made from is told by the page
    # that made them, and read by nobody.
    del board["id"]
    for each in board["templating"]["list"]:
        each.pop("definition", None)
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(board))))
    assert list(lost(board, again)) == []


def lost(told: Any, kept: Any, where: str = "board") -> Iterator[str]:
    """What is not in `kept` as it is in `told`; more may be."""
    if isinstance(told, dict) and isinstance(kept, dict):
        for key, value in told.items():
            yield from lost(value, kept.get(key), f"{where}.{key}")
    elif isinstance(told, list) and isinstance(kept, list) and len(told) == len(kept):
        for number, (one, other) in enumerate(zip(told, kept, strict=True)):
            yield from lost(one, other, f"{where}[{number}]")
    elif told != kept:
        yield f"{where}: {told!r} became {kept!r}"


def test_the_board_asks_the_chosen_source_about_the_chosen_instances():
    board = json.loads(BOARD.read_text())
    assert [each["name"] for each in board["templating"]["list"]] == ["source", "job", "instance"]
    for each in board["templating"]["list"][1:]:
        names = re.findall(r"(?:kvcourier_|vllm:)\w+", each["definition"])
        assert names and set(names) <= EXISTING.keys(), "what the choices are taken from"
    for panel in panels():
        for target in panel.get("targets", []):
            assert target["datasource"] == {"type": "prometheus", "uid": "${source}"}
            for name, matchers in NAME.findall(target["expr"]):
                assert 'job=~"$job"' in matchers, f"{panel['title']}: {name}"
                assert 'instance=~"$instance"' in matchers, f"{panel['title']}: {name}"
