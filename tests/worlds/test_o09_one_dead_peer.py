"""O9: of two decode instances one never answers a handshake; the other one notices nothing.

vllm#48633 (S2): a slow handshake on the shared writer path held up the pushes to all peers.
"""

import itertools

from kvcourier.config import PathPolicy, StagingConfig
from kvcourier.errors import RemoteProtocolError
from kvcourier.sim.faults import StickOperations
from kvcourier.sim.network import Speed
from kvcourier.sim.router import Ending
from worlds.scene import PUSH, SHORT, STEP_S, Scene, settings

NUM_REQUESTS = 10
PLACES = ("d1", "d2")


def run(*faults, answers=True, staging=None):
    """Ten requests to each, interleaved; when those of d2 ended, and the scene."""
    changes = {} if staging is None else {"staging": staging}
    scene = Scene(
        *faults,
        instances={
            "p0": settings(num_blocks=256, **changes),
            **{place: settings(num_blocks=128, **changes) for place in PLACES},
        },
        router_cancels=False,
        speed=Speed((0.0004, 0.0004), (0.005, 0.005)),
    )
    asked = []
    if not answers:
        server = scene.world.wire.servers[scene.life("d1").endpoint.config.side_channel_port]

        def ask(payload):
            asked.append(scene.now)
            raise RemoteProtocolError("never mind")

        server.answer = ask
    dispatches = []
    for i in range(NUM_REQUESTS):
        for place in PLACES:
            dispatches.append(scene.ask(PUSH, range(40 * i, 40 * i + 24), decode=place))
            scene.advance(0.002)
        # Both tables of what waits are bounded by what there is.
        assert scene.gauge("p0", "holds") <= len(dispatches)
    scene.end(*dispatches)
    return scene, dispatches[::2], dispatches[1::2], asked


def took(dispatches):
    return [dispatch.ended_at - dispatch.ask.at for dispatch in dispatches]


def test_o9_the_other_peer_notices_nothing():
    healthy = run()
    scene, dead, alive, asked = run(answers=False)
    assert {each.ending for each in alive} == {Ending.SERVED}
    # As with a healthy neighbour, within a step: the clients' connections are not equally fast.
    slower = [here - there for here, there in zip(took(alive), took(healthy[2]), strict=True)]
    assert max(slower) < STEP_S
    for each in dead:
        assert each.ending is Ending.FAILED
        assert "handshake" in each.reason
    assert max(took(dead)) < SHORT.handshake_timeout_s + 0.3
    # One handshake at a time.
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert all(gap >= SHORT.handshake_timeout_s for gap in gaps)
    assert scene.gauge("p0", "waiting_registrations") == 0


def test_o9_writes_that_are_stuck_at_one_peer_take_nobodys_staging_memory():
    stuck = StickOperations(source="p0", target="d1", at=0.0, for_s=30.0, until=None)
    packed = StagingConfig(
        path=PathPolicy.PACKED, send_bytes=8192, receive_bytes=8192, slot_bytes=4096
    )
    scene, dead, alive, _ = run(stuck, staging=packed)
    assert {each.ending for each in alive} == {Ending.SERVED}
    # Its own patience for a slot, then the direct path.
    assert max(took(alive)) < packed.patience_s + 0.3
    assert {each.ending for each in dead} == {Ending.FAILED}
    scene.world.settle()
