"""Who serves one dispatch: which D is next, and what failures teach."""

from typing import Any

import httpx
import pytest

from kvcourier.config import Binding, TransferMode
from kvcourier.ids import RequestId
from kvcourier.router.client_call import ClientCall
from kvcourier.router.config import InstanceSpec
from kvcourier.router.events import FailureKind, LegName, Note
from kvcourier.router.instances import Instance
from kvcourier.router.pairing import Pairing
from kvcourier.router.sides import Side


async def nobody(*_args: Any) -> Any:
    raise AssertionError("nobody is told anything here")


CALL = ClientCall(
    "/v1/completions",
    {},
    (),
    TransferMode.PULL,
    Binding.LATE,
    RequestId("r"),
    receive=nobody,
    send=nobody,
    total_s=1.0,
)


def instance(name: str) -> Instance:
    return Instance(InstanceSpec(f"http://{name}"), httpx.AsyncClient())


@pytest.fixture
def decodes() -> list[Instance]:
    return [instance("d0"), instance("d1")]


def make_pairing(decodes: list[Instance], tried: set[Instance], **how: Any) -> Pairing:
    side = Side(decodes, "least_loaded")
    return Pairing(CALL, side, how.pop("prefill", instance("p")), tried, **how)


def note(leg: LegName, kind: FailureKind) -> Note:
    return Note(leg, kind, "for a reason")


def test_each_d_has_it_once(decodes: list[Instance]) -> None:
    pairing = make_pairing(decodes, set())
    assert {pairing.next_decode(), pairing.next_decode()} == set(decodes)
    last = pairing.chosen[LegName.DECODE]
    assert pairing.next_decode() is None
    assert pairing.chosen[LegName.DECODE] is last, "the client is told who had it last"


def test_the_first_d_may_be_given_and_the_keeper_of_the_last_turn_comes_first(
    decodes: list[Instance],
) -> None:
    for each in decodes:
        assert make_pairing(decodes, set(), first_decode=each).next_decode() is each
        assert make_pairing(decodes, set(), keeper=each.name).next_decode() is each


def test_another_d_is_less_busy_only_if_it_has_less_to_do(decodes: list[Instance]) -> None:
    pairing = make_pairing(decodes, set(), first_decode=decodes[0])
    assert not pairing.has_less_busy_decode(), "nobody has it yet"
    pairing.next_decode()
    assert not pairing.has_less_busy_decode()
    decodes[0].work.in_flight = 1
    assert pairing.has_less_busy_decode()
    decodes[1].work.in_flight = 1
    assert not pairing.has_less_busy_decode()


@pytest.mark.parametrize(
    ("kind", "is_tried", "is_reachable"),
    [
        (FailureKind.CONNECT, True, False),
        (FailureKind.STATUS, True, True),
        (FailureKind.NO_KV, False, True),
    ],
)
def test_what_a_failure_teaches(
    decodes: list[Instance], kind: FailureKind, is_tried: bool, is_reachable: bool
) -> None:
    tried: set[Instance] = set()
    pairing = make_pairing(decodes, tried)
    decode = pairing.next_decode()
    assert decode is not None
    pairing.failed(note(LegName.DECODE, kind))
    assert (decode in tried) is is_tried
    assert decode.reachable is is_reachable


def test_who_failed_is_named_if_there_was_anybody(decodes: list[Instance]) -> None:
    pairing = make_pairing(decodes, set(), prefill=None)
    assert pairing.subject(LegName.PREFILL, FailureKind.TIMEOUT) == "no prefill instance"
    assert pairing.headers == ()
    pairing.next_decode()
    name = pairing.chosen[LegName.DECODE].name
    assert pairing.subject(LegName.DECODE, FailureKind.STATUS) == f"the decode instance {name}"
    assert pairing.subject(LegName.DECODE, FailureKind.NO_INSTANCE) == "no decode instance"
    assert pairing.headers == (("x-kv-decode", name),)
