"""O5: the lease that has run out is found, however long others before it are renewed.

vllm#58222: the sweep ended at the first lease that ran, so those behind it leaked.
"""

from kvcourier.core.outcomes import Outcome
from kvcourier.sim.faults import Partition
from worlds.scene import PULL, SHORT, STEP_S, Scene, settings

LEASE_S = SHORT.kv_lease_duration
EXPIRED = [Outcome.SEND_FAILED, Outcome.RELEASED]
PROMPT_BLOCKS = 6
FULL = settings(num_blocks=PROMPT_BLOCKS)


def test_o5_each_lease_ends_by_itself():
    # C and A are renewed by decode instances that are full; nobody wants B.
    deaf = Partition(source="d1", target="p0", at=10.0, for_s=100.0)
    scene = Scene(deaf, instances={"p0": settings(num_blocks=24), "d0": FULL, "d1": FULL})
    for place in ("d0", "d1"):
        pool = scene.life(place).pool
        assert pool.allocate((), PROMPT_BLOCKS) is not None
    c = scene.ask(PULL, range(24), decode="d0")
    scene.until(lambda: c.params)
    a = scene.ask(PULL, range(100, 124), decode="d1")
    scene.until(lambda: a.params)
    b = scene.ask(PULL, range(200, 224), is_forgotten=True)
    scene.until(lambda: "prefill_finished" in scene.whats("p0", "p-2"))
    held_at = scene.now
    scene.until(lambda: scene.told("p0", "p-2"))
    assert b.is_forgotten
    assert held_at + LEASE_S - STEP_S <= scene.now <= held_at + LEASE_S + STEP_S
    assert scene.told("p0", "p-2") == EXPIRED
    assert scene.count("p0", "leases_expired") == 1
    assert scene.told("p0", "p-0") == scene.told("p0", "p-1") == []
    # From 10 s on nothing comes of d1.
    scene.until(lambda: scene.told("p0", "p-1"))
    assert 10.0 < scene.now <= 10.0 + LEASE_S + STEP_S
    assert scene.told("p0", "p-0") == []
    assert scene.count("p0", "leases_expired") == 2


def test_o5_nobody_is_waited_for_longer_than_the_limit():
    # Two instances that are each short of what the other holds would keep their word for ever.
    scene = Scene(instances={"p0": settings(), "d0": FULL})
    assert scene.life("d0").pool.allocate((), PROMPT_BLOCKS) is not None
    dispatch = scene.ask(PULL, range(24))
    scene.until(lambda: dispatch.params)
    scene.advance(SHORT.hold_limit_s)
    assert scene.told("p0", "p-0") == []
    scene.advance(LEASE_S + STEP_S)
    assert scene.told("p0", "p-0") == EXPIRED
