"""Who may talk to an instance: the allow-list, between real endpoints over real sockets."""

import socket

import pytest

from kvcourier.allow_list import AllowList, parse_allow_list
from kvcourier.core.messages import HoldName, Renew, RenewItem, encode, sender_fields
from kvcourier.runtime.reports import Outcome
from runtime.courier_world import STRANGER, counts, failure, inbox_of, outcomes, transfer, want

MODES = pytest.mark.parametrize("mode", ["push", "pull"])


def allowing(*entries: str) -> AllowList:
    return parse_allow_list(entries, "--allow-peer")


def never_called(listener: socket.socket) -> bool:
    listener.setblocking(False)
    try:
        listener.accept()
    except BlockingIOError:
        return True
    return False


# The allow-list.


@MODES
def test_nobody_outside_the_list_is_connected_to(world, mode):
    prefill = world.rig("p")
    decode = world.rig("d", allowed_peers=allowing("p1.internal", "10.0.0.0/8"))
    transfer(prefill, decode, mode, "x")
    address = f"p at 127.0.0.1:{prefill.endpoint.instance_info()['side_channel_port']}"
    assert failure(decode, "d-x") == f"{address} is not among the peers that d allows"
    assert counts(decode)["peers_not_allowed"] == 1
    assert decode.touched() == set()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "::1"])
def test_no_spelling_of_a_host_leads_outside_the_list(world, host):
    prefill = world.rig("p")
    decode = world.rig("d", allowed_peers=allowing("10.0.0.0/8", "127.0.0.1:1"))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(("::1" if ":" in host else "127.0.0.1", 0), family=family) as bait:
        want(prefill, decode, "x", remote_host=host, remote_port=bait.getsockname()[1])
        assert "is not among the peers that d allows" in failure(decode, "d-x")
        assert never_called(bait)


def test_a_registration_from_outside_the_list_is_refused_with_the_reason(world):
    """D is told by the connection that it had made itself; P makes none."""
    prefill = world.rig("p", allowed_peers=allowing("10.0.0.0/8"))
    decode = world.rig("d")
    prefill.hold("p-x", "t-x")
    want(prefill, decode, "x")
    assert failure(decode, "d-x").endswith("is not among the peers that p allows")
    assert counts(prefill)["peers_not_allowed"] >= 1
    assert prefill.endpoint.snapshots()["pp0tp0"][1]["peers"] == 0
    assert "registered" not in prefill.whats("t-x")


def test_a_heartbeat_from_outside_the_list_leads_to_no_connection(world):
    prefill = world.rig("p", allowed_peers=allowing("10.0.0.0/8"))
    prefill.hold("p-x", "t-x")
    send = inbox_of(world, prefill)
    item = RenewItem(HoldName("t-x"), "d-x")
    with socket.create_server(("127.0.0.1", 0)) as bait:
        port = bait.getsockname()[1]
        send(encode(Renew(sender_fields(STRANGER), 1, [item], "127.0.0.1", port)))
        prefill.wait_until(lambda: counts(prefill).get("peers_not_allowed") == 1)
        assert never_called(bait)


@MODES
def test_those_in_the_list_exchange_kv_as_ever(world, mode):
    both = allowing("127.0.0.0/8")
    prefill, decode = world.rig("p", allowed_peers=both), world.rig("d", allowed_peers=both)
    transfer(prefill, decode, mode, "x")
    decode.wait_for("d-x", Outcome.RECEIVED, Outcome.RELEASED)
    assert outcomes(decode, "d-x") == [Outcome.RECEIVED, Outcome.RELEASED]
    world.still_works(prefill, decode)
