"""O4: P's blocks are free as soon as the writes are over, and that is told once.

vllm#58188: successful pushes were not reported, so P kept its blocks until the lease ended.
"""

import pytest

from kvcourier.core.outcomes import Outcome
from kvcourier.sim.faults import Duplicate, Path
from kvcourier.sim.router import Ending
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate
from worlds.scene import PULL, PUSH, STEP_S, Scene, settings

SENT = [Outcome.SENT, Outcome.RELEASED]


@pytest.mark.parametrize("mode", [PUSH, PULL])
def test_o4_p_is_free_by_the_next_step_and_hears_no_more_of_it(mode):
    # Each message and notice of a second comes again later.
    doubled = [
        Duplicate(source=a, target=b, at=0.0, for_s=1.0, path=path, again_after_s=after)
        for a, b in (("p0", "d0"), ("d0", "p0"))
        for path, after in ((Path.SIDE, 0.1), (Path.DATA, 2.0))
    ]
    scene = Scene(*doubled)
    dispatch = scene.ask(mode, range(24))
    scene.until(lambda: Outcome.RECEIVED in scene.told("d0", "d-0"))
    scene.until(lambda: scene.told("p0", "p-0"), 2 * STEP_S)
    assert scene.told("p0", "p-0") == SENT
    assert scene.free("p0") == scene.life("p0").pool.num_blocks
    scene.end(dispatch)
    scene.advance(3 * scene.world.plan.timing.kv_lease_duration)
    assert scene.told("p0", "p-0") == SENT
    assert scene.told("d0", "d-0") == [Outcome.RECEIVED, Outcome.RELEASED]
    assert scene.count("p0", "leases_expired") == 0
    scene.finish()


def held_writes(scene):
    """Both writes of the next push, held."""
    scene.decide(lambda item: Fate.HOLD if item.operation is Operation.WRITE else None)
    dispatch = scene.ask(PUSH, range(24))
    scene.until(lambda: sum(item.held for item in scene.in_flight) == 2)
    scene.decide(lambda item: Fate.DELIVER if item.operation else None)
    return dispatch, [item for item in scene.in_flight if item.held]


def test_o4_the_writes_of_two_ranks_may_end_in_different_steps():
    scene = Scene(instances={"p0": settings(), "d0": settings(tp_size=2)})
    dispatch, (first, second) = held_writes(scene)
    memory = scene.world.data_path.memory
    memory.deliver(first)
    wake(scene)
    scene.advance(1.0)
    assert scene.told("p0", "p-0") == []
    assert scene.told("d0", "d-0") == []
    memory.deliver(second)
    wake(scene)
    scene.end(dispatch, limit_s=0.1)
    assert dispatch.ending is Ending.SERVED, dispatch.reason
    assert scene.told("p0", "p-0") == SENT


def test_o4_what_has_failed_first_is_never_reported_as_sent():
    scene = Scene(instances={"p0": settings(), "d0": settings(tp_size=2)})
    dispatch, (first, second) = held_writes(scene)
    memory = scene.world.data_path.memory
    # Nor does it help to try again.
    scene.decide(
        lambda item: (
            Fate.FAIL
            if item.operation is Operation.READ or (item.operation and item.target == first.target)
            else None
        )
    )
    memory.fail(first)
    wake(scene)
    scene.end(dispatch, limit_s=0.2)
    assert dispatch.ending is Ending.FAILED
    assert Outcome.RELEASED not in scene.told("p0", "p-0")
    memory.deliver(second)
    wake(scene)
    scene.advance(0.1)
    assert scene.told("p0", "p-0") == [Outcome.SEND_FAILED, Outcome.RELEASED]


def wake(scene):
    """What a test has done to an operation is not on the world's timeline."""
    for place in ("p0", "d0"):
        for driver in scene.life(place).drivers.values():
            driver.wake()
    scene.advance(STEP_S)
