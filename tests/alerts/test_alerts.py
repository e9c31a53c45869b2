"""The run of the alert rules: how rules are made faster, what counts as a problem, and the page."""

import pytest
import yaml

from alerts.prometheus import faster
from alerts.run import ROOT, RULES, Finding, filled, read
from alerts.situations import SITUATIONS

RESULTS = ROOT / "benchmarks" / "results" / "alerts.json"
PAGE = ROOT / "docs" / "watching.md"


def test_every_duration_of_a_rule_is_shorter_and_nothing_else_differs() -> None:
    rule = {
        "alert": "A",
        "expr": "increase(x_total[10m]) > 10 unless x_total offset 90s > 6",
        "for": "1h",
        "annotations": {"summary": "in [10m] there were 5m"},
    }
    (made,) = faster([rule], 30)
    assert made == {
        **rule,
        "expr": "increase(x_total[20000ms]) > 10 unless x_total offset 3000ms > 6",
        "for": "120000ms",
    }


def test_the_shipped_rules_keep_their_number_and_lose_every_minute() -> None:
    rules = yaml.safe_load(RULES.read_text())
    made = faster(rules, 30)
    told = [rule for group in made["groups"] for rule in group["rules"]]
    assert len(told) == sum(len(group["rules"]) for group in rules["groups"])
    for rule in told:
        assert not any(f"{number}m]" in rule["expr"] for number in range(100)), rule["alert"]
        assert rule.get("for", "1ms").endswith("ms")


def test_what_is_expected_is_an_alert_there_is() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    names = {rule["alert"] for group in groups for rule in group["rules"]}
    assert set().union(*(each.expected for each in SITUATIONS)) <= names
    assert sum(each.is_healthy for each in SITUATIONS) == 1


@pytest.mark.parametrize(
    ("finding", "problems"),
    [
        (Finding("x", ["A"], False, 1.0, {"A": 1.0, "B": 2.0}), 0),
        (Finding("x", ["A"], False, 1.0, {"B": 2.0}), 1),
        (Finding("x", [], True, 1.0, {}), 0),
        (Finding("x", [], True, 1.0, {"B": 2.0}), 1),
        (Finding("x", ["A"], False, 1.0, {"A": 1.0}, ended=False), 1),
    ],
)
def test_what_is_missing_or_too_much_is_a_problem(finding: Finding, problems: int) -> None:
    assert len(finding.problems) == problems


def test_the_page_shows_the_findings_and_they_are_as_they_should_be() -> None:
    findings = read(RESULTS)
    assert [each.what for each in findings] == [each.what for each in SITUATIONS]
    assert [each.problems for each in findings] == [[]] * len(findings)

    page = PAGE.read_text()
    assert page == filled(page, findings), "run `make alerts`"
