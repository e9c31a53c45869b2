"""The packed path between two whole instances: real couriers and bytes, memory transport."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from endpoint_rig import DIRECT
from kv_content import write_prompt
from kvcourier.config import PathPolicy, StagingConfig
from kvcourier.layout import CacheLayout, TokenSpan
from kvcourier.runtime.packed_receiver import PackedReceiver
from kvcourier.runtime.path_choice import PathChooser
from kvcourier.runtime.reports import Outcome
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate, MemoryTransport
from layout_builders import PlacementStyle
from runtime.courier_world import (
    SOURCE,
    STOP,
    TARGET,
    World,
    failure,
    outcomes,
    transfer,
    want,
)

MANY_PARCELS = StagingConfig(
    path=PathPolicy.PACKED, send_bytes=3 << 12, receive_bytes=2 << 12, slot_bytes=1 << 12
)
ONE_SLOT = replace(MANY_PARCELS, send_bytes=1 << 12, receive_bytes=1 << 12)


@pytest.fixture
def packed():
    with ExitStack() as stack:
        yield World(stack, MANY_PARCELS)


def posted(rig, name):
    """The story's entries of what was posted."""
    story = rig.endpoint.story(name) or ()
    return [entry for entry in story if entry["what"] == "posted"]


def received(prefill, decode, name):
    decode.wait_for(f"d-{name}", Outcome.RECEIVED, Outcome.RELEASED)
    prefill.wait_for(f"p-{name}", Outcome.SENT, Outcome.RELEASED)
    assert not decode.wrong(name, TARGET, 0, STOP)
    assert decode.touched() == set(TARGET)


@pytest.mark.parametrize("staging", [MANY_PARCELS, ONE_SLOT], ids=["slots", "slot"])
def test_a_prompt_larger_than_the_ring_streams_through_it(packed, staging):
    prefill, decode = (packed.rig(name, staging=staging, num_layers=12) for name in "pd")
    transfer(prefill, decode, "push", "x")
    received(prefill, decode, "x")
    (entry,) = posted(prefill, "p-x")
    assert entry["path"] == "packed"
    assert entry["pieces"] * staging.slot_bytes >= entry["bytes"] > staging.receive_bytes
    assert entry["direct_estimate_s"] > 0 and entry["packed_estimate_s"] > 0


def test_the_same_slots_are_written_again_without_new_operations(packed, monkeypatch):
    again = []
    post_again = MemoryTransport.post_again

    def noted(transport, handle, notice=b""):
        again.append(handle)
        post_again(transport, handle, notice)

    monkeypatch.setattr(MemoryTransport, "post_again", noted)
    prefill, decode = (packed.rig(name, staging=ONE_SLOT, num_layers=12) for name in "pd")
    for name in "xy":
        transfer(prefill, decode, "push", name)
        received(prefill, decode, name)
    (entry,) = posted(prefill, "p-x")
    # One slot on each side: all full parcels but the first are the same WRITE.
    assert len(again) == 2 * (entry["bytes"] // ONE_SLOT.slot_bytes) - 1


def test_only_a_transfer_that_had_the_slots_for_itself_is_learnt_from(packed, monkeypatch):
    learnt = []
    monkeypatch.setattr(PathChooser, "learn_packed", lambda *measured: learnt.append(measured))
    prefill, decode = (packed.rig(name) for name in "pd")
    transfer(prefill, decode, "push", "x")
    received(prefill, decode, "x")
    assert len(learnt) == 1
    packed.plan(Operation.WRITE, Fate.HOLD)
    for name, source, target in (("y", SOURCE, TARGET), ("z", [1, 2, 4], [2, 5, 7])):
        decode.expect(f"d-{name}", {**prefill.coordinates(), "transfer_id": f"t-{name}"})
        decode.receive(f"d-{name}", target, 0, STOP)
        prefill.hold(f"p-{name}", f"t-{name}")
        prefill.prefill(f"p-{name}", name, source, STOP)
        prefill.wait_until(lambda name=name: bool(posted(prefill, f"p-{name}")))
    packed.heal()
    for item in list(packed.network.pending):
        packed.network.deliver(item)
    for name in "yz":
        decode.wait_for(f"d-{name}", Outcome.RECEIVED, Outcome.RELEASED)
        prefill.wait_for(f"p-{name}", Outcome.SENT, Outcome.RELEASED)
    assert len(learnt) == 1


@pytest.mark.parametrize(
    "shapes",
    [
        ({"tp_size": 4}, {"tp_size": 2}),
        ({"tp_size": 1}, {"tp_size": 4}),
        ({"pp_size": 2}, {"pp_size": 1, "tp_size": 2}),
        ({"block_size": 16}, {"block_size": 32, "num_blocks": 4}),
        ({"block_size": 32, "num_blocks": 4}, {"block_size": 16}),
        ({"cache_layout": CacheLayout.HND}, {"style": PlacementStyle.INTERLEAVED}),
        ({"tp_size": 4, "num_kv_heads": 2}, {"tp_size": 1, "num_kv_heads": 2}),
    ],
    ids=str,
)
def test_different_shapes(packed, shapes):
    prefill, decode = (packed.rig(n, **shape) for n, shape in zip("pd", shapes, strict=True))
    blocks = [{16: [2, 0, 3], 32: [3, 1]}[shape.get("block_size", 16)] for shape in shapes]
    decode.expect("d1", {**prefill.coordinates(), "transfer_id": "t1"})
    decode.receive("d1", blocks[1], 0, 40)
    prefill.hold("p1", "t1")
    prefill.prefill("p1", "hello", blocks[0], 40)
    decode.wait_for("d1", Outcome.RECEIVED, Outcome.RELEASED)
    prefill.wait_for("p1", Outcome.SENT, Outcome.RELEASED)
    assert not decode.wrong("hello", blocks[1], 0, 40)


def test_many_at_once_share_the_slots(packed):
    prefill, decode = packed.pair()
    names = [f"n{index}" for index in range(8)]
    for name in names:
        prefill.hold(f"p-{name}", f"t-{name}")
        decode.expect(f"d-{name}", {**prefill.coordinates(), "transfer_id": f"t-{name}"})
    # They use the same blocks of D one after the other, and P's all at once.
    prefill.prefill("p-n0", "same", SOURCE, STOP)
    for name in names[1:]:
        prefill.endpoint.finish_prefill(f"p-{name}", [SOURCE], STOP)
    for name in names:
        decode.receive(f"d-{name}", TARGET, 0, STOP)
    for name in names:
        decode.wait_for(f"d-{name}", Outcome.RECEIVED, Outcome.RELEASED)
        prefill.wait_for(f"p-{name}", Outcome.SENT, Outcome.RELEASED)
    assert not decode.wrong("same", TARGET, 0, STOP)


@pytest.mark.parametrize("bare", ["p", "d"])
def test_an_instance_without_staging_is_served_directly(packed, bare):
    staging = {name: DIRECT if name == bare else MANY_PARCELS for name in "pd"}
    prefill, decode = (packed.rig(name, staging=staging[name]) for name in "pd")
    transfer(prefill, decode, "push", "x")
    received(prefill, decode, "x")
    assert posted(prefill, "p-x")[0]["path"] == "direct"


def test_a_ring_that_is_taken_makes_room_by_the_direct_path(packed):
    """A slow transfer never delays others: who gets no slot in time goes directly."""
    impatient = replace(ONE_SLOT, patience_s=0.05)
    prefill, decode = (packed.rig(name, staging=impatient) for name in "pd")
    packed.plan(Operation.WRITE, Fate.HOLD)
    want(prefill, decode, "slow")
    prefill.hold("p-slow", "t-slow")
    prefill.prefill("p-slow", "slow", SOURCE, STOP)
    stuck = packed.held(prefill, Operation.WRITE)
    packed.heal()
    decode.expect("d-x", {**prefill.coordinates(), "transfer_id": "t-x"})
    decode.receive("d-x", [2, 5, 7], 0, STOP)
    prefill.hold("p-x", "t-x")
    prefill.prefill("p-x", "x", [1, 2, 4], STOP)
    decode.wait_for("d-x", Outcome.RECEIVED, Outcome.RELEASED)
    assert not decode.wrong("x", [2, 5, 7], 0, STOP)
    packed.network.deliver(stuck)
    decode.wait_for("d-slow", Outcome.RECEIVED, Outcome.RELEASED)
    assert not decode.wrong("slow", TARGET, 0, STOP)


def test_a_parcel_that_comes_after_an_abort_touches_no_block(packed):
    """D's blocks may be somebody else's by then; only staging memory was written."""
    prefill, decode = packed.pair()
    # The bytes arrive, the notices that tell of them do not.
    packed.network.fault_plan = lambda item: (
        Fate.HOLD if item.is_notification and b"parcel" in item.payload else Fate.DELIVER
    )
    transfer(prefill, decode, "push", "x")
    prefill.wait_until(lambda: bool(packed.network.pending))
    decode.endpoint.abort("d-x")
    decode.wait_for("d-x", Outcome.RELEASED)
    prefill.wait_for("p-x", Outcome.RELEASED)
    assert outcomes(decode, "d-x") == [Outcome.RELEASED]
    write_prompt(decode.caches, "somebody else's", TARGET, TokenSpan(0, STOP))
    packed.heal()
    for item in list(packed.network.pending):
        packed.network.deliver(item)
    # A whole transfer later the courier has certainly seen them.
    decode.expect("d-y", {**prefill.coordinates(), "transfer_id": "t-y"})
    decode.receive("d-y", [2, 5, 7], 0, STOP)
    prefill.hold("p-y", "t-y")
    prefill.prefill("p-y", "y", SOURCE, STOP)
    decode.wait_for("d-y", Outcome.RECEIVED, Outcome.RELEASED)
    assert not decode.wrong("y", [2, 5, 7], 0, STOP)
    assert not decode.wrong("somebody else's", TARGET, 0, STOP)


def test_a_write_that_fails_is_told_and_the_slots_come_back(packed):
    prefill, decode = packed.pair()
    packed.plan_all(Fate.FAIL)
    transfer(prefill, decode, "push", "x")
    assert failure(decode, "d-x")
    packed.heal()
    packed.still_works(prefill, decode)


def test_a_lost_open_falls_back(packed, monkeypatch):
    """Nothing that can get lost is waited for without end."""
    impatient = replace(MANY_PARCELS, patience_s=0.05)
    prefill, decode = (packed.rig(name, staging=impatient) for name in "pd")
    monkeypatch.setattr(PackedReceiver, "on_message", lambda self, message: None)
    transfer(prefill, decode, "push", "x")
    received(prefill, decode, "x")
    assert posted(prefill, "p-x")[-1]["path"] == "direct"


def test_a_pull_of_scattered_blocks_is_written_by_the_holder(packed):
    prefill, decode = packed.pair()
    transfer(prefill, decode, "pull", "x")
    received(prefill, decode, "x")
    assert posted(prefill, "p-x")[0]["path"] == "packed"
    assert not posted(decode, "d-x")
    packed.still_works(prefill, decode)


@pytest.mark.parametrize("bare", ["p", "d"])
def test_a_pull_is_read_where_one_side_has_no_staging(packed, bare):
    staging = {name: DIRECT if name == bare else MANY_PARCELS for name in "pd"}
    prefill, decode = (packed.rig(name, staging=staging[name]) for name in "pd")
    transfer(prefill, decode, "pull", "x")
    received(prefill, decode, "x")
    assert posted(decode, "d-x")[0]["operation"] == "READ"
