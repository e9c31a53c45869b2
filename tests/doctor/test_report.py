"""Every finding is in both forms of the report, whatever is in it, and both count alike."""

import json

from hypothesis import given
from hypothesis import strategies as st

from doctor.planted import healthy
from kvcourier.doctor.checks import CHECKS, judge
from kvcourier.doctor.findings import Finding, Severity, exit_code
from kvcourier.doctor.report import as_dict, as_text, printable

FINDINGS = st.lists(
    st.builds(
        Finding,
        st.sampled_from(Severity),
        st.text(),
        st.text(),
        st.text(),
        st.sampled_from([check.name for check in CHECKS]),
    )
)


@given(FINDINGS)
def test_nothing_is_left_out(findings: list[Finding]) -> None:
    told = json.loads(json.dumps(as_dict(findings)))
    text = as_text(findings).plain
    assert len(told["findings"]) == len(findings)
    assert sum(told["counts"].values()) == len(findings)
    assert told["exit_code"] == exit_code(findings)
    for each in findings:
        assert f"{printable(each.subject)}: {printable(each.evidence)}" in text
        assert printable(each.advice) in text
    assert all(char.isprintable() or char == "\n" for char in text)


@given(st.text())
def test_what_is_printable_stays(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert not text.isprintable() or shown == text


def test_a_healthy_pair_in_words() -> None:
    text = as_text(judge(healthy())).plain
    assert text.startswith("http: every instance answers over HTTP\n  OK       P http://")
    assert text.splitlines()[-1].startswith("0 errors, 0 warnings, ")


def test_one_of_a_kind_is_no_plural() -> None:
    finding = Finding(Severity.ERROR, "P", "is gone", "Start it", "http")
    assert as_text([finding]).plain.splitlines()[-1] == "1 error, 0 warnings, 0 notes, 0 well"
