"""A world that a test drives itself: a prefill and a decode instance, and what happens to them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvcourier.config import Granularity, Limits, PathPolicy, StagingConfig, Timing, TransferMode
from kvcourier.core.outcomes import Outcome
from kvcourier.core.params import parse_params
from kvcourier.sim.engine import Answer, EngineSettings, LoadPolicy
from kvcourier.sim.faults import Fault
from kvcourier.sim.instance import Instance, InstanceSettings, Life
from kvcourier.sim.memory import Shape
from kvcourier.sim.network import Speed
from kvcourier.sim.router import Ask, Dispatch, Ending, expected_tokens
from kvcourier.sim.world import SHORT, Plan, World
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate, InFlight

PUSH, PULL = TransferMode.PUSH, TransferMode.PULL
BLOCK = 4
DIRECT = StagingConfig(path=PathPolicy.DIRECT)
STEP_S = 0.01
"""Longer than any engine step of a scene that is not slow on purpose, and its messages."""


def settings(
    *,
    granularity: Granularity = Granularity.REQUEST,
    policy: LoadPolicy = LoadPolicy.FAIL,
    max_batch_tokens: int = 64,
    step_s: float = 0.002,
    keep_s: float = 0.0,
    staging: StagingConfig = DIRECT,
    **shape: Any,
) -> InstanceSettings:
    """An instance with blocks of 4 tokens, direct transfers and short steps."""
    engine = EngineSettings(
        max_batch_tokens, step_s, 0.0001, granularity=granularity, load_policy=policy, keep_s=keep_s
    )
    return InstanceSettings(Shape(**shape), engine, staging)


class Scene:
    """A world with instances by place; "p0" and "d0" unless others are given."""

    def __init__(
        self,
        *faults: Fault,
        instances: Mapping[str, InstanceSettings] | None = None,
        speed: Speed | None = None,
        timing: Timing = SHORT,
        router_cancels: bool = True,
        **changes: Any,
    ) -> None:
        self.world = World(
            Plan(
                seed=1,
                instances=instances or {place: settings(**changes) for place in ("p0", "d0")},
                asks=(),
                faults=faults,
                timing=timing,
                speed=speed or Speed(),
                router_cancels=router_cancels,
            )
        )

    # What happens.

    def ask(
        self,
        mode: TransferMode,
        prompt: range | tuple[int, ...],
        prefill: str = "p0",
        decode: str = "d0",
        *,
        is_forgotten: bool = False,
        **changes: Any,
    ) -> Dispatch:
        """A client comes, now. If it is forgotten, D never hears of it."""
        ask = Ask(
            at=self.now, mode=mode, prefill=prefill, decode=decode, prompt=tuple(prompt), **changes
        )
        return self.world.router.dispatch(ask, is_forgotten=is_forgotten)

    def submit(
        self,
        place: str,
        request_id: str,
        prompt: range | tuple[int, ...],
        params: Mapping[str, Any],
        max_tokens: int = 2,
    ) -> list[Answer]:
        """Send one leg past the router; its answer comes into the list."""
        answers: list[Answer] = []
        intent = parse_params(dict(params), Limits())
        engine = self.life(place).engine
        engine.submit(request_id, tuple(prompt), max_tokens, intent, answers.append)
        return answers

    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        """Let time pass until it holds, at most so long."""
        stop = self.now + limit_s
        while not condition():
            assert self.now < stop, f"not within {limit_s} s"
            self.world.advance(0.0005)

    def end(self, *dispatches: Dispatch, limit_s: float = 60.0) -> None:
        """Until these have ended."""
        self.until(lambda: all(each.ending for each in dispatches), limit_s)

    def serve(
        self, mode: TransferMode, prompt: range | tuple[int, ...], **changes: Any
    ) -> Dispatch:
        """A client comes and is served."""
        dispatch = self.ask(mode, prompt, **changes)
        self.end(dispatch)
        assert dispatch.ending is Ending.SERVED, dispatch.reason
        return dispatch

    def decide(self, fate: Callable[[InFlight], Fate | None]) -> None:
        """Ask this about everything that sets out on the data path; None: as it would have been.

        HOLD is for the test to deliver.
        """
        usual = self.world.data_path.memory.fault_plan
        self.world.data_path.memory.fault_plan = lambda item: fate(item) or usual(item)

    def finish(self) -> None:
        """I1 to I7: let everything settle, and serve fresh requests."""
        self.world.settle()
        self.world.serve_fresh_requests()

    # What is to be seen.

    @property
    def now(self) -> float:
        return self.world.timeline.now

    def instance(self, place: str) -> Instance:
        return self.world.instances[place]

    def life(self, place: str) -> Life:
        life = self.world.instances[place].life
        assert life is not None, f"{place} is down"
        return life

    def free(self, place: str) -> int:
        return self.life(place).pool.num_free

    def told(self, place: str, request_id: str) -> list[Outcome]:
        """What an engine was told of a request."""
        return self.life(place).reports.of(request_id)

    def whats(self, place: str, request_id: str) -> list[str]:
        """The story of a request, headlines only."""
        return [entry["what"] for entry in self.life(place).endpoint.story(request_id) or ()]

    def count(self, place: str, name: str) -> int:
        """A counter of the core, over all lives."""
        return self.instance(place).counts(name)

    def failed_operations(self, place: str, operation: Operation = Operation.WRITE) -> float:
        registry = self.life(place).endpoint.registry
        name, labels = "kvcourier_failed_transfers_total", {"operation": operation.value}
        return registry.get_sample_value(name, labels) or 0.0

    def gauge(self, place: str, name: str) -> int:
        """The size of a table, over all ranks."""
        snapshots = self.life(place).endpoint.snapshots()
        return sum(gauges[name] for _, gauges in snapshots.values())

    def landed_in(self, place: str, since: int = 0) -> list[int]:
        """Blocks of an instance that pieces have landed in, in order."""
        memory = self.life(place).memory
        landed = self.world.data_path.memory.landed[since:]
        return [b for each in landed for b in memory.blocks_at(each.address, each.size_bytes)]

    @property
    def in_flight(self) -> list[InFlight]:
        """Operations under way."""
        return [item for item in self.world.data_path.memory.pending if not item.is_notification]


def said_right(answer: Answer, prompt: range | tuple[int, ...]) -> bool:
    """Whether a D leg said what the model says."""
    return answer.tokens == expected_tokens(tuple(prompt), len(answer.tokens))


def with_policy(policy: LoadPolicy, **changes: Any) -> dict[str, InstanceSettings]:
    """P and D, where D does this with what it does not get."""
    decode = settings(policy=policy, **changes)
    return {"p0": dataclasses.replace(settings(), shape=Shape()), "d0": decode}
