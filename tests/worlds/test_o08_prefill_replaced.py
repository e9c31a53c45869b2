"""O8: a prefill instance is killed with a transfer in flight, and another one takes its address.

vllm#50047, #49238, sglang#34289: D kept the old one's state, or died of the new one's.
"""

import pytest

from kvcourier.core.outcomes import Outcome
from kvcourier.sim.engine import LoadPolicy
from kvcourier.sim.faults import Crash, StickOperations
from kvcourier.sim.router import Ending
from worlds.scene import PULL, PUSH, SHORT, Scene, with_policy

PROMPT = range(24)
KNOWN_S = 0.3


def stuck(mode):
    ends = ("p0", "d0") if mode is PUSH else ("d0", "p0")
    return StickOperations(source=ends[0], target=ends[1], at=0.0, for_s=0.5, until=None)


@pytest.mark.parametrize("keeps_engine_id", [False, True], ids=["new_id", "same_id"])
@pytest.mark.parametrize("policy", LoadPolicy)
@pytest.mark.parametrize("mode", [PUSH, PULL])
def test_o8_d_goes_on_with_the_new_one(mode, policy, keeps_engine_id):
    crash = Crash(place="p0", at=0.5, down_s=0.05, keeps_engine_id=keeps_engine_id)
    scene = Scene(stuck(mode), crash, instances=with_policy(policy), router_cancels=False)
    dispatch = scene.ask(mode, PROMPT)
    scene.until(lambda: scene.in_flight)
    scene.advance(0.5 - scene.now)
    old = scene.life("p0") if scene.instance("p0").life else scene.instance("p0").lives[0]
    assert scene.told("d0", "d-0") == []
    scene.until(lambda: scene.told("d0", "d-0"), KNOWN_S)
    assert scene.told("d0", "d-0")[0] is Outcome.RECEIVE_FAILED
    scene.until(lambda: Outcome.RELEASED in scene.told("d0", "d-0"), KNOWN_S)
    scene.advance(0.1)
    if policy is LoadPolicy.RECOMPUTE:
        # The router gives the call up when P's connection breaks, D's engine does not.
        assert scene.life("d0").engine.num_live == 0
    else:
        assert dispatch.ending is Ending.FAILED
    # No restart of D, no manual step; the old one's bytes and blocks concern nobody.
    assert scene.life("p0") is not old
    scene.serve(mode, range(200, 224))
    assert scene.gauge("d0", "peers") == 1
    scene.finish()


def test_o8_what_was_built_for_the_old_one_is_gone_only_when_its_users_are():
    scene = Scene(stuck(PUSH), instances=with_policy(LoadPolicy.FAIL), router_cancels=False)
    scene.ask(PUSH, PROMPT)
    scene.until(lambda: scene.in_flight)
    assert scene.gauge("d0", "peers") == 1
    # Much longer than an unused peer is kept.
    scene.advance(SHORT.transfer_timeout_s - 0.5)
    assert scene.gauge("d0", "peers") == 1
    scene.world.crash(Crash(place="p0", at=0.0, down_s=0.05, keeps_engine_id=False))
    scene.until(lambda: Outcome.RELEASED in scene.told("d0", "d-0"), KNOWN_S)
    assert scene.gauge("d0", "peers") == 0
    scene.finish()
