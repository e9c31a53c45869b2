"""A router in front of a fleet on virtual time: the real `Dispatch`, policies, pace and breaker.

Decides when legs set out and how what an engine says becomes an event of the dispatch, as
`router.attempt` and `router.exchange` do with HTTP. Refuses to decide anything that these decide by
pure functions: it calls the same ones.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvcourier.config import Binding, Limits, TransferMode
from kvcourier.core.params import parse_params
from kvcourier.errors import ParamsError
from kvcourier.ids import EngineId, RequestId, TransferId
from kvcourier.router import events as told
from kvcourier.router.breaker import Breaker, BreakerSettings
from kvcourier.router.config import Coordinates
from kvcourier.router.dispatch import Dispatch
from kvcourier.router.events import Action, Event, FailureKind, LegLost, LegName, may_do_better
from kvcourier.router.legs import Call, Params, prefill_params
from kvcourier.router.pace import Pace, Progress, bind_after_s, look_again_s
from kvcourier.router.policy import Candidate, Need, choose
from kvcourier.router.prompts import PART_TOKENS
from kvcourier.sim.engine import Answer
from kvcourier.sim.instance import Instance, Life
from kvcourier.sim.invariants import require
from kvcourier.sim.router import expected_tokens
from kvcourier.sim.timeline import Timeline

_HOP_S = (0.0005, 0.002)
_LIMITS = Limits()

_OnEnd = Callable[[Answer], None]
_OnToken = Callable[[], None]
_OnFailure = Callable[[told.ReplyError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How the router works; see `router.config`."""

    mode: TransferMode = TransferMode.PUSH
    binding: Binding = Binding.EARLY
    prefill_policy: str = "prefix_aware"
    decode_policy: str = "least_loaded"
    rebinds: int = 0
    retries: int = 2
    near_lead_s: float = 0.02
    stall_s: float = 1.0
    load_s: float = 0.1
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


@dataclass(slots=True)
class View:
    """What the router knows of one instance."""

    instance: Instance
    breaker: Breaker
    pace: Pace = field(default_factory=Pace)
    reachable: bool = True
    in_flight: int = 0
    backlog: int = 0
    said: int = 0
    kv_used: float = 0.0
    in_flight_then: int = 0

    def candidate(self, now: float, usable: bool) -> Candidate:
        """As a policy sees it."""
        return Candidate(
            name=self.instance.place,
            usable=usable,
            reachable=self.reachable,
            trusted=self.breaker.allows(now),
            num_requests=max(0, self.said - self.in_flight_then) + self.in_flight,
            kv_used=self.kv_used,
            backlog=self.backlog,
        )

    def look(self) -> None:
        """Ask it how busy it is."""
        life = self.instance.life
        self.reachable = life is not None
        if life is not None:
            self.said, self.in_flight_then = life.engine.num_live, self.in_flight
            self.kv_used = 1 - life.pool.num_free / life.pool.num_blocks


@dataclass(slots=True)
class FleetCall:
    """One client.

    Attributes:
        first_at: when it got its first token; None: never.
        num_prefills: prompts sent to a prefill instance for it.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    came_at: float
    first_at: float | None = None
    outcome: told.CallOutcome | None = None
    num_prefills: int = 0
    num_rebinds: int = 0
    tried: set[str] = field(default_factory=set)


class Fleet:
    """The router. `serve` begins a call, `instance_died` breaks connections."""

    def __init__(
        self,
        timeline: Timeline,
        instances: Mapping[str, Instance],
        chance: random.Random,
        settings: FleetSettings,
    ) -> None:
        self.timeline = timeline
        self.settings = settings
        self.chance = chance
        self.calls: list[FleetCall] = []
        self.attempts: list[FleetAttempt] = []
        self.views = {
            place: View(each, Breaker(settings.breaker)) for place, each in instances.items()
        }
        self._turns = {"p": 0, "d": 0}
        self._look()

    def serve(self, prompt: tuple[int, ...], max_tokens: int) -> FleetCall:
        """A client comes."""
        call = FleetCall(prompt, max_tokens, self.timeline.now)
        self.calls.append(call)
        self._attempt(call, self.settings.retries)
        return call

    def instance_died(self, life: Life) -> None:
        """The connections to it broke."""
        for attempt in self.attempts:
            attempt.lose(life)

    def choose(self, side: str, tried: set[str]) -> View | None:
        """The next instance of a side ("p" or "d"), by its policy."""
        policy = {"p": self.settings.prefill_policy, "d": self.settings.decode_policy}[side]
        views = [view for place, view in self.views.items() if place.startswith(side)]
        now = self.timeline.now
        candidates = [view.candidate(now, view.instance.place not in tried) for view in views]
        self._turns[side] += 1
        index = choose(policy, candidates, Need(self._turns[side]))
        return None if index is None else views[index]

    def hop_s(self) -> float:
        """How long a message of the router's takes."""
        return self.chance.uniform(*_HOP_S)

    def _look(self) -> None:
        for view in self.views.values():
            view.look()
        self.timeline.after(self.settings.load_s, self._look)

    def _attempt(self, call: FleetCall, retries: int) -> None:
        prefill = self.choose("p", call.tried)
        if prefill is None or prefill.instance.life is None:
            # Nobody is known to be there; as with a refused connection.
            call.outcome = told.CallOutcome.FAILED
            return

        def on_failure(error: told.ReplyError) -> None:
            if may_do_better(error.kind, error.answer) and retries > 0:
                self._attempt(call, retries - 1)
            else:
                call.outcome = told.CallOutcome.FAILED

        attempt = FleetAttempt(self, call, len(self.attempts), prefill, on_failure)
        self.attempts.append(attempt)
        attempt.start()


@dataclass(slots=True)
class _Leg:
    """One request in one life of an instance."""

    number: int
    view: View
    life: Life | None
    request_id: str
    missing: int
    is_over: bool = False


class FleetAttempt:
    """One dispatch, carried out on virtual time: what `router.attempt.Attempt` is over HTTP."""

    def __init__(
        self,
        fleet: Fleet,
        call: FleetCall,
        number: int,
        prefill: View,
        on_failure: _OnFailure,
    ) -> None:
        settings = fleet.settings
        self._fleet = fleet
        self._client = call
        self._number = number
        self._on_failure = on_failure
        self._prefill = prefill
        self._legs: dict[LegName, _Leg] = {}
        self._num_decode_legs = 0
        self._passed: set[str] = set()
        self._began_at = fleet.timeline.now
        self._ahead = 0
        life = prefill.instance.life
        assert life is not None, "the fleet has looked"
        info = life.endpoint.instance_info()
        self._call = Call(
            settings.mode,
            TransferId(f"t-{number}"),
            RequestId(f"r-{number}"),
            {},
            coordinates=Coordinates(
                EngineId(info["engine_id"]),
                info["side_channel_host"],
                info["side_channel_port"],
                info["tp_size"],
                info["pp_size"],
            ),
            modes_known=True,
            binding=settings.binding,
            max_rebinds=settings.rebinds,
        )
        self._dispatch = Dispatch(self._call)
        self._is_over = False

    def start(self) -> None:
        """Send the first legs."""
        self._perform(self._dispatch.start())

    def lose(self, life: Life) -> None:
        """An instance died; its connections are known to be broken a moment later."""
        for name, leg in self._legs.items():
            if leg.life is life and not leg.is_over:
                self._end_leg(leg)
                self._post(LegLost(name, FailureKind.DROPPED, "died"), leg)

    def _post(self, event: Event, leg: _Leg | None = None) -> None:
        self._fleet.timeline.after(self._fleet.hop_s(), lambda: self._take(event, leg))

    def _take(self, event: Event, leg: _Leg | None) -> None:
        current = self._legs.get(LegName.DECODE)
        if leg is not None and leg is not self._prefill_leg and leg is not current:
            return
        found = told.verdict(event)
        if found is not None and found[0] in self._legs:
            breaker = self._legs[found[0]].view.breaker
            breaker.succeeded() if found[1] else breaker.failed(self._fleet.timeline.now)
        if isinstance(event, told.PrefillAnswered) and event.answer.ok:
            self._prefill.pace.learn(self._ahead, self._fleet.timeline.now - self._began_at)
        self._perform(self._dispatch.handle(event))

    @property
    def _prefill_leg(self) -> _Leg | None:
        return self._legs.get(LegName.PREFILL)

    def _perform(self, actions: list[Action]) -> None:
        timeline, call = self._fleet.timeline, self._client
        for action in actions:
            match action:
                case told.StartPrefill():
                    self._start_prefill()
                case told.AwaitNear():
                    self._await_near()
                case told.WatchDecode():
                    timeline.after(self._fleet.settings.stall_s, self._watch_decode)
                case told.StartDecode(params):
                    self._start_decode(params)
                case told.Cancel(name):
                    self._cancel(name)
                case told.Note(name, kind, _, rebound):
                    call.num_rebinds += rebound
                    leg = self._legs.get(name)
                    if leg is not None and kind is not FailureKind.NO_KV:
                        call.tried.add(leg.view.instance.place)
                        leg.view.reachable &= kind not in told.RETRYABLE
                case told.Relay():
                    call.first_at = timeline.now
                case told.ReplyError():
                    self._on_failure(action)
                case told.Finish(outcome):
                    self._is_over = True
                    if outcome is not told.CallOutcome.FAILED and call.outcome is None:
                        is_error = outcome is told.CallOutcome.UPSTREAM_ERROR
                        call.outcome = None if is_error else outcome

    # Legs.

    def _start_prefill(self) -> None:
        self._client.num_prefills += 1
        leg = self._begin(LegName.PREFILL, self._prefill, f"p-{self._number}")
        self._ahead = self._prefill.backlog
        params = prefill_params(self._call)

        def on_end(answer: Answer) -> None:
            if leg.is_over:
                return
            self._end_leg(leg)
            if answer.error:
                self._post(told.PrefillAnswered(_refusal(answer.error)), leg)
            else:
                content = json.dumps({"kv_transfer_params": answer.params}).encode()
                self._post(told.PrefillAnswered(told.Answer(200, "", content)), leg)

        self._fleet.timeline.after(
            self._fleet.hop_s(), lambda: self._submit(leg, LegName.PREFILL, 1, params, on_end)
        )

    def _start_decode(self, params: Params) -> None:
        if LegName.DECODE in self._legs:
            self._passed.add(self._legs[LegName.DECODE].view.instance.place)
        view = self._fleet.choose("d", self._client.tried | self._passed)
        if view is None:
            self._post(LegLost(LegName.DECODE, FailureKind.NO_INSTANCE, "is left"))
            return
        self._num_decode_legs += 1
        leg = self._begin(LegName.DECODE, view, f"d.{self._num_decode_legs}-{self._number}")
        said: list[int] = []

        def on_token() -> None:
            said.append(1)
            if len(said) == 1 and not leg.is_over:
                self._post(told.DecodeStreaming(), leg)

        def on_end(answer: Answer) -> None:
            if leg.is_over:
                return
            self._end_leg(leg)
            if not answer.error:
                expected = expected_tokens(self._client.prompt, self._client.max_tokens)
                require(answer.tokens == expected, f"{leg.request_id}: tokens {answer.tokens}")
                self._post(told.DecodeEnded(told.StreamEnding.DONE), leg)
            elif said:
                self._post(told.DecodeEnded(told.StreamEnding.ERROR_TOLD), leg)
            else:
                self._post(told.DecodeAnswered(_refusal("kv_transfer_failed")), leg)

        self._fleet.timeline.after(
            self._fleet.hop_s(),
            lambda: self._submit(
                leg, LegName.DECODE, self._client.max_tokens, params, on_end, on_token
            ),
        )

    def _begin(self, name: LegName, view: View, request_id: str) -> _Leg:
        parts = -(-len(self._client.prompt) // PART_TOKENS) if name is LegName.PREFILL else 0
        leg = self._legs[name] = _Leg(self._num_decode_legs, view, None, request_id, parts)
        view.in_flight += 1
        view.backlog += parts
        view.breaker.begin(self._fleet.timeline.now)
        return leg

    def _submit(
        self,
        leg: _Leg,
        name: LegName,
        max_tokens: int,
        params: Params,
        on_end: _OnEnd,
        on_token: _OnToken = lambda: None,
    ) -> None:
        if leg.is_over:
            return
        leg.life = leg.view.instance.life
        if leg.life is None:
            self._end_leg(leg)
            self._post(LegLost(name, FailureKind.CONNECT, "is down"), leg)
            return
        try:
            intent = parse_params(dict(params), _LIMITS)
            prompt = self._client.prompt
            leg.life.engine.submit(leg.request_id, prompt, max_tokens, intent, on_end, on_token)
        except ParamsError as error:
            on_end(Answer(leg.request_id, error=str(error)))

    def _cancel(self, name: LegName) -> None:
        leg = self._legs.get(name)
        if leg is None:
            return
        life, request_id = leg.life, leg.request_id
        if not leg.is_over:
            self._end_leg(leg)
            if life is not None:
                self._fleet.timeline.after(
                    self._fleet.hop_s(), lambda: life.engine.abort(request_id)
                )
        if name is LegName.PREFILL and life is not None:
            transfer_id = self._call.transfer_id

            def let_go() -> None:
                life.endpoint.let_go(transfer_id)

            self._fleet.timeline.after(self._fleet.hop_s(), let_go)

    def _end_leg(self, leg: _Leg) -> None:
        leg.is_over = True
        leg.view.in_flight -= 1
        leg.view.backlog -= leg.missing
        leg.view.breaker.ended()

    # Waiting.

    def _await_near(self) -> None:
        expected_s = self._prefill.pace.expected_s(self._prefill.backlog)
        wait_s = bind_after_s(expected_s, self._fleet.settings.near_lead_s)
        self._fleet.timeline.after(wait_s, self._look_near)

    def _look_near(self) -> None:
        leg = self._prefill_leg
        sequence = leg.life.engine.sequence(leg.request_id) if leg and leg.life else None
        wait_s = None
        if sequence is not None:
            left = Progress(sequence.num_computed, sequence.num_prompt).left
            parts = -(-len(self._client.prompt) // PART_TOKENS)
            left_s = self._prefill.pace.expected_s(left * parts)
            wait_s = look_again_s(left_s, self._fleet.settings.near_lead_s)
        if wait_s is None:
            self._post(told.PrefillNear())
        else:
            self._fleet.timeline.after(wait_s, self._look_near)

    def _watch_decode(self) -> None:
        leg = self._legs.get(LegName.DECODE)
        if self._is_over or leg is None:
            return
        now, place = self._fleet.timeline.now, leg.view.instance.place
        other = self._fleet.choose("d", self._client.tried | self._passed | {place})
        if other is None:
            return
        ours, theirs = leg.view.candidate(now, True), other.candidate(now, True)
        if theirs.num_requests < ours.num_requests:
            self._post(told.DecodeStalled())


def _refusal(text: str) -> told.Answer:
    body = {"error": {"message": text, "code": text}}
    return told.Answer(503, "application/json", json.dumps(body, separators=(",", ":")).encode())
