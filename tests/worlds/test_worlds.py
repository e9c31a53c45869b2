"""Worlds as a tool: the same for the same seed, shrunk to what matters, replayed by a command."""

import dataclasses

import pytest

from kvcourier.config import TransferMode
from kvcourier.sim.draw import draw
from kvcourier.sim.faults import Abort, Leaver, Lose, Path, Preempt
from kvcourier.sim.instance import InstanceSettings
from kvcourier.sim.router import Ask, Ending
from kvcourier.sim.shrink import shrink, without
from kvcourier.sim.world import Plan, World
from kvcourier.sim.worlds import main, quiet_logs, run_seed, why_it_fails
from worlds.mutations import MUTATIONS


def stories(world):
    return [
        (place, life.serial, name, [(entry.at, entry.what) for entry in story])
        for place, instance in world.instances.items()
        for life in instance.lives
        for courier in life.couriers
        for dispatch in world.router.dispatches
        for name in (f"p-{dispatch.number}", f"d-{dispatch.number}")
        if (story := courier.endpoint.story(name))
    ]


def test_a_world_is_its_seed():
    with quiet_logs():
        first, second = (World(draw(7)).run() for _ in range(2))
    assert stories(first)
    assert stories(first) == stories(second)
    assert draw(7) == draw(7) != draw(8)


@pytest.mark.parametrize("mode", TransferMode)
def test_without_faults_every_request_is_served(mode):
    asks = [
        Ask(
            at=0.01 * i, mode=mode, prefill="p0", decode="d0", prompt=tuple(range(3 * i, 5 * i + 9))
        )
        for i in range(8)
    ]
    settings = InstanceSettings()
    world = World(Plan(seed=1, instances={"p0": settings, "d0": settings}, asks=asks)).run()
    assert {dispatch.ending for dispatch in world.router.dispatches} == {Ending.SERVED}


def test_shrinking_keeps_the_faults_that_matter():
    loss = Lose(source="p0", target="d0", at=0.0, for_s=1.0, path=Path.SIDE)
    abort = Abort(dispatch=0, at=0.1, by=Leaver.CLIENT)
    faults = [Preempt(place="p0", at=0.1), loss, Preempt(place="p0", at=0.2), abort]
    plan = dataclasses.replace(draw(1), faults=faults)

    def fails(smaller):
        return loss in smaller.faults and abort in smaller.faults

    assert shrink(plan, fails) == [1, 3]
    assert without(plan, [1, 3]).faults == [loss, abort]


def test_a_failing_seed_is_shrunk_and_replayed_by_its_command(capsys):
    with MUTATIONS["leases are swept in insertion order"](), quiet_logs():
        seed = next(seed for seed in range(300) if why_it_fails(draw(seed)))
        assert main([f"{seed}:{seed + 1}"]) == 1
        said = capsys.readouterr().out
        failure = run_seed(seed)
        assert "1 worlds, 0 held" in said
        assert f"replay: {failure.command}" in said
        only = failure.command.partition("ONLY=")[2]
        assert failure.command == f"make worlds SEEDS={seed} ONLY={only}"
        assert len(failure.kept) < len(draw(seed).faults)
        for fault in failure.faults:
            assert repr(fault) in said
        # What is left fails by itself, and nothing of it can be left out.
        assert main([str(seed), only]) == 1
        capsys.readouterr()
        assert run_seed(seed, failure.kept).kept == failure.kept
    assert main([str(seed)]) == 0
    assert capsys.readouterr().out == "1 worlds, 1 held\n"


@pytest.mark.parametrize("arguments", [["x"], ["3:"], ["0:2", "one"], ["5:5"]])
def test_what_cannot_be_run_is_refused_by_name(arguments, capsys):
    assert main(arguments) == 2
    assert arguments[-1] in capsys.readouterr().err
