"""O14: P keeps what D has no blocks for, and D has reserved its blocks for what P cannot begin.

Each waits for the other. Nothing but a deadline ended that, after minutes.
"""

import pytest

from kvcourier.config import Binding
from kvcourier.sim.router import Ending
from kvcourier.sim.scheduler import SimScheduler
from worlds.scene import PULL, PUSH, Scene, settings

NUM_TOKENS = 16
PROMPT_BLOCKS = 4
EXPIRIES = ("leases_expired", "registrations_expired", "quarantines_expired")
LATE_S = 0.5
"""By so much the D legs of some prompts are late: P has finished them by then."""


def short_of_blocks(**decode) -> Scene:
    """P has blocks for two prompts, D for two and their answers."""
    return Scene(
        instances={
            "p0": settings(num_blocks=2 * PROMPT_BLOCKS),
            "d0": settings(num_blocks=2 * PROMPT_BLOCKS + 2, **decode),
        }
    )


def prompt(number: int) -> range:
    return range(100 * number, 100 * number + NUM_TOKENS)


def ask_crosswise(scene: Scene, kept, reserved):
    """P computes the first ones, and D hears of the others first."""
    dispatches = [
        scene.ask(mode, prompt(n), binding=binding, leg_gap_s=LATE_S)
        for n, (mode, binding) in enumerate(kept)
    ]
    scene.until(lambda: scene.gauge("p0", "holds") == 2 and scene.free("p0") == 0)
    scene.advance(0.1)
    dispatches += [
        scene.ask(mode, prompt(10 + n), binding=binding)
        for n, (mode, binding) in enumerate(reserved)
    ]
    scene.until(lambda: scene.free("d0") < PROMPT_BLOCKS)
    return dispatches


CASES = {
    "push alone": ([(PUSH, None)] * 2, [(PUSH, None)] * 2),
    "pull kept, push reserved": ([(PULL, None)] * 2, [(PUSH, None)] * 2),
    "late push kept": ([(PUSH, Binding.LATE)] * 2, [(PUSH, None)] * 2),
    "early pull reserved": ([(PULL, None), (PUSH, None)], [(PULL, Binding.EARLY)] * 2),
    "of each": ([(PULL, None), (PUSH, None)], [(PULL, Binding.EARLY), (PUSH, None)]),
}


def expiries(scene: Scene) -> int:
    return sum(scene.count(place, name) for place in ("p0", "d0") for name in EXPIRIES)


@pytest.mark.parametrize("case", CASES)
def test_o14_all_are_served_without_a_deadline(case):
    scene = short_of_blocks()
    dispatches = ask_crosswise(scene, *CASES[case])
    scene.end(*dispatches, limit_s=3.0)
    assert [each.ending for each in dispatches] == [Ending.SERVED] * 4
    assert expiries(scene) == 0
    told = [scene.whats("d0", f"d-{number}") for number in (2, 3)]
    assert any("recalling" in each and "recalled" in each for each in told)
    scene.finish()


@pytest.mark.parametrize("case", CASES)
def test_o14_without_recalls_only_a_deadline_ends_it(case, monkeypatch):
    monkeypatch.setattr(SimScheduler, "recalls", lambda self: [])
    scene = short_of_blocks()
    dispatches = ask_crosswise(scene, *CASES[case])
    scene.advance(10.0)
    assert not any(each.ending for each in dispatches)
    scene.end(*dispatches)
    assert expiries(scene)


def test_o14_who_has_lent_its_blocks_gets_others_at_its_turn():
    scene = short_of_blocks()
    dispatches = ask_crosswise(scene, *CASES["push alone"])
    scene.end(*dispatches, limit_s=3.0)
    whats = scene.whats("d0", "d-3")
    assert whats.count("blocks_reserved") == 2
    assert whats.index("recalled") < whats.index("held") < whats.index("received")
    scene.finish()


def test_o14_a_running_answer_gets_the_block_it_needs():
    # All else is reserved for prompts that P has not begun; it is not preempted for them.
    scene = Scene(
        instances={
            "p0": settings(num_blocks=2 * PROMPT_BLOCKS),
            "d0": settings(num_blocks=3 * PROMPT_BLOCKS + 1),
        }
    )
    kept = [scene.ask(PULL, prompt(n), leg_gap_s=LATE_S) for n in range(2)]
    scene.until(lambda: scene.gauge("p0", "holds") == 2 and scene.free("p0") == 0)
    long = scene.submit("d0", "local", prompt(5), {}, max_tokens=20)
    scene.advance(0.01)
    reserved = [scene.ask(PUSH, prompt(10 + n)) for n in range(2)]
    scene.until(lambda: scene.free("d0") == 0)
    scene.until(lambda: long, limit_s=3.0)
    assert not long[0].error
    assert scene.life("d0").engine.scheduler.num_preempted["local"] == 0
    scene.end(*kept, *reserved, limit_s=3.0)
    assert expiries(scene) == 0
    scene.finish()


@pytest.mark.parametrize("number", [2, 3])
def test_o14_an_abort_while_blocks_are_called_back(number):
    scene = short_of_blocks()
    dispatches = ask_crosswise(scene, *CASES["pull kept, push reserved"])
    scene.until(lambda: "recalling" in scene.whats("d0", "d-3"))
    scene.world.router.leave(dispatches[number])
    scene.end(*dispatches, limit_s=3.0)
    assert expiries(scene) == 0
    scene.finish()
