"""O3: one request needs two writes, and P cannot post one of them.

vllm#50754: that was logged and told to nobody; D waited for ever.
"""

import pytest

from kvcourier.core.outcomes import Outcome
from kvcourier.core.repairs import LADDER
from kvcourier.sim.engine import LoadPolicy
from kvcourier.sim.network import Speed
from kvcourier.sim.router import Ending
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate
from worlds.scene import PUSH, STEP_S, Scene, settings, with_policy

PROMPT = range(24)
WRITE_S = 1.0
NUM_TRIES = 1 + len(LADDER)


def half_refused(policy):
    """P cannot post to D's second rank, nor can D READ; the write to the first takes a second."""
    scene = Scene(
        instances=with_policy(policy, tp_size=2), speed=Speed(operation_s=(WRITE_S, WRITE_S))
    )
    refused = iter([True] * NUM_TRIES)

    def fate(item):
        written = item.operation is Operation.WRITE and item.target.endswith("tp1")
        is_second = written or item.operation is Operation.READ
        return Fate.REFUSE if is_second and next(refused, False) else None

    scene.decide(fate)
    return scene


@pytest.mark.parametrize("policy", LoadPolicy)
def test_o3_d_is_told_at_once_and_waits_for_the_other_write(policy):
    scene = half_refused(policy)
    dispatch = scene.ask(PUSH, PROMPT)
    scene.until(lambda: "posted" in scene.whats("p0", "p-0"))
    posted_at = scene.now
    scene.until(lambda: scene.told("d0", "d-0"))
    # By a message and not by a deadline.
    assert scene.now < posted_at + NUM_TRIES * STEP_S
    assert scene.told("d0", "d-0") == [Outcome.RECEIVE_FAILED]
    assert scene.in_flight, "the write to the first rank runs"
    assert scene.free("d0") < scene.life("d0").pool.num_blocks
    scene.end(dispatch, limit_s=0.5)
    if policy is LoadPolicy.FAIL:
        assert dispatch.ending is Ending.FAILED
        assert "refused" in dispatch.reason
    else:
        assert dispatch.ending is Ending.SERVED, dispatch.reason
    # Its blocks come back only when the other write is over.
    assert scene.told("d0", "d-0") == [Outcome.RECEIVE_FAILED]
    scene.until(lambda: Outcome.RELEASED in scene.told("d0", "d-0"))
    assert posted_at + WRITE_S <= scene.now < posted_at + WRITE_S + 2 * STEP_S
    assert scene.failed_operations("p0") == 2
    assert scene.count("p0", "leases_expired") == 0
    assert scene.count("p0", "registrations_expired") == 0
    scene.finish()


def test_o3_p_is_never_told_that_it_was_sent():
    scene = half_refused(LoadPolicy.FAIL)
    scene.ask(PUSH, PROMPT)
    scene.until(lambda: Outcome.RELEASED in scene.told("p0", "p-0"))
    assert scene.told("p0", "p-0") == [Outcome.SEND_FAILED, Outcome.RELEASED]
    scene.finish()


def test_o3_a_failure_in_flight_is_told_as_soon():
    scene = Scene(instances={"p0": settings(), "d0": settings(tp_size=2)})
    seen = []

    def fate(item):
        written = item.operation is Operation.WRITE and item.target in (seen or [item.target])
        if len(seen) < NUM_TRIES and (written or item.operation is Operation.READ):
            seen.append(item.target)
            return Fate.FAIL
        return None

    scene.decide(fate)
    dispatch = scene.ask(PUSH, PROMPT)
    scene.end(dispatch, limit_s=0.2)
    assert dispatch.ending is Ending.FAILED
    assert scene.failed_operations("p0") == 2
    scene.finish()
