"""Each planted fault is found and named; a healthy pair has none."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.planted import (
    ABOUT_HEALTHY,
    found,
    healthy,
    instance,
    offer_of,
    troubles,
    with_decode,
    with_prefill,
)
from kvcourier.config import TransferMode
from kvcourier.doctor.checks import CHECKS, judge
from kvcourier.doctor.facts import Engine, Facts, Place, Role
from kvcourier.doctor.findings import Severity, exit_code, worst
from kvcourier.doctor.rules.reach import is_loopback

ERROR, WARNING, NOTE, OK = (
    Severity.ERROR,
    Severity.WARNING,
    Severity.NOTE,
    Severity.OK,
)


def test_a_healthy_pair_has_no_trouble() -> None:
    assert troubles(healthy()) == []
    assert exit_code(judge(healthy())) == 0


def test_nothing_at_all_is_no_trouble_either() -> None:
    assert troubles(Facts()) == []


def test_checks_have_names_of_their_own() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_every_finding_of_trouble_says_what_to_do() -> None:
    for facts in (
        with_prefill(problem="nothing listens there"),
        with_decode(engine=Engine.VLLM_WITH_NIXL),
        with_decode(told=None, told_problem="no answer"),
    ):
        assert troubles(facts)
        assert all(each.advice and each.evidence and each.subject for each in troubles(facts))


def test_a_wrong_port() -> None:
    (finding,) = found(with_prefill(problem="nothing listens there"), "http", ERROR)
    assert "nothing listens there" in finding.evidence and "port" in finding.advice


def test_a_wrong_side_channel_port() -> None:
    facts = with_prefill(told=None, offer=None, told_problem="Connection refused")
    (finding,) = found(facts, "side-channel", ERROR)
    assert "127.0.0.1:5600" in finding.evidence and "Connection refused" in finding.evidence


def test_another_instance_at_the_side_channel_port() -> None:
    facts = with_decode(place=Place("d2", "127.0.0.1", 5601))
    (finding,) = found(facts, "side-channel", ERROR)
    assert "d2" in finding.evidence


def test_another_connector() -> None:
    (finding,) = found(with_decode(engine=Engine.VLLM_WITH_NIXL), "connector", ERROR)
    assert "NixlConnector" in finding.evidence and "CourierConnector" in finding.advice


@pytest.mark.parametrize("field", ["model", "dtype", "num_layers", "cache_format"])
def test_a_differing_fact_is_named_with_both_values(field: str) -> None:
    offer = offer_of("d")
    other = 99 if field == "num_layers" else "another"
    told = msgspec.structs.replace(
        instance(Role.DECODE).told,
        offer=msgspec.structs.replace(
            offer, facts=msgspec.structs.replace(offer.facts, **{field: other})
        ),
    )
    (finding,) = found(with_decode(told=told), "handshake", ERROR)
    assert finding.evidence.startswith(f"{field}: P has ") and str(other) in finding.evidence


def test_modes_that_do_not_meet() -> None:
    pull, push = (
        instance(role, msgspec.structs.replace(offer_of(role.value.lower()), modes=[mode]))
        for role, mode in ((Role.PREFILL, TransferMode.PULL), (Role.DECODE, TransferMode.PUSH))
    )
    findings = found(Facts(prefill=(pull,), decode=(push,)), "modes", ERROR)
    assert len(findings) == 2 and "P takes part in pull" in findings[0].evidence


def test_a_mode_that_shall_work_and_does_not() -> None:
    pull = instance(Role.DECODE, msgspec.structs.replace(offer_of("d"), modes=[TransferMode.PULL]))
    assert not found(healthy(decode=(pull,)), "modes", ERROR)
    assert found(healthy(decode=(pull,), modes=(TransferMode.PUSH,)), "modes", ERROR)


def test_an_address_that_leads_peers_to_themselves() -> None:
    elsewhere = msgspec.structs.replace(ABOUT_HEALTHY, boot_id="another machine")
    facts = healthy(decode=(instance(Role.DECODE, about=elsewhere),))
    assert len(found(facts, "told-address", ERROR)) == 2


def test_a_local_address_behind_a_public_url() -> None:
    facts = with_prefill(url="http://10.0.0.1:8100")
    assert len(found(facts, "told-address", WARNING)) == 1


def test_a_local_address_that_nobody_answers_at_from_here() -> None:
    facts = with_prefill(url="http://10.0.0.1:8100", told=None, told_problem="refused")
    assert len(found(facts, "told-address", ERROR)) == 1


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
    ],
)
def test_hosts_that_name_who_asks(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@given(st.lists(st.sampled_from(Severity)))
def test_the_exit_code_is_that_of_the_worst(severities: list[Severity]) -> None:
    from kvcourier.doctor.findings import Finding

    findings = [Finding(each, "s", "e") for each in severities]
    expected = 1 if ERROR in severities else 3 if WARNING in severities else 0
    assert exit_code(findings) == expected
    assert all(worst(findings).rank >= each.rank for each in severities)
