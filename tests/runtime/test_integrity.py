"""What has come is compared with its source: real couriers and bytes, memory transport."""

from contextlib import ExitStack

import pytest

from endpoint_rig import DIRECT, Rig
from kvcourier.config import Integrity, PathPolicy, StagingConfig
from kvcourier.layout import CacheLayout
from kvcourier.runtime import digests
from kvcourier.runtime.reports import Outcome
from kvcourier.transport.interface import Descriptors
from kvcourier.transport.memory import Fate, InFlight
from layout_builders import PlacementStyle
from runtime.courier_world import (
    EMPTY,
    STOP,
    TARGET,
    World,
    failure,
    tables,
    transfer,
)

PACKED = StagingConfig(
    path=PathPolicy.PACKED, send_bytes=3 << 12, receive_bytes=2 << 12, slot_bytes=1 << 12
)
MODES = ["push", "pull"]
CHECKED = [Integrity.SAMPLE, Integrity.ALL]


@pytest.fixture(params=[DIRECT, PACKED], ids=["direct", "packed"])
def world(request):
    with ExitStack() as stack:
        yield World(stack, request.param)


def pair(world: World, integrity: Integrity, **shape: object) -> tuple[Rig, Rig]:
    """Another layout, other ranks and other blocks on D."""
    prefill = world.rig("p", num_layers=3, **shape)
    decode = world.rig(
        "d",
        num_layers=3,
        cache_layout=CacheLayout.HND,
        style=PlacementStyle.CROSS_LAYER,
        integrity=integrity,
    )
    return prefill, decode


def counted(rig: Rig, name: str) -> int:
    return sum(counters[name] for counters, _ in rig.endpoint.snapshots().values())


def corrupt(world: World, times: int) -> None:
    """The first so many operations bring something wrong, and nobody is told."""
    left = [times]

    def plan(item: InFlight) -> Fate:
        if item.operation is None or not left[0]:
            return Fate.DELIVER
        left[0] -= 1
        return Fate.CORRUPT

    world.network.fault_plan = plan


def received(prefill: Rig, decode: Rig, name: str) -> None:
    decode.wait_for(f"d-{name}", Outcome.RECEIVED, Outcome.RELEASED)
    prefill.wait_for(f"p-{name}", Outcome.SENT, Outcome.RELEASED)
    assert not decode.wrong(name, TARGET, 0, STOP)


@pytest.mark.parametrize("integrity", CHECKED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_is_right_is_accepted(world, mode, integrity, tp_size):
    prefill, decode = pair(world, integrity, tp_size=tp_size)
    transfer(prefill, decode, mode, "x")
    received(prefill, decode, "x")
    assert counted(decode, "integrity_checks") == 1
    assert counted(decode, "integrity_failures") == 0
    assert "digest_asked" in prefill.whats("p-x")
    for rig in (prefill, decode):
        rig.wait_until(lambda rig=rig: tables(rig) == EMPTY)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_is_wrong_once_is_repaired(world, mode, tp_size):
    prefill, decode = pair(world, Integrity.ALL, tp_size=tp_size)
    corrupt(world, 1)
    transfer(prefill, decode, mode, "x")
    received(prefill, decode, "x")
    assert counted(decode, "integrity_failures") == 1
    assert counted(decode, "repairs") == 1


@pytest.mark.parametrize("mode", MODES)
def test_what_stays_wrong_is_never_accepted(world, mode):
    prefill, decode = pair(world, Integrity.ALL)
    world.plan_all(Fate.CORRUPT)
    transfer(prefill, decode, mode, "x")
    assert failure(decode, "d-x").startswith("integrity: the KV that came differs")
    prefill.wait_for("p-x", Outcome.RELEASED)
    assert counted(decode, "integrity_failures") >= 2
    world.heal()
    world.still_works(prefill, decode)


@pytest.mark.parametrize("mode", MODES)
def test_with_off_it_is_accepted(world, mode):
    """The cost of off."""
    prefill, decode = pair(world, Integrity.OFF)
    world.plan_all(Fate.CORRUPT)
    transfer(prefill, decode, mode, "x")
    decode.wait_for("d-x", Outcome.RECEIVED, Outcome.RELEASED)
    assert decode.wrong("x", TARGET, 0, STOP)
    assert counted(decode, "integrity_failures") == 0


def test_a_sample_finds_what_is_shifted_everywhere(monkeypatch):
    """Each piece comes from where the next one lies: a mapping that is wrong in all its entries."""
    with ExitStack() as stack:
        world = World(stack, DIRECT)
        prefill, decode = pair(world, Integrity.SAMPLE)
        transport = world.transports["p"]
        post = transport.post

        def shifted(operation, agent, *, local, remote, notice=b""):
            table = local.table.copy()
            table[:-1, 0] = local.table[1:, 0]
            wrong = Descriptors(table, local.memory)
            return post(operation, agent, local=wrong, remote=remote, notice=notice)

        monkeypatch.setattr(transport, "post", shifted)
        transfer(prefill, decode, "push", "x")
        # Two writes, and then a READ, which is D's own and right.
        received(prefill, decode, "x")
        assert counted(decode, "integrity_failures") == 2


@pytest.mark.parametrize("mode", MODES)
def test_large_digests_take_turns_with_everything_else(world, mode, monkeypatch):
    """A part at a time: the courier looks elsewhere in between, and the sum is the same."""
    monkeypatch.setattr(digests, "_BYTES_AT_A_TIME", 1)
    monkeypatch.setattr("kvcourier.transport.copying.HostDigester.part_bytes", 1)
    prefill, decode = pair(world, Integrity.ALL)
    transfer(prefill, decode, mode, "x")
    received(prefill, decode, "x")
    assert counted(decode, "integrity_failures") == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_in_the_middle_of_a_digest_gives_the_blocks_back(world, mode, monkeypatch):
    monkeypatch.setattr("kvcourier.runtime.digests.DigestTaker.poll", lambda taker: [])
    prefill, decode = pair(world, Integrity.ALL)
    transfer(prefill, decode, mode, "x")
    decode.wait_until(lambda: gauges_in_flight(decode) > 0)
    decode.endpoint.abort("d-x")
    decode.wait_for("d-x", Outcome.RELEASED)
    prefill.wait_for("p-x", Outcome.RELEASED)
    monkeypatch.undo()
    world.still_works(prefill, decode)


def gauges_in_flight(rig: Rig) -> int:
    """Operations of a rig whose request is being compared."""
    checking = any("read" in what or what == "landed" for what in rig.whats("d-x"))
    return tables(rig)["operations_in_flight"] if checking else 0
