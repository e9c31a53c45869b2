"""O1: D has the first blocks of a prompt cached; only the others are written, to the right slots.

vllm#48758: after a partial hit, D's last slots got P's first blocks.
"""

import pytest

from kvcourier.sim.router import Ending
from worlds.scene import BLOCK, PUSH, Scene


@pytest.mark.parametrize("num_tokens", [20, 18], ids=["full", "half_full"])
@pytest.mark.parametrize("num_cached", [0, 1, 2, 4])
def test_o1_only_the_missing_blocks_are_written(num_cached, num_tokens):
    scene = Scene()
    prompt = range(num_tokens)
    if num_cached:
        # One token behind them, so that their last one is computed as well.
        scene.serve(PUSH, (*prompt[: num_cached * BLOCK], 49))
    before = len(scene.world.data_path.memory.landed)
    dispatch = scene.ask(PUSH, prompt)
    scene.until(lambda: f"d-{dispatch.number}" in scene.life("d0").engine.grants)
    granted = scene.life("d0").engine.grants[f"d-{dispatch.number}"]
    assert len(granted) == 5 - num_cached
    scene.end(dispatch)
    # D has read all five blocks before its first token.
    assert dispatch.ending is Ending.SERVED, dispatch.reason
    written = scene.landed_in("d0", before)
    # K and V of each of two layers, and each of these once.
    assert sorted(written) == sorted(list(granted) * 4)
    scene.finish()


def test_o1_a_full_hit_writes_nothing_and_frees_p_at_once():
    # vLLM tells P nothing; its blocks stay until the lease ends.
    scene = Scene()
    scene.serve(PUSH, range(21))
    before = len(scene.world.data_path.memory.landed)
    dispatch = scene.serve(PUSH, range(21))
    assert scene.landed_in("d0", before) == []
    scene.advance(0.05)
    assert scene.free("p0") == scene.life("p0").pool.num_blocks
    assert scene.count("p0", "leases_expired") == 0
    assert scene.whats("p0", f"p-{dispatch.number}")[-1] == "released"
    scene.finish()
