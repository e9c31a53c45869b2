"""Aborts at any time, by either side or both: every block comes back, and nothing else is told."""

import pytest

from kvcourier.ids import RequestId
from kvcourier.runtime.reports import Outcome
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate
from runtime.courier_world import (
    EMPTY,
    SOURCE,
    STOP,
    outcomes,
    tables,
    transfer,
    want,
)


def expected(world, prefill, decode, port):
    decode.expect("d-x", {**prefill.coordinates(), "transfer_id": "t-x"})


def connecting(world, prefill, decode, port):
    want(prefill, decode, "x", remote_port=port)


def registered_for_nothing(world, prefill, decode, port):
    want(prefill, decode, "x")
    decode.wait_until(lambda: "registered" in decode.whats("d-x"))


def held(world, prefill, decode, port):
    prefill.hold("p-x", "t-x")


def registered(world, prefill, decode, port):
    want(prefill, decode, "x")
    prefill.hold("p-x", "t-x")
    prefill.wait_until(lambda: "registered" in prefill.whats("t-x"))


def prefilled(world, prefill, decode, port):
    prefill.hold("p-x", "t-x")
    prefill.prefill("p-x", "x", SOURCE, STOP)


def writing(world, prefill, decode, port):
    world.plan(Operation.WRITE, Fate.HOLD)
    transfer(prefill, decode, "push", "x")
    world.held(prefill, Operation.WRITE)


def reading(world, prefill, decode, port):
    operation = world.operation("pull")
    world.plan(operation, Fate.HOLD)
    transfer(prefill, decode, "pull", "x")
    world.held(decode, operation)


PHASES = [
    expected,
    connecting,
    registered_for_nothing,
    held,
    registered,
    prefilled,
    writing,
    reading,
]
HANDED_OVER = {
    "d-x": {connecting, registered_for_nothing, registered, writing, reading},
    "p-x": {prefilled, writing, reading},
}


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("first", ["p-x", "d-x"])
def test_aborts_in_every_phase_return_all_blocks(world, dead_port, phase, first):
    """vllm#46283: both sides abort, and decode blocks were never freed."""
    prefill, decode = world.pair(handshake_timeout_s=1.0)
    phase(world, prefill, decode, dead_port)
    rigs = {"p-x": prefill, "d-x": decode}
    for request_id in sorted(rigs, key=lambda name: name != first):
        rigs[request_id].endpoint.abort(RequestId(request_id))
        rigs[request_id].endpoint.abort(RequestId(request_id))
    world.heal()
    for item in world.network.pending:
        if item.held:
            world.network.deliver(item)
    for request_id, rig in rigs.items():
        if phase in HANDED_OVER[request_id]:
            rig.wait_for(request_id, Outcome.RELEASED)
    for rig in rigs.values():
        rig.wait_until(lambda rig=rig: tables(rig) == EMPTY)
    for request_id, rig in rigs.items():
        assert outcomes(rig, request_id).count(Outcome.RELEASED) == int(
            phase in HANDED_OVER[request_id]
        )
    world.still_works(prefill, decode)


def test_declined_kv_is_let_go_at_once(world):
    prefill, decode = world.pair()
    prefill.hold("p-x", "t-x")
    decode.expect("d-x", prefill.prefill("p-x", "x", SOURCE, STOP))
    decode.endpoint.decline(RequestId("d-x"))
    prefill.wait_for("p-x", Outcome.SENT, Outcome.RELEASED)
    decode.wait_until(lambda: tables(decode) == EMPTY)
    assert outcomes(decode, "d-x") == []


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "computing"])
def test_a_transfer_that_is_let_go_is_released(world, is_finished):
    """Nobody ever asked for it; no lease is waited for."""
    (prefill,) = (world.rig("p"),)
    prefill.hold("p-x", "t-x")
    assert not prefill.endpoint.let_go("t-y")
    if not is_finished:
        assert prefill.endpoint.let_go("t-x")
    prefill.prefill("p-x", "x", SOURCE, STOP)
    if is_finished:
        assert prefill.endpoint.let_go("t-x")
    prefill.wait_for("p-x", Outcome.RELEASED)
    assert outcomes(prefill, "p-x") == [Outcome.RELEASED]
    assert tables(prefill) == EMPTY
    assert not prefill.endpoint.let_go("t-x"), "it is over"
