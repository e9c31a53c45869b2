"""One instance of a world: the real endpoint and couriers, a model of an engine, a life at a time.

Decides when a courier takes its steps and what a crash leaves behind. Refuses to know routers and
faults.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcourier.config import (
    ChannelKeys,
    CourierConfig,
    EndpointConfig,
    Integrity,
    StagingConfig,
    Timing,
    TransferMode,
)
from kvcourier.ids import AgentName, EngineId, Incarnation, PeerRank
from kvcourier.runtime.courier import Courier
from kvcourier.runtime.endpoint import KvEndpoint
from kvcourier.runtime.surroundings import Surroundings
from kvcourier.sim.blocks import BlockPool
from kvcourier.sim.data_path import DataPath
from kvcourier.sim.engine import EngineSettings, SimEngine
from kvcourier.sim.invariants import Owned, Reports, Violation, require
from kvcourier.sim.memory import Memory, Shape
from kvcourier.sim.scheduler import SimScheduler
from kvcourier.sim.side_channel import SimulatedChannel, SimulatedServer, Wire
from kvcourier.sim.timeline import ProcessClock, Timeline
from kvcourier.transport.memory import MemoryTransport

_LAG_S = (0.0, 0.0008)
"""From when something has come until the courier looks: it polls once a millisecond."""
_MAX_STEPS_AT_ONCE = 1000


class Driver:
    """Has one courier take its steps: when something has come, and when time is due."""

    def __init__(self, timeline: Timeline, clock: ProcessClock, chance: random.Random) -> None:
        self.is_stopped = False
        self.is_stalled = False
        self.courier: Courier | None = None
        self._timeline = timeline
        self._clock = clock
        self._chance = chance
        self._next: float | None = None
        self._last_deadline: float | None = None
        self._num_repeats = 0

    def wake(self) -> None:
        """Something has come, or ended."""
        self._step_at(self._timeline.now + self._chance.uniform(*_LAG_S))

    def resume(self) -> None:
        """A stopped process goes on."""
        self.is_stalled = False
        self.wake()

    def _step_at(self, when: float) -> None:
        if self.is_stopped or (self._next is not None and self._next <= when):
            return
        self._next = when
        self._timeline.at(when, lambda: self._step(when))

    def _step(self, when: float) -> None:
        if self._next != when or self.is_stopped or self.courier is None:
            return
        self._next = None
        if self.is_stalled:
            return
        self.courier.step()
        self.courier.endpoint.check()
        deadline = self.courier.next_deadline()
        if deadline is None:
            return
        self._require_progress(deadline)
        # A little late, so that rounding does not show the clock just before the deadline.
        self._step_at(max(self._timeline.now, self._clock.when(deadline)) + 1e-6)

    def _require_progress(self, deadline: float) -> None:
        is_repeat = deadline == self._last_deadline and deadline <= self._clock()
        self._last_deadline = deadline
        self._num_repeats = self._num_repeats + 1 if is_repeat else 0
        assert self.courier is not None
        require(
            self._num_repeats < _MAX_STEPS_AT_ONCE,
            f"{self.courier.endpoint.me}: a deadline stays due: {deadline}",
        )


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """An instance, whichever life of it."""

    shape: Shape = field(default_factory=Shape)
    engine: EngineSettings = field(default_factory=EngineSettings)
    staging: StagingConfig = field(default_factory=StagingConfig)
    integrity: Integrity = Integrity.OFF


@dataclass(slots=True)
class Life:
    """One life: what ends with a crash."""

    serial: int
    endpoint: KvEndpoint
    engine: SimEngine
    memory: Memory
    pool: BlockPool
    drivers: dict[str, Driver]
    reports: Reports
    ended_at: float | None = None

    @property
    def couriers(self) -> list[Courier]:
        """Those of all ranks."""
        return [each.courier for each in self.drivers.values() if each.courier is not None]


class Instance:
    """A place with a host and a port, and whoever lives there."""

    def __init__(
        self,
        place: str,
        port: int,
        settings: InstanceSettings,
        timing: Timing,
        timeline: Timeline,
        wire: Wire,
        data_path: DataPath,
        clock: ProcessClock,
        chance: random.Random,
    ) -> None:
        self.place = place
        self.life: Life | None = None
        self.lives: list[Life] = []
        self._port = port
        self._settings = settings
        self._timing = timing
        self._timeline = timeline
        self._wire = wire
        self._data_path = data_path
        self.clock = clock
        self._chance = chance
        self._owned: dict[AgentName, Owned] = {}

    def start(self, engine_id: str) -> None:
        """Begin a life, with empty memory."""
        serial = len(self.lives) + 1
        memory = Memory(self._settings.shape)
        pool = BlockPool(self._settings.shape.num_blocks, self._chance)
        scheduler = SimScheduler(
            pool, self._settings.shape.block_size, self._settings.engine.max_batch_tokens
        )
        drivers = {
            str(rank): Driver(self._timeline, self.clock, self._chance) for rank in memory.ranks
        }
        agents: list[AgentName] = []

        def open_transport(name: AgentName) -> MemoryTransport:
            agents.append(name)
            return self._data_path.open(self.place, name, drivers[name.rsplit(":", 1)[1]].wake)

        def open_channel(
            me: PeerRank, host: str, max_bytes: int, keys: ChannelKeys | None
        ) -> SimulatedChannel:
            return self._wire.open_channel(self.place, me, drivers[str(me.rank)].wake)

        def open_server(
            host: str,
            port: int,
            answer: Callable[[bytes], bytes],
            max_bytes: int,
            keys: ChannelKeys | None,
        ) -> SimulatedServer:
            return self._wire.open_server(self.place, port, answer)

        def run(courier: Courier) -> None:
            drivers[str(courier.endpoint.me.rank)].courier = courier

        endpoint = KvEndpoint(
            EndpointConfig(
                EngineId(engine_id),
                "a model",
                modes=frozenset(TransferMode),
                side_channel_host=self.place,
                side_channel_port=self._port,
                timing=self._timing,
                courier=CourierConfig(staging=self._settings.staging),
                integrity=self._settings.integrity,
            ),
            [rank.cache for rank in memory.ranks.values()],
            open_transport,
            surroundings=Surroundings(
                clock=self.clock,
                new_incarnation=lambda: Incarnation(f"{self.place}.{serial}"),
                open_channel=open_channel,
                open_server=open_server,
                run=run,
            ),
        )
        reports = Reports()

        def wake_couriers() -> None:
            for driver in drivers.values():
                driver.wake()

        engine = SimEngine(
            self._timeline,
            endpoint,
            memory,
            scheduler,
            self._settings.engine,
            reports.took,
            wake_couriers,
        )
        endpoint.start(engine.report_ready)
        owned = Owned(self.place, memory, pool, engine.grants, scheduler.num_preempted)
        self._owned |= dict.fromkeys(agents, owned)
        self.life = Life(serial, endpoint, engine, memory, pool, drivers, reports)
        self.lives.append(self.life)

    def owned_by(self, agent: AgentName) -> Owned | None:
        """What the life of that agent knows of its blocks; None if it is none of ours."""
        return self._owned.get(agent)

    def kill(self) -> None:
        """End the life: no good-byes."""
        if self.life is None:
            return
        for driver in self.life.drivers.values():
            driver.is_stopped = True
        self.life.engine.is_stopped = True
        self.life.ended_at = self._timeline.now
        self._data_path.kill(self.place)
        # Sockets, threads and memory of a dead process are gone.
        self.life.endpoint.close()
        self.life = None

    def stall(self) -> None:
        """Stop the process."""
        if self.life is not None:
            self.life.engine.is_stalled = True
            for driver in self.life.drivers.values():
                driver.is_stalled = True
            self._wire.stall(self.place)
            self._data_path.stall(self.place)

    def resume(self) -> None:
        """Let it go on."""
        self._wire.resume(self.place)
        self._data_path.resume(self.place)
        if self.life is not None:
            self.life.engine.is_stalled = False
            self.life.engine.wake()
            for driver in self.life.drivers.values():
                driver.resume()

    def counts(self, name: str) -> int:
        """A counter of the core, over all ranks and lives."""
        return sum(
            counters.get(name, 0)
            for life in self.lives
            for counters, _ in life.endpoint.snapshots().values()
        )

    def require_empty(self) -> None:
        """I1 and I4, when nothing goes on any more."""
        life = self.life
        if life is None:
            return
        pool, scheduler = life.pool, life.engine.scheduler
        queues = (scheduler.waiting, scheduler.running, scheduler.receiving, scheduler.loans)
        require(not any(queues), f"I4: {self.place}: the engine still has {queues}")
        require(
            pool.num_free == pool.num_blocks,
            f"I1: {self.place} has {pool.num_free} of {pool.num_blocks} blocks back",
        )
        require(not life.engine.num_live, f"I4: {self.place}: a request has no end")
        for rank, (_, gauges) in life.endpoint.snapshots().items():
            left = {name: size for name, size in gauges.items() if size}
            require(not left, f"I4: {self.place} {rank}: {left}")
        for courier in life.couriers:
            at = courier.next_deadline()
            if at is not None:
                raise Violation(f"I4: {courier.endpoint.me}: waits until {at}, now {self.clock()}")
            require(not courier.busy, f"I4: {courier.endpoint.me}: something is in flight")
