"""O12: one leg fails, or the client leaves, while the other leg runs.

vllm#23981, vllm-ascend#9046, llm-d-router#1206, vllm-project/router#157.

What the client reads (status, body, error event), that a retry has a new transfer id, and that D is
told of the P that got the prompt, is the router's: tests/router/test_failures.py
(test_d_refuses_before_streaming, test_p_refuses, test_p_dies_in_the_middle_of_prefill, the
test_the_client_leaves_..., test_d_ends_in_the_middle_of_the_stream,
test_a_retry_goes_elsewhere_under_a_new_transfer_id) and tests/router/test_routing.py
(test_decode_is_told_of_the_prefill_instance_that_got_the_prompt). Here: what it means for the
instances, with a router that cancels the other leg and with one that does not.
"""

import pytest

from kvcourier.config import Limits
from kvcourier.core.params import parse_params
from kvcourier.sim.faults import Abort, Crash, Leaver
from kvcourier.sim.router import Ending
from worlds.scene import PULL, PUSH, STEP_S, Scene, settings

PROMPT = range(48)
KNOWN_S = 0.3
SLOW = settings(step_s=0.1, max_batch_tokens=16)
MODES = pytest.mark.parametrize("mode", [PUSH, PULL])
CANCELS = pytest.mark.parametrize("cancels", [True, False], ids=["cancels", "does_not"])


def scene(*faults, cancels=True):
    return Scene(*faults, instances={"p0": SLOW, "d0": settings()}, router_cancels=cancels)


def require_all_back(world, by):
    """Everything is free, long before a lease or a registration would have ended."""
    places = [place for place, each in world.world.instances.items() if each.life]
    world.until(
        lambda: all(world.free(place) == world.life(place).pool.num_blocks for place in places), by
    )
    assert world.count("p0", "leases_expired") == 0
    world.finish()


def test_o12_a_d_refuses_the_request():
    world = scene()
    (answer,) = finished(world, world.submit("p0", "p-900", PROMPT, {"do_remote_decode": True}, 1))
    world.life("d0").engine.refuse("d-900", parse_params(dict(answer.params), Limits()))
    require_all_back(world, KNOWN_S)


@CANCELS
def test_o12_b_p_fails_while_d_waits(cancels):
    world = scene(Abort(dispatch=0, at=0.05, by=Leaver.PREFILL), cancels=cancels)
    dispatch = world.ask(PUSH, PROMPT)
    world.end(dispatch, limit_s=0.5)
    assert dispatch.ending is Ending.FAILED
    require_all_back(world, KNOWN_S)


@CANCELS
@MODES
def test_o12_c_p_dies_in_the_middle_of_prefill(mode, cancels):
    crash = Crash(place="p0", at=0.15, down_s=0.5, keeps_engine_id=True)
    world = scene(crash, cancels=cancels)
    dispatch = world.ask(mode, PROMPT)
    world.end(dispatch, limit_s=0.3)
    assert dispatch.ending is Ending.FAILED
    world.until(lambda: world.life("d0").engine.num_live == 0, KNOWN_S)
    world.advance(1.0)
    require_all_back(world, KNOWN_S)


@pytest.mark.parametrize("at", [0.0005, 0.05, 0.31, 0.33, 0.36, 0.4])
@MODES
def test_o12_d_the_client_leaves_in_each_phase(mode, at):
    world = scene()
    dispatch = world.ask(mode, PROMPT, max_tokens=40)
    world.advance(at)
    world.world.router.leave(dispatch)
    assert dispatch.ending is Ending.LEFT
    # The step that runs ends first, and P may have begun one more.
    require_all_back(world, KNOWN_S + 4 * SLOW.engine.step_s)


@CANCELS
@MODES
def test_o12_e_d_dies_while_it_answers(mode, cancels):
    world = scene(cancels=cancels)
    dispatch = world.ask(mode, PROMPT, max_tokens=100)
    world.until(lambda: "received" in world.whats("d0", "d-0"))
    world.advance(3 * STEP_S)
    world.world.crash(Crash(place="d0", at=0.0, down_s=0.05, keeps_engine_id=True))
    world.end(dispatch, limit_s=0.1)
    assert dispatch.ending is Ending.FAILED
    world.advance(0.1)
    require_all_back(world, KNOWN_S)


def finished(world, answers):
    world.until(lambda: answers)
    return answers
