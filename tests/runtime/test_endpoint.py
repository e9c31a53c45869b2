"""Two instances in one process, real couriers and sockets, memory transport."""

import pytest

from endpoint_rig import Rig
from kvcourier.layout import CacheLayout
from kvcourier.runtime.reports import Outcome
from kvcourier.transport.memory import MemoryNetwork, MemoryTransport
from layout_builders import PlacementStyle


@pytest.fixture
def factory():
    network = MemoryNetwork()
    return lambda name: MemoryTransport(network, name)


def push(prefill: Rig, decode: Rig, *, start: int = 0, stop: int = 40, register_first: bool = True):
    transfer = {**prefill.coordinates(), "transfer_id": "t1", "remote_request_id": "req"}
    blocks = [5, 0, 3]

    def register() -> None:
        decode.expect("d1", transfer)
        decode.receive("d1", [6, 1, 4][start // 16 :], start, stop)

    if register_first:
        register()
    prefill.hold("p1", "t1")
    if register_first:
        prefill.wait_until(lambda: "registered" in prefill.whats("t1"))
    prefill.prefill("p1", "hello", blocks, stop)
    if not register_first:
        register()
    decode.wait_for("d1", Outcome.RECEIVED, Outcome.RELEASED)
    prefill.wait_for("p1", Outcome.SENT, Outcome.RELEASED)


@pytest.mark.parametrize("register_first", [True, False])
def test_push_moves_the_prompt_whichever_side_comes_first(factory, register_first):
    with Rig("p", factory) as prefill, Rig("d", factory) as decode:
        push(prefill, decode, register_first=register_first)
        assert not decode.wrong("hello", [6, 1, 4], 0, 40)
        assert decode.touched() == {6, 1, 4}


def test_pull_moves_the_prompt(factory):
    with Rig("p", factory) as prefill, Rig("d", factory) as decode:
        prefill.hold("p1", None)
        params = prefill.prefill("p1", "hello", [5, 0, 3], 40)
        decode.expect("d1", params)
        decode.receive("d1", [6, 1, 4], 0, 40)
        decode.wait_for("d1", Outcome.RECEIVED, Outcome.RELEASED)
        prefill.wait_for("p1", Outcome.SENT, Outcome.RELEASED)
        assert not decode.wrong("hello", [6, 1, 4], 0, 40)


@pytest.mark.parametrize("mode", ["push", "pull"])
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
        ({"tp_size": 1, "num_kv_heads": 1}, {"tp_size": 4, "num_kv_heads": 1}),
    ],
    ids=str,
)
def test_different_shapes(factory, mode, shapes):
    with Rig("p", factory, **shapes[0]) as prefill, Rig("d", factory, **shapes[1]) as decode:
        blocks = {16: [2, 0, 3], 32: [3, 1]}
        prefill_blocks = blocks[shapes[0].get("block_size", 16)]
        decode_blocks = blocks[shapes[1].get("block_size", 16)]
        if mode == "push":
            decode.expect("d1", {**prefill.coordinates(), "transfer_id": "t1"})
            decode.receive("d1", decode_blocks, 0, 40)
            prefill.hold("p1", "t1")
            prefill.prefill("p1", "hello", prefill_blocks, 40)
        else:
            prefill.hold("p1", "t1")
            decode.expect("d1", prefill.prefill("p1", "hello", prefill_blocks, 40))
            decode.receive("d1", decode_blocks, 0, 40)
        decode.wait_for("d1", Outcome.RECEIVED, Outcome.RELEASED)
        prefill.wait_for("p1", Outcome.SENT, Outcome.RELEASED)
        assert not decode.wrong("hello", decode_blocks, 0, 40)
