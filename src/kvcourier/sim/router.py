"""A model of a router and its clients: which legs a dispatch has, and how it ends.

Decides what P and D are sent and who is told when the other fails, as `router.dispatch` does with
HTTP. Refuses to know faults and how engines work.
"""

import enum
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvcourier.config import USUAL_BINDING, Binding, Limits, TransferMode
from kvcourier.core.params import parse_params
from kvcourier.errors import ParamsError
from kvcourier.ids import RequestId, owner_of
from kvcourier.sim.content import next_token, prefix_hashes
from kvcourier.sim.engine import VOCAB_SIZE, Answer, refusal
from kvcourier.sim.instance import Instance, Life
from kvcourier.sim.invariants import Violation, require
from kvcourier.sim.timeline import Timeline

_HOP_S = (0.0005, 0.002)
NEXT_WORDS = (11, 7, 43, 2, 19, 5)
"""What a client says next."""
_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client wants, and who is to serve it.

    Attributes:
        binding: whether D is told before P has answered; None leaves it to the mode.
        leg_gap_s: how much later D's leg sets out than it could.
        num_turns: how often the client goes on with what was said, this time included.
        pause_s: how long it thinks in between.
    """

    at: float
    mode: TransferMode
    prefill: str
    decode: str
    prompt: tuple[int, ...]
    binding: Binding | None = None
    max_tokens: int = 2
    leg_gap_s: float = 0.0
    with_transfer_id: bool = True
    num_turns: int = 1
    pause_s: float = 0.0

    @property
    def is_early(self) -> bool:
        """Whether both legs set out at once."""
        return (self.binding or USUAL_BINDING[self.mode]) is Binding.EARLY


class Ending(enum.StrEnum):
    """How a dispatch has ended for its client."""

    SERVED = "served"
    FAILED = "failed"
    LEFT = "left"


@dataclass(slots=True)
class Leg:
    """One half of a dispatch: a request in one life of one instance."""

    request_id: str
    life: Life
    answered: bool = False


@dataclass(slots=True)
class Dispatch:
    """One call of a client."""

    number: int
    ask: Ask
    prefill: Leg | None = None
    decode: Leg | None = None
    ending: Ending | None = None
    reason: str = ""
    ended_at: float = 0.0
    is_forgotten: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)


def prefill_request(number: int) -> str:
    """P's id of a dispatch's request."""
    return f"p-{number}"


def decode_request(number: int) -> str:
    """D's id of a dispatch's request."""
    return f"d-{number}"


def holder_request_of(wanter_request_id: str) -> str:
    """The holder's id for the wanter's; what is kept of a turn is never preempted and has none."""
    if owner_of(RequestId(wanter_request_id)) != wanter_request_id:
        return ""
    return prefill_request_of(wanter_request_id)


def prefill_request_of(decode_request_id: str) -> str:
    """P's id for D's."""
    return prefill_request(int(decode_request_id.rpartition("-")[2]))


def expected_tokens(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the model says, whoever computes it."""
    last, tokens = prefix_hashes(prompt)[-1], []
    for _ in range(count):
        tokens.append(next_token(last, VOCAB_SIZE))
        last = prefix_hashes(tokens[-1:], last)[0]
    return tuple(tokens)


class Router:
    """Sends each dispatch its legs. D gets the prompt without the token that P said, as in vLLM."""

    def __init__(
        self,
        timeline: Timeline,
        instances: Mapping[str, Instance],
        chance: random.Random,
        *,
        cancels: bool,
    ) -> None:
        """`cancels`: whether the other leg is cancelled when one has failed; many do not."""
        self._cancels = cancels
        self.dispatches: list[Dispatch] = []
        self._timeline = timeline
        self._instances = instances
        self._chance = chance

    def dispatch(
        self, ask: Ask, *, is_forgotten: bool = False, history: Mapping[str, Any] | None = None
    ) -> Dispatch:
        """Serve a client, from now on; `history` is what D has told of the turn before."""
        dispatch = Dispatch(len(self.dispatches), ask, is_forgotten=is_forgotten)
        self.dispatches.append(dispatch)
        prefill = {
            **(history or {}),
            "do_remote_decode": True,
            "transfer_mode": ask.mode.value,
            **self._transfer_id(dispatch),
        }
        self._hop(lambda: self._start_prefill(dispatch, prefill))
        if ask.is_early and not is_forgotten:
            life = self._instances[ask.prefill].life
            if life is None:
                self._end(dispatch, Ending.FAILED, "no prefill instance")
                return dispatch
            info = life.endpoint.instance_info()
            coordinates = {
                "do_remote_prefill": True,
                "remote_engine_id": info["engine_id"],
                "remote_host": info["side_channel_host"],
                "remote_port": info["side_channel_port"],
                "tp_size": info["tp_size"],
                "pp_size": info["pp_size"],
                "remote_request_id": prefill_request(dispatch.number),
                **self._transfer_id(dispatch),
            }
            if ask.mode is TransferMode.PULL:
                coordinates["transfer_mode"] = ask.mode.value
            self._hop(lambda: self._start_decode(dispatch, coordinates), ask.leg_gap_s)
        return dispatch

    def leave(self, dispatch: Dispatch) -> None:
        """The client has gone."""
        if dispatch.ending is None:
            self._end(dispatch, Ending.LEFT, "the client left")

    def instance_died(self, life: Life) -> None:
        """The connections to it broke."""
        for dispatch in self.dispatches:
            legs = [leg for leg in (dispatch.prefill, dispatch.decode) if leg is not None]
            if any(leg.life is life and not leg.answered for leg in legs):
                self._hop(lambda dispatch=dispatch: self._fail(dispatch, "instance died"))  # type: ignore[misc]

    def _start_prefill(self, dispatch: Dispatch, params: Mapping[str, Any]) -> None:
        ask = dispatch.ask
        leg = self._start(
            dispatch,
            ask.prefill,
            prefill_request(dispatch.number),
            1,
            params,
            lambda answer: self._hop(lambda: self._on_prefill(dispatch, answer)),
        )
        dispatch.prefill = leg

    def _start_decode(self, dispatch: Dispatch, params: Mapping[str, Any]) -> None:
        ask = dispatch.ask
        leg = self._start(
            dispatch,
            ask.decode,
            decode_request(dispatch.number),
            ask.max_tokens,
            params,
            lambda answer: self._hop(lambda: self._on_decode(dispatch, answer)),
        )
        dispatch.decode = leg

    def _start(
        self,
        dispatch: Dispatch,
        place: str,
        request_id: str,
        max_tokens: int,
        params: Mapping[str, Any],
        on_end: Callable[[Answer], None],
    ) -> Leg | None:
        if dispatch.ending is Ending.LEFT or (dispatch.ending and self._cancels):
            return None
        life = self._instances[place].life
        if life is None:
            self._fail(dispatch, f"{place} is down")
            return None
        try:
            intent = parse_params(dict(params), _LIMITS)
            life.engine.submit(request_id, dispatch.ask.prompt, max_tokens, intent, on_end)
        except ParamsError as error:
            self._fail(dispatch, refusal(error))
            return None
        return Leg(request_id, life)

    def _on_prefill(self, dispatch: Dispatch, answer: Answer) -> None:
        if dispatch.prefill is not None:
            dispatch.prefill.answered = True
        if answer.error:
            self._fail(dispatch, f"prefill: {answer.error}")
        elif dispatch.is_forgotten:
            self._fail(dispatch, "the router has died")
        elif not dispatch.ask.is_early:
            params = dict(answer.params or {})
            if dispatch.ask.mode is TransferMode.PUSH:
                # Without block ids D cannot READ, so it registers, and P writes at once.
                params |= {"remote_block_ids": None, "transfer_mode": dispatch.ask.mode.value}
            dispatch.params = params
            self._hop(lambda: self._start_decode(dispatch, params), dispatch.ask.leg_gap_s)

    def _on_decode(self, dispatch: Dispatch, answer: Answer) -> None:
        if dispatch.decode is not None:
            dispatch.decode.answered = True
        if dispatch.ending is not None:
            return
        if answer.error:
            self._fail(dispatch, f"decode: {answer.error}")
            return
        expected = expected_tokens(dispatch.ask.prompt, dispatch.ask.max_tokens)
        require(
            answer.tokens == expected,
            f"dispatch {dispatch.number}: tokens {answer.tokens}, expected {expected}",
        )
        self._end(dispatch, Ending.SERVED)
        ask = dispatch.ask
        if ask.num_turns > 1:
            said = (*ask.prompt, *answer.tokens, *NEXT_WORDS)
            at = self._timeline.now + ask.pause_s
            turn = replace(ask, at=at, prompt=said, num_turns=ask.num_turns - 1)
            self._hop(lambda: self._go_on(turn, answer.params), ask.pause_s)

    def _go_on(self, turn: Ask, history: Mapping[str, Any] | None) -> None:
        self.dispatch(turn, history=history)

    def _fail(self, dispatch: Dispatch, reason: str) -> None:
        if dispatch.ending is None:
            self._end(dispatch, Ending.FAILED, reason)

    def _end(self, dispatch: Dispatch, ending: Ending, reason: str = "") -> None:
        """The client has its answer, or wants none; legs that run are cancelled."""
        if dispatch.ending is not None:
            raise Violation(f"I3: dispatch {dispatch.number} ends twice")
        dispatch.ending, dispatch.reason = ending, reason
        dispatch.ended_at = self._timeline.now
        if ending is Ending.FAILED and not self._cancels:
            return
        for leg in (dispatch.prefill, dispatch.decode):
            if leg is not None and not leg.answered:
                self._hop(lambda leg=leg: leg.life.engine.abort(leg.request_id))  # type: ignore[misc]

    def _transfer_id(self, dispatch: Dispatch) -> dict[str, Any]:
        return {"transfer_id": f"t-{dispatch.number}"} if dispatch.ask.with_transfer_id else {}

    def _hop(self, what: Callable[[], None], extra_s: float = 0.0) -> None:
        self._timeline.after(self._chance.uniform(*_HOP_S) + extra_s, what)
