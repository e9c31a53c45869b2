"""O11: P has two stages of three layers each, D has all six, and its memory is laid out otherwise.

vllm#45880, #50494, #46407.
"""

import dataclasses

import pytest

from kvcourier.core.outcomes import Outcome
from kvcourier.ids import Rank
from kvcourier.layout import CacheLayout
from kvcourier.sim.memory import Shape
from kvcourier.sim.router import Ending
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate
from worlds.scene import PULL, PUSH, Scene, settings

PROMPT = range(24)
LAYERS = {"num_layers": 6}
SECOND_STAGE = Rank(1, 0)


def scene():
    stages = settings(pp_size=2, **LAYERS)
    whole = settings(blocks_first=True, cache_layout=CacheLayout.HND, **LAYERS)
    return Scene(instances={"p0": stages, "d0": whole})


@pytest.mark.parametrize("mode", [PUSH, PULL])
def test_o11_every_layer_is_right(mode):
    world = scene()
    world.serve(mode, PROMPT)
    world.finish()


@pytest.mark.parametrize(
    "layers,said",
    [((3, 5), "num_layers: 5"), ((3, 5, 6), "layer 4"), ((2, 3, 4, 5), "layer 2")],
    ids=["missing", "another", "twice"],
)
@pytest.mark.parametrize("mode", [PUSH, PULL])
def test_o11_layers_that_do_not_add_up_are_refused_by_name(mode, layers, said, monkeypatch):
    all_layers = Shape.geometries

    def geometries(shape):
        found = all_layers(shape)
        if shape.pp_size == 2:
            found[SECOND_STAGE] = dataclasses.replace(found[SECOND_STAGE], layers=layers)
        return found

    monkeypatch.setattr(Shape, "geometries", geometries)
    world = scene()
    dispatch = world.ask(mode, PROMPT)
    world.end(dispatch, limit_s=1.0)
    assert dispatch.ending is Ending.FAILED
    assert said in dispatch.reason
    world.world.settle()


def test_o11_d_does_not_begin_before_both_stages_have_written():
    world = scene()

    def fate(item):
        is_second = item.operation is Operation.WRITE and item.source.endswith("pp1tp0")
        return Fate.HOLD if is_second else None

    world.decide(fate)
    dispatch = world.ask(PUSH, PROMPT)
    world.until(lambda: world.whats("d0", "d-0").count("landed") == 1)
    world.advance(1.0)
    assert world.told("d0", "d-0") == []
    assert dispatch.ending is None
    (held,) = world.in_flight
    world.world.data_path.memory.deliver(held)
    # Its initiator looks again when something comes, or when its next beat is due.
    world.until(lambda: world.told("d0", "d-0"), 2.0)
    assert world.told("d0", "d-0") == [Outcome.RECEIVED, Outcome.RELEASED]
    world.end(dispatch, limit_s=0.1)
    assert dispatch.ending is Ending.SERVED, dispatch.reason
