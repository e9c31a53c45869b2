"""The data path on virtual time: the in-memory transport, with bytes that land when it says.

Decides when an agent looks again. Refuses to know who owns what is written: `watch` is shown every
operation as it is posted, and again before any of it lands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvcourier.ids import AgentName
from kvcourier.sim.faults import Path
from kvcourier.sim.network import Network
from kvcourier.sim.timeline import Timeline
from kvcourier.transport.memory import Fate, InFlight, MemoryNetwork, MemoryTransport

_DEATH_SHOWS_S = 0.13
"""Until whoever has an operation in flight is told that the other process is gone: what NIXL takes
on UCX."""


class Watch(Protocol):
    """Sees every operation."""

    def posted(self, item: InFlight) -> None:
        """It is on its way."""

    def landing(self, item: InFlight) -> None:
        """Some of it lands now."""


@dataclass(frozen=True, slots=True)
class _Agent:
    place: str
    wake: Callable[[], None]


class DataPath:
    """All agents of a world."""

    def __init__(self, timeline: Timeline, network: Network, watch: Watch) -> None:
        self._timeline = timeline
        self._network = network
        self._watch = watch
        self._agents: dict[AgentName, _Agent] = {}
        self._waiting: list[Callable[[], None]] = []
        self._stalled: set[str] = set()
        self.memory = MemoryNetwork(manual=True, fault_plan=self._set_out)

    def open(self, place: str, name: AgentName, wake: Callable[[], None]) -> MemoryTransport:
        """A rank's agent; `wake` is called when something has come or ended."""
        self._agents[name] = _Agent(place, wake)
        return MemoryTransport(self.memory, name)

    def place_of(self, agent: AgentName) -> str:
        """Where an agent lives, or lived."""
        return self._agents[agent].place

    def kill(self, place: str) -> None:
        """The agents of a place are gone, with what they had in flight."""
        for name, agent in self._agents.items():
            if agent.place == place:
                partners = {
                    end
                    for item in self.memory.pending
                    for end in (item.source, item.target)
                    if name in (item.source, item.target)
                }
                self.memory.kill(name)
                for partner in partners:
                    self._timeline.after(_DEATH_SHOWS_S, self._agents[partner].wake)

    def stall(self, place: str) -> None:
        """Nothing moves to or from a stopped process."""
        self._stalled.add(place)

    def resume(self, place: str) -> None:
        """It goes on, with all that waited."""
        self._stalled.discard(place)
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            step()

    def _set_out(self, item: InFlight) -> Fate:
        source, target = self.place_of(item.source), self.place_of(item.target)
        if item.is_notification:
            arrivals = self._network.arrivals(Path.DATA, source, target)
            for number, when in enumerate(arrivals):
                self._timeline.at(when, lambda number=number: self._arrive(item, bool(number)))  # type: ignore[misc]
            return (Fate.DROP, Fate.DELIVER, Fate.DUPLICATE)[len(arrivals)]
        fate = self._network.fate(source, target)
        if fate.refused:
            return Fate.REFUSE
        self._watch.posted(item)
        for when, part in fate.portions:
            self._timeline.at(when, lambda part=part: self._land(item, part))  # type: ignore[misc]
        if fate.fails_at is not None:
            self._timeline.at(fate.fails_at, lambda: self._fail(item))
        return Fate.CORRUPT if fate.corrupted else Fate.DELIVER

    def _arrive(self, item: InFlight, again: bool) -> None:
        """A notification is there; the copy of a doubled one is another item."""
        if self._waits(item, lambda: self._arrive(item, again)):
            return
        if again:
            copies = (
                e for e in self.memory.pending if e.is_duplicate and e.payload == item.payload
            )
            copy = next(copies, None)
            if copy is None:
                return
            item = copy
        if item in self.memory.pending:
            self.memory.deliver(item)
            self._agents[item.target].wake()

    def _land(self, item: InFlight, part: float) -> None:
        if item not in self.memory.pending or self._waits(item, lambda: self._land(item, part)):
            return
        assert item.moves is not None
        self._watch.landing(item)
        if part < 1:
            pieces = int(part * len(item.moves)) - item.num_landed
            # Not the last one: with it an operation ends.
            pieces = min(pieces, len(item.moves) - 1 - item.num_landed)
            if pieces > 0:
                self.memory.deliver(item, pieces=pieces)
            return
        self.memory.deliver(item)
        self._agents[item.source].wake()

    def _fail(self, item: InFlight) -> None:
        if item in self.memory.pending:
            self.memory.fail(item)
            self._agents[item.source].wake()

    def _waits(self, item: InFlight, step: Callable[[], None]) -> bool:
        """Whether an end of it is stopped; the step is taken when it goes on."""
        ends = {self.place_of(item.source), self.place_of(item.target)}
        if not ends & self._stalled:
            return False
        self._waiting.append(step)
        return True
