"""A whole world on virtual time: instances, a network, a router, clients, and what goes wrong.

Decides what happens when, from a plan that holds no chance but a seed. Refuses to know where plans
come from; `draw` makes random ones, tests write their own.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcourier.config import Timing, TransferMode
from kvcourier.ids import AgentName
from kvcourier.sim.data_path import DataPath
from kvcourier.sim.faults import (
    Abort,
    Clock,
    Crash,
    Fault,
    Forget,
    Leaver,
    Preempt,
    Shortage,
    Stall,
)
from kvcourier.sim.instance import Instance, InstanceSettings
from kvcourier.sim.invariants import Owned, Ownership, Violation, require
from kvcourier.sim.network import Network, Speed
from kvcourier.sim.router import Ask, Dispatch, Ending, Router, holder_request_of
from kvcourier.sim.side_channel import Wire
from kvcourier.sim.timeline import ProcessClock, Timeline
from kvcourier.sim.timeliness import Timeliness

SHORT = Timing(
    kv_lease_duration=6.0,
    heartbeat_s=1.5,
    hold_limit_s=15.0,
    handshake_timeout_s=1.0,
    resend_s=0.25,
    push_registration_timeout=12.0,
    registration_ttl_s=8.0,
    transfer_timeout_s=4.0,
    quarantine_limit_s=60.0,
    peer_idle_s=90.0,
    beat_s=0.3,
    peer_silence_s=0.9,
)
"""So that a lot happens within a minute, in the proportions of the defaults."""

_FIRST_PORT = 5600


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides what happens in a world.

    Attributes:
        instances: by place; those whose name begins with "p" compute prompts for the others.
        router_cancels: whether the router cancels the other leg when one has failed.
        ends_at: when the faults end at the latest, and the world is left to settle.
    """

    seed: int
    instances: Mapping[str, InstanceSettings]
    asks: Sequence[Ask]
    faults: Sequence[Fault] = ()
    timing: Timing = SHORT
    speed: Speed = field(default_factory=Speed)
    router_cancels: bool = True
    ends_at: float = 30.0


class World:
    """One run of a plan. `run` all of it, or let a test `advance` it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.timeline = Timeline()
        self._chance = random.Random(plan.seed)
        self.network = Network(self.timeline, plan.faults, plan.speed, self._chance)
        self.wire = Wire(self.timeline, self.network)
        self.data_path = DataPath(
            self.timeline, self.network, Ownership(self._owned_by, holder_request_of)
        )
        clocks = {fault.place: fault for fault in plan.faults if isinstance(fault, Clock)}
        self.instances: dict[str, Instance] = {}
        for number, (place, settings) in enumerate(plan.instances.items()):
            fault = clocks.get(place)
            clock = ProcessClock(self.timeline)
            if fault is not None:
                clock = ProcessClock(self.timeline, fault.skew_s, fault.rate)
            self.instances[place] = Instance(
                place,
                _FIRST_PORT + number,
                settings,
                plan.timing,
                self.timeline,
                self.wire,
                self.data_path,
                clock,
                self._chance,
            )
        self.router = Router(
            self.timeline, self.instances, self._chance, cancels=plan.router_cancels
        )
        self._engine_ids = {place: f"engine-{place}" for place in self.instances}
        for place, instance in self.instances.items():
            instance.start(self._engine_ids[place])
        self._schedule()

    def run(self) -> "World":
        """Live through the plan, let everything settle, and look at what is left.

        Raises:
            Violation: an invariant does not hold.
        """
        self.advance(self.plan.ends_at - self.timeline.now)
        self.settle()
        self.serve_fresh_requests()
        return self

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        self.timeline.run_until(self.timeline.now + seconds)

    def dispatch(self, ask: Ask) -> Dispatch:
        """One more client, now."""
        return self.router.dispatch(ask)

    def settle(self) -> None:
        """End the faults; when all deadlines have passed, I1, I3 and I4 must hold."""
        self.network.heal()
        for instance in self.instances.values():
            if instance.life is not None:
                instance.life.engine.calm()
        timing = self.plan.timing
        longest = timing.hold_limit_s + timing.push_registration_timeout + timing.transfer_timeout_s
        for _ in self.router.dispatches:
            self.advance(longest)
            if all(dispatch.ending for dispatch in self.router.dispatches):
                break
        for dispatch in self.router.dispatches:
            if dispatch.ending is None:
                raise Violation(f"I3: dispatch {dispatch.number} has no end: {dispatch.ask}")
        self.advance(2 * (timing.quarantine_limit_s + timing.kv_lease_duration))
        self.advance(2 * (timing.peer_idle_s + timing.registration_ttl_s))
        timeliness = Timeliness(self.instances, self.plan.faults, timing)
        timeliness.require(self.router.dispatches)
        for instance in self.instances.values():
            instance.require_empty()

    def serve_fresh_requests(self) -> None:
        """I5: each pair of instances, in both modes; and all is given back again."""
        fresh: list[Dispatch] = []
        for prefill in self.places("p"):
            for decode in self.places("d"):
                for mode in TransferMode:
                    prompt = tuple(1000 + len(fresh) + i for i in range(9))
                    ask = Ask(
                        at=self.timeline.now,
                        mode=mode,
                        prefill=prefill,
                        decode=decode,
                        prompt=prompt,
                    )
                    fresh.append(self.dispatch(ask))
                    self.advance(2.0)
        for dispatch in fresh:
            require(
                dispatch.ending is Ending.SERVED,
                f"I5: {dispatch.ask.mode} {dispatch.ask.prefill} -> {dispatch.ask.decode}: "
                f"{dispatch.ending} {dispatch.reason}",
            )
        self.settle()

    def places(self, role: str) -> list[str]:
        """Places of the instances that compute prompts ("p") or answers ("d")."""
        return [place for place in self.instances if place.startswith(role)]

    # Faults.

    def _schedule(self) -> None:
        forgotten = {each.dispatch for each in self.plan.faults if isinstance(each, Forget)}
        for number, ask in enumerate(self.plan.asks):
            self.timeline.at(
                ask.at,
                lambda ask=ask, number=number: self._ask(ask, number in forgotten),  # type: ignore[misc]
            )
        for fault in self.plan.faults:
            self._bring_about(fault)

    def _ask(self, ask: Ask, is_forgotten: bool) -> None:
        self.router.dispatch(ask, is_forgotten=is_forgotten)

    def _bring_about(self, fault: Fault) -> None:
        at = self.timeline.at
        match fault:
            case Crash():
                at(fault.at, lambda: self.crash(fault))
            case Stall():
                instance = self.instances[fault.place]
                at(fault.at, instance.stall)
                at(fault.at + fault.for_s, instance.resume)
            case Shortage():
                at(fault.at, lambda: self._take_blocks(fault))
            case Preempt():
                at(fault.at, lambda: self._preempt(fault.place))
            case Abort():
                at(fault.at, lambda: self._abort(fault))

    def crash(self, fault: Crash) -> None:
        """Kill an instance, and start another one at its address later."""
        instance = self.instances[fault.place]
        life = instance.life
        if life is None:
            return
        instance.kill()
        self.router.instance_died(life)
        if not fault.keeps_engine_id:
            self._engine_ids[fault.place] = f"engine-{fault.place}.{life.serial + 1}"
        self.timeline.after(fault.down_s, lambda: instance.start(self._engine_ids[fault.place]))

    def _take_blocks(self, fault: Shortage) -> None:
        life = self.instances[fault.place].life
        if life is None:
            return
        taken = life.pool.allocate((), min(fault.num_blocks, life.pool.num_free)) or []

        def give_back() -> None:
            life.pool.release(taken)
            life.engine.wake()

        self.timeline.after(fault.for_s, give_back)

    def _preempt(self, place: str) -> None:
        life = self.instances[place].life
        if life is not None and not life.engine.is_stalled:
            life.engine.preempt()

    def _abort(self, fault: Abort) -> None:
        if fault.dispatch >= len(self.router.dispatches):
            return
        dispatch = self.router.dispatches[fault.dispatch]
        if fault.by is Leaver.CLIENT:
            self.router.leave(dispatch)
            return
        leg = dispatch.prefill if fault.by is Leaver.PREFILL else dispatch.decode
        if leg is not None:
            leg.life.engine.abort(leg.request_id)

    def _owned_by(self, agent: AgentName) -> Owned:
        for instance in self.instances.values():
            owned = instance.owned_by(agent)
            if owned is not None:
                return owned
        raise AssertionError(f"nobody's agent: {agent}")
