"""O10: completions that come late, twice, in any order, or for what nobody knows.

vllm#46240, #43226, #51786, #57570: the second completion of an aborted request ended the engine.
"""

import itertools

import pytest

from kvcourier.core.messages import Landed, SenderFields, encode
from kvcourier.sim.faults import Abort, Duplicate, Leaver, Lose, Path, StickOperations
from kvcourier.transport.memory import InFlight
from worlds.scene import PULL, PUSH, Scene, settings

PROMPT = range(24)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(
    "ends", [(0.5, 1.0), (1.0, 0.5), (0.7, 0.7)], ids=["receive_first", "send_first", "together"]
)
@pytest.mark.parametrize("by", Leaver)
def test_o10_an_instance_that_receives_and_sends_when_all_is_aborted(by, ends, twice):
    # "x" holds one prompt for d0 and wants another one from p0; both are in flight when aborted.
    stuck = [
        StickOperations(source="p0", target="d1", at=0.0, for_s=0.4, until=ends[0]),
        StickOperations(source="d1", target="d0", at=0.0, for_s=0.4, until=ends[1]),
    ]
    doubled = [
        Duplicate(source=a, target=b, at=0.0, for_s=2.0, path=path, again_after_s=0.2)
        for a, b in itertools.permutations(("p0", "d0", "d1"), 2)
        for path in Path
    ]
    scene = Scene(
        *stuck,
        *(doubled if twice else []),
        *[Abort(dispatch=number, at=0.2, by=by) for number in (0, 1)],
        instances={place: settings() for place in ("p0", "d0", "d1")},
        router_cancels=False,
    )
    scene.ask(PUSH, PROMPT, decode="d1")
    scene.ask(PUSH, range(100, 124), prefill="d1")
    scene.until(lambda: len(scene.in_flight) == 2)
    scene.advance(0.3 - scene.now)
    # What is aborted gives nothing back before its writes are over: I2 looks at every byte.
    assert len(scene.in_flight) == 2
    assert scene.free("d1") < scene.life("d1").pool.num_blocks
    scene.advance(2.0)
    if by is not Leaver.PREFILL:
        assert scene.free("d1") == scene.life("d1").pool.num_blocks
    scene.finish()


def test_o10_a_completion_for_what_nobody_knows_is_counted_and_dropped():
    scene = Scene()
    names = []
    scene.decide(lambda item: names.append((item.source, item.target)))
    scene.serve(PUSH, PROMPT)
    source, target = next(each for each in names if each[0].startswith("engine-p0"))
    sender = SenderFields("engine-p0", "p0.1", (0, 0))
    before = scene.count("d0", "stale_refused")
    for request_id in ("d-0", "d-never"):
        notice = encode(Landed(sender, request_id, 0, 24))
        scene.world.data_path.memory.send(InFlight(source, target, None, notice))
    scene.advance(0.1)
    assert scene.count("d0", "stale_refused") == before + 2
    scene.finish()


def test_o10_a_good_bye_whose_handshake_fails_ends_quietly():
    # vllm#57570: reported as a failed receive of a request that was gone.
    deaf = Lose(source="d0", target="p0", at=0.0, for_s=5.0, path=Path.SIDE)
    scene = Scene(deaf, Abort(dispatch=0, at=0.005, by=Leaver.CLIENT))
    pool = scene.life("d0").pool
    taken = pool.allocate((), pool.num_free)
    scene.ask(PULL, PROMPT)
    scene.advance(8.0)
    assert scene.told("d0", "d-0") == []
    assert scene.gauge("d0", "wants") == 0
    pool.release(taken)
    scene.finish()
