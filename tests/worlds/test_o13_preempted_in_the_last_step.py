"""O13: P's prefill is preempted in the step that would have yielded its only token.

vllm#50297: an empty or freed list of blocks was handed over.
"""

import pytest

from kvcourier.config import Granularity
from kvcourier.core.outcomes import Outcome
from kvcourier.sim.router import Ending
from worlds.scene import PULL, PUSH, Scene, settings

PROMPT = range(44)
STEP_S = 0.1
SLOW = {"step_s": STEP_S, "max_batch_tokens": 16, "num_blocks": 12}


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("when", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("mode", [PUSH, PULL])
def test_o13_it_is_computed_anew_and_handed_over_once(mode, when, granularity):
    scene = Scene(instances={"p0": settings(granularity=granularity, **SLOW), "d0": settings()})
    dispatch = scene.ask(mode, PROMPT)
    engine = scene.life("p0").engine
    # Three chunks of 16, 16 and 12 tokens: the last step runs.
    scene.until(lambda: (sequence := engine.sequence("p-0")) and sequence.num_computed == 32)
    scene.advance(when * STEP_S)
    blocks = list(engine.sequence("p-0").blocks)
    engine.preempt()
    # Its blocks are another prompt's at once.
    other = scene.ask(PULL, range(100, 124))
    assert scene.free("p0") == 12
    scene.end(dispatch, other)
    assert dispatch.ending is Ending.SERVED, dispatch.reason
    assert other.ending is Ending.SERVED, other.reason
    assert engine.scheduler.num_preempted["p-0"] >= 1
    assert len(blocks) == 11
    assert scene.told("p0", "p-0") == [Outcome.SENT, Outcome.RELEASED]
    if mode is PUSH:
        # D registered once, before that, and it stayed valid.
        assert scene.whats("p0", "p-0").count("registered") == 1
        assert scene.count("d0", "registrations_resent") == 0
    scene.finish()
