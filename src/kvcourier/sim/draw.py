"""Random plans: a world and what goes wrong in it, the same for the same seed everywhere.

Decides how often what is drawn. Refuses to know what follows from it.
"""

import dataclasses
import random
from collections.abc import Callable

from kvcourier.config import (
    Binding,
    Granularity,
    Integrity,
    PathPolicy,
    StagingConfig,
    TransferMode,
)
from kvcourier.layout import CacheLayout
from kvcourier.sim.engine import EngineSettings, LoadPolicy
from kvcourier.sim.faults import (
    Abort,
    Clock,
    CorruptOperations,
    Crash,
    Delay,
    Duplicate,
    FailOperations,
    Fault,
    Forget,
    Leaver,
    Lose,
    Partition,
    Path,
    Preempt,
    RefusePosts,
    Shortage,
    Shuffle,
    Stall,
    StickOperations,
)
from kvcourier.sim.instance import InstanceSettings
from kvcourier.sim.memory import Shape
from kvcourier.sim.network import Speed
from kvcourier.sim.router import NEXT_WORDS, Ask
from kvcourier.sim.world import Plan

_ENDS_AT = 14.0
_BUSY_S = 2.0
"""All clients come within this time."""

_SPLITS = ((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2))
_SMALLEST_ROOM = 48
_NUM_INCIDENTS = (0, 1, 2, 3, 5, 7, 9, 12)


def draw(seed: int) -> Plan:
    """The plan of this seed."""
    chance = random.Random(seed)
    num_prefill, num_decode = chance.choice(((1, 1), (1, 1), (1, 2), (2, 1)))
    places = [f"p{i}" for i in range(num_prefill)] + [f"d{i}" for i in range(num_decode)]
    path = chance.choice((PathPolicy.DIRECT, PathPolicy.PACKED, PathPolicy.AUTO))
    num_layers = chance.choice((2, 3))
    instances = {place: _instance(chance, place, path, num_layers) for place in places}
    asks = _asks(chance, places, instances)
    faults = [
        fault
        for _ in range(chance.choice(_NUM_INCIDENTS))
        for fault in chance.choice(_INCIDENTS)(chance, places, asks)
    ]
    instances, asks = _with_turns(seed, instances, asks)
    instances, corruption = _with_integrity(seed, instances, places, asks)
    faults += corruption
    clocks: dict[str, Fault] = {f.place: f for f in faults if isinstance(f, Clock)}
    others = [fault for fault in faults if not isinstance(fault, Clock)]
    return Plan(
        seed=seed,
        instances=instances,
        asks=asks,
        faults=[*clocks.values(), *others],
        speed=chance.choice((Speed(), Speed(operation_s=(0.02, 0.4)))),
        router_cancels=chance.random() < 0.5,
        ends_at=_ENDS_AT,
    )


def _with_turns(
    seed: int, instances: dict[str, InstanceSettings], asks: list[Ask]
) -> tuple[dict[str, InstanceSettings], list[Ask]]:
    """In some worlds D keeps what it has said, and some clients go on."""
    # Chance of its own, so that the rest of a world is what its seed has always drawn.
    chance = random.Random(f"turns of {seed}")
    if chance.random() < 0.5:
        return instances, asks
    keep_s = chance.choice((0.3, 2.0, 6.0))
    keeping = {
        place: dataclasses.replace(
            settings, engine=dataclasses.replace(settings.engine, keep_s=keep_s)
        )
        for place, settings in instances.items()
    }
    return keeping, [_going_on(chance, ask) for ask in asks]


def _going_on(chance: random.Random, ask: Ask) -> Ask:
    num_turns = chance.choice((1, 2, 2, 3))
    length = len(ask.prompt) + num_turns * ask.max_tokens + (num_turns - 1) * len(NEXT_WORDS)
    pause_s = chance.choice((0.0, 0.05, 0.3, 2.5))
    fits = length <= _SMALLEST_ROOM
    return dataclasses.replace(ask, num_turns=num_turns if fits else 1, pause_s=pause_s)


def _with_integrity(
    seed: int, instances: dict[str, InstanceSettings], places: list[str], asks: list[Ask]
) -> tuple[dict[str, InstanceSettings], list[Fault]]:
    """Let some worlds compare what has come, and corrupt it where everything is compared."""
    # Chance of its own, so that the rest of a world is what its seed has always drawn.
    chance = random.Random(f"integrity of {seed}")
    integrity = chance.choice((Integrity.OFF, Integrity.OFF, Integrity.SAMPLE, Integrity.ALL))
    checked = {
        place: dataclasses.replace(settings, integrity=integrity)
        for place, settings in instances.items()
    }
    if integrity is not Integrity.ALL:
        return checked, []
    draws = chance.choice((0, 1, 2, 4))
    return checked, [_operation(CorruptOperations)(chance, places, asks) for _ in range(draws)]


def _instance(
    chance: random.Random, place: str, path: PathPolicy, num_layers: int
) -> InstanceSettings:
    tp_size, pp_size = chance.choice(_SPLITS)
    block_size = chance.choice((4, 4, 8))
    # Room for two or three requests at a time: blocks are short, and get new owners soon.
    room = chance.choice((_SMALLEST_ROOM, 64, 96))
    return InstanceSettings(
        shape=Shape(
            num_blocks=room // block_size,
            block_size=block_size,
            tp_size=tp_size,
            pp_size=pp_size,
            cache_layout=chance.choice(tuple(CacheLayout)),
            blocks_first=chance.random() < 0.5,
            num_layers=num_layers,
        ),
        engine=EngineSettings(
            max_batch_tokens=chance.choice((8, 8, 16, 64)),
            step_s=chance.choice((0.003, 0.02)),
            device_lag_s=chance.choice((0.0, 0.0, 0.015)),
            granularity=chance.choice(tuple(Granularity)),
            load_policy=chance.choice(tuple(LoadPolicy)),
        ),
        staging=StagingConfig(path=path, send_bytes=16384, receive_bytes=16384, slot_bytes=4096),
    )


def _asks(
    chance: random.Random, places: list[str], instances: dict[str, InstanceSettings]
) -> list[Ask]:
    stems = [[chance.randrange(50) for _ in range(32)] for _ in range(3)]
    # Most come together: what goes wrong is then in the middle of several transfers.
    bursts = [chance.uniform(0.0, _BUSY_S) for _ in range(chance.randint(1, 3))]
    asks = []
    for _ in range(chance.randint(4, 12)):
        stem = chance.choice(stems)[: chance.choice((0, 8, 16, 24, 32))]
        tail = [chance.randrange(50) for _ in range(chance.randint(1, 12))]
        asks.append(
            Ask(
                at=chance.choice(bursts) + chance.uniform(0.0, 0.1),
                mode=chance.choice(tuple(TransferMode)),
                binding=chance.choice((None, None, *Binding)),
                prefill=chance.choice([p for p in places if p.startswith("p")]),
                decode=chance.choice([p for p in places if p.startswith("d")]),
                prompt=tuple(stem + tail),
                # Prompt and answer fit the smallest cache.
                max_tokens=chance.choice((1, 2, 4, 26)) if len(stem) < 16 else 2,
                leg_gap_s=chance.choice((0.0, 0.0, 0.0, 0.05, 0.5, 4.0)),
                with_transfer_id=chance.random() < 0.8,
            )
        )
    return sorted(asks, key=lambda ask: ask.at)


_Draw = Callable[[random.Random, list[str], list[Ask]], Fault]
_Incident = Callable[[random.Random, list[str], list[Ask]], list[Fault]]
"""Draws one fault, or some that make each other interesting."""


def _way(chance: random.Random, places: list[str], asks: list[Ask]) -> dict[str, object]:
    source = chance.choice(places)
    others = [place for place in places if place[0] != source[0]]
    return {
        "source": source,
        "target": chance.choice(others),
        "at": _during(chance, asks),
        "for_s": chance.choice((0.01, 0.1, 0.5, 3.0)),
    }


def _operation_way(chance: random.Random, places: list[str], asks: list[Ask]) -> dict[str, object]:
    """One that transfers go, early and long enough to hit one."""
    ask = chance.choice(asks)
    ends = {
        TransferMode.PUSH: (ask.prefill, ask.decode),
        TransferMode.PULL: (ask.decode, ask.prefill),
    }
    source, target = ends[ask.mode]
    return {
        "source": source,
        "target": target,
        "at": max(0.0, ask.at + ask.leg_gap_s + chance.uniform(-0.1, 0.1)),
        "for_s": chance.choice((0.05, 0.2, 0.5, 3.0)),
    }


def _message(kind: Callable[..., Fault], **draws: tuple[float, ...]) -> _Draw:
    return lambda chance, places, asks: kind(
        **_way(chance, places, asks),
        path=chance.choice(tuple(Path)),
        **{name: chance.choice(values) for name, values in draws.items()},
    )


def _operation(kind: Callable[..., Fault], **draws: tuple[float, ...]) -> _Draw:
    return lambda chance, places, asks: kind(
        **_operation_way(chance, places, asks),
        **{name: chance.choice(values) for name, values in draws.items()},
    )


def _stick(chance: random.Random, places: list[str], asks: list[Ask]) -> Fault:
    way = _operation_way(chance, places, asks)
    until = chance.choice((None, None, 2.0, 6.0, 30.0))
    return StickOperations(**way, until=until and way["at"] + until)  # type: ignore[arg-type, operator]


def _crash(chance: random.Random, places: list[str], asks: list[Ask]) -> Fault:
    return Crash(
        place=chance.choice(places),
        at=_during(chance, asks),
        down_s=chance.choice((0.01, 0.05, 0.3)),
        keeps_engine_id=chance.random() < 0.5,
    )


def _stall(chance: random.Random, places: list[str], asks: list[Ask]) -> Fault:
    return Stall(
        place=chance.choice(places),
        at=_during(chance, asks),
        for_s=chance.choice((0.05, 0.5, 3.0, 7.0)),
    )


def _clock(chance: random.Random, places: list[str], asks: list[Ask]) -> Fault:
    return Clock(
        place=chance.choice(places),
        skew_s=chance.uniform(0.0, 1e5),
        rate=chance.choice((0.9, 0.99, 1.01, 1.1)),
    )


def _shortage(chance: random.Random, places: list[str], asks: list[Ask]) -> Fault:
    return Shortage(
        place=chance.choice(places),
        at=_during(chance, asks),
        for_s=chance.choice((0.1, 1.0, 5.0)),
        num_blocks=chance.choice((4, 8, 100)),
    )


def _preempt(chance: random.Random, places: list[str], asks: list[Ask]) -> Fault:
    return Preempt(place=chance.choice(places), at=_during(chance, asks))


def _abort(chance: random.Random, places: list[str], asks: list[Ask]) -> Fault:
    number = chance.randrange(len(asks))
    return Abort(
        dispatch=number,
        at=asks[number].at + chance.choice((0.002, 0.01, 0.03, 0.08, 0.3, 1.0)),
        by=chance.choice(tuple(Leaver)),
    )


def _forget(chance: random.Random, places: list[str], asks: list[Ask]) -> Fault:
    return Forget(dispatch=chance.randrange(len(asks)))


def _restart_while_registered(
    chance: random.Random, places: list[str], asks: list[Ask]
) -> list[Fault]:
    """D is replaced while P, short of blocks, has yet to compute what D had registered for."""
    ask = chance.choice(asks)
    begins = max(0.0, ask.at - 0.01)
    return [
        Shortage(place=ask.prefill, at=begins, for_s=chance.uniform(0.1, 0.5), num_blocks=100),
        Crash(
            place=ask.decode,
            at=ask.at + chance.uniform(0.01, 0.08),
            down_s=0.01,
            keeps_engine_id=chance.random() < 0.8,
        ),
    ]


def _preempt_prefill(chance: random.Random, places: list[str], asks: list[Ask]) -> list[Fault]:
    """P loses a prompt's blocks while it computes it, perhaps more than once."""
    ask = chance.choice(asks)
    return [
        Preempt(place=ask.prefill, at=ask.at + chance.uniform(0.004, 0.12))
        for _ in range(chance.choice((1, 1, 2)))
    ]


def _queue_on_decode(chance: random.Random, places: list[str], asks: list[Ask]) -> list[Fault]:
    """D is short of blocks, so that leases are renewed for long, and P is never told of one."""
    number = chance.randrange(len(asks))
    place, at = asks[number].decode, asks[number].at
    return [
        Shortage(
            place=place,
            at=max(0.0, at - 0.3),
            for_s=chance.uniform(2.0, 9.0),
            num_blocks=100,
        ),
        Forget(dispatch=number),
    ]


def _abort_while_stuck(chance: random.Random, places: list[str], asks: list[Ask]) -> list[Fault]:
    """D ends a request into whose blocks a write is stuck; the cancel may be lost for a while."""
    number = chance.randrange(len(asks))
    ask = asks[number]
    at = ask.at + ask.leg_gap_s
    until = chance.choice((None, at + chance.uniform(0.3, 8.0)))
    stuck = StickOperations(source=ask.prefill, target=ask.decode, at=at, for_s=0.5, until=until)
    deaf = Lose(
        source=ask.decode,
        target=ask.prefill,
        at=at + 0.1,
        for_s=chance.choice((0.0, 1.0, 5.0)),
        path=Path.SIDE,
    )
    leaver = chance.choice((Leaver.CLIENT, Leaver.DECODE))
    return [stuck, deaf, Abort(dispatch=number, at=at + chance.uniform(0.1, 0.3), by=leaver)]


def _during(chance: random.Random, asks: list[Ask]) -> float:
    """Some time while a request is likely to run."""
    ask = chance.choice(asks)
    return ask.at + ask.leg_gap_s * chance.choice((0, 1)) + chance.choice(_AFTER_S)(chance)


_AFTER_S: tuple[Callable[[random.Random], float], ...] = (
    lambda chance: chance.uniform(0.0, 0.02),
    lambda chance: chance.uniform(0.0, 0.15),
    lambda chance: chance.uniform(0.0, 0.8),
)


def _alone(draw: _Draw) -> _Incident:
    return lambda chance, places, asks: [draw(chance, places, asks)]


_ALONE: tuple[_Draw, ...] = (
    _message(Lose),
    _message(Lose),
    _message(Delay, by_s=(0.003, 0.05, 0.7, 3.0)),
    _message(Duplicate, again_after_s=(0.0, 0.02, 0.8, 5.0)),
    _message(Shuffle, within_s=(0.005, 0.1, 1.0)),
    _operation(RefusePosts),
    _operation(FailOperations, part=(0.0, 0.5)),
    _operation(FailOperations, part=(0.0, 0.5)),
    _stick,
    _stick,
    _stick,
    _operation(Partition),
    _crash,
    _crash,
    _stall,
    _clock,
    _shortage,
    _preempt,
    _preempt,
    _abort,
    _abort,
    _abort,
    _forget,
)

_INCIDENTS: tuple[_Incident, ...] = (
    *map(_alone, _ALONE),
    _restart_while_registered,
    _restart_while_registered,
    _preempt_prefill,
    _preempt_prefill,
    _queue_on_decode,
    _queue_on_decode,
    _abort_while_stuck,
    _abort_while_stuck,
)
