"""O2: D aborts after it has registered, and another request wants the same blocks before P writes.

vllm#48633 (C1): P wrote into blocks that were somebody else's by then.
"""

import pytest

from kvcourier.core.outcomes import Outcome
from kvcourier.sim.faults import Abort, Leaver, Lose, Path, StickOperations
from kvcourier.sim.router import Ending
from worlds.scene import PUSH, Scene, settings

SMALL = 8
"""Blocks of D: both requests do not fit."""


def scene(*faults):
    slow = settings(step_s=0.2, max_batch_tokens=12, num_blocks=24)
    return Scene(
        *faults,
        instances={"p0": slow, "d0": settings(num_blocks=SMALL)},
        # P is told by D and nobody else.
        router_cancels=False,
    )


def test_o2_p_never_posts_and_is_free_at_once():
    world = scene(Abort(dispatch=0, at=0.15, by=Leaver.DECODE))
    first = world.ask(PUSH, range(24))
    world.until(lambda: "registered" in world.whats("p0", "p-0"))
    world.until(lambda: first.ending)
    # P still computes, and has said that it will not write: D has its blocks back.
    assert "prefill_finished" not in world.whats("p0", "p-0")
    world.until(lambda: world.free("d0") == SMALL, 0.05)
    second = world.ask(PUSH, range(100, 124))
    world.until(lambda: "prefill_finished" in world.whats("p0", "p-0"))
    # In the step after the one that runs; the lease would last 6 s.
    world.until(lambda: world.told("p0", "p-0"), 0.3)
    assert world.told("p0", "p-0") == [Outcome.SEND_FAILED, Outcome.RELEASED]
    assert not any(what == "posted" for what in world.whats("p0", "p-0"))
    world.end(second)
    assert second.ending is Ending.SERVED, second.reason
    assert world.count("p0", "leases_expired") == 0
    world.finish()


def test_o2_with_the_cancel_lost_the_blocks_are_withheld_until_p_has_confirmed_it():
    deaf = [
        Lose(source="d0", target="p0", at=0.14, for_s=2.0, path=path)
        for path in (Path.SIDE, Path.DATA)
    ]
    world = scene(Abort(dispatch=0, at=0.15, by=Leaver.DECODE), *deaf)
    first = world.ask(PUSH, range(24))
    world.until(lambda: "registered" in world.whats("p0", "p-0"))
    second = world.ask(PUSH, range(100, 124))
    world.end(first)
    # P does not know, and writes when it has computed; nobody else has the blocks then.
    world.until(lambda: world.landed_in("d0"))
    assert world.now < 2.0
    assert world.free("d0") < SMALL
    assert "d-1" not in world.life("d0").engine.grants
    world.until(lambda: "d-1" in world.life("d0").engine.grants, 5.0)
    assert world.now > 0.15
    assert world.count("d0", "quarantines_expired") == 0
    world.end(second)
    assert second.ending is Ending.SERVED, second.reason
    world.finish()


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "lost"])
def test_o2_an_abort_while_the_write_is_in_flight_waits_for_it(cancelled):
    stuck = StickOperations(source="p0", target="d0", at=0.0, for_s=0.5, until=3.0)
    lost = [Lose(source="d0", target="p0", at=0.25, for_s=1.0, path=path) for path in Path]
    world = Scene(
        stuck,
        *([] if cancelled else lost),
        Abort(dispatch=0, at=0.3, by=Leaver.DECODE),
        instances={"p0": settings(), "d0": settings(num_blocks=SMALL)},
        router_cancels=False,
    )
    first = world.ask(PUSH, range(24))
    world.until(lambda: "posted" in world.whats("p0", "p-0"))
    second = world.ask(PUSH, range(100, 124))
    world.end(first)
    world.advance(2.0)
    assert world.free("d0") < SMALL
    assert world.told("d0", "d-0") == []
    # The write lands at last, into blocks that are still nobody else's; then P confirms.
    world.until(lambda: Outcome.RELEASED in world.told("d0", "d-0"), 5.0)
    assert world.now > 3.0
    world.end(second)
    assert second.ending is Ending.SERVED, second.reason
    world.finish()
