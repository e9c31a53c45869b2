"""One dispatch of a call, carried out.

Decides how the events of tasks, timer and client reach a `Dispatch` one at a time, which part does
each of its actions, and what outlives it. Refuses to know what follows from what: that is
`dispatch`.
"""

import asyncio
import logging
import time
import uuid
from functools import partial

from kvcourier.ids import TransferId
from kvcourier.router.client_answer import ClientAnswer
from kvcourier.router.client_call import ClientCall
from kvcourier.router.dispatch import Dispatch
from kvcourier.router.events import (
    Action,
    AwaitNear,
    BreakStream,
    CallOutcome,
    Cancel,
    ClientLeft,
    EndStream,
    Event,
    FailureKind,
    Finish,
    LegLost,
    LegName,
    Note,
    PrefillAnswered,
    Relay,
    Reply,
    ReplyError,
    RouterStopped,
    StartDecode,
    StartPrefill,
    TimeUp,
    WatchDecode,
)
from kvcourier.router.instances import Instance
from kvcourier.router.legs import Call, Params, decode_leg, prefill_leg
from kvcourier.router.pairing import Pairing
from kvcourier.router.running_legs import RunningLegs
from kvcourier.router.services import Services
from kvcourier.router.story import DispatchStory
from kvcourier.router.watches import Watches

_log = logging.getLogger(__name__)


class Attempt:
    """One dispatch: the driver of a `Dispatch`.

    Args:
        prefill: who computes the prompt; None: the decode instance does.
        tried: whom this call need not be sent to any more, as they have failed; grows.
        left: ends when the client has gone.
        decode: the first to be asked for the answer; None: as the policy chooses, at that time.
    """

    def __init__(
        self,
        services: Services,
        call: ClientCall,
        prefill: Instance | None,
        tried: set[Instance],
        left: asyncio.Task[None],
        decode: Instance | None = None,
    ) -> None:
        self._services = services
        self._client = call
        self._left = left
        turn = None
        if call.conversation:
            turn = services.conversations.take(call.conversation)
            services.metrics.turns.labels("none" if turn is None else "sent").inc()
        self._call = Call(
            mode=call.mode,
            transfer_id=TransferId(uuid.uuid4().hex),
            request_id=call.request_id,
            body=call.body,
            headers=call.headers,
            coordinates=prefill.coordinates if prefill else None,
            prefill_dp_rank=prefill.spec.dp_rank if prefill else None,
            modes_known=prefill is not None and prefill.info is not None,
            is_alone=prefill is None,
            binding=call.binding,
            history=turn.params if turn is not None else None,
            keeps=bool(call.conversation),
            max_rebinds=services.config.rebinds,
        )
        self.failure: ReplyError | None = None
        keeper = turn.decode if turn is not None else ""
        side = services.sides[LegName.DECODE]
        self.pairing = Pairing(call, side, prefill, tried, decode, keeper)
        self._dispatch = Dispatch(self._call)
        self._story = DispatchStory(services.diary, services.tracing, self._call)
        self._events: asyncio.Queue[tuple[int | None, Event]] = asyncio.Queue()
        self._legs = RunningLegs(call, services.metrics)
        self._num_decode_legs = 0
        timeouts = services.config.timeouts
        self._watches = Watches(
            self.pairing, self._call.transfer_id, call.prompt, timeouts, self._post
        )
        keep_state = self._keep_state if call.conversation else None
        self._answer = ClientAnswer(call, services.metrics, lambda: self.headers, keep_state)
        self._outcome: CallOutcome | None = None

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What the client's answer tells of the dispatch."""
        transfer_id = ("x-kv-transfer-id", str(self._call.transfer_id))
        return (*self._client.answer_headers, transfer_id, *self.pairing.headers)

    async def run(self) -> CallOutcome:
        """Drive the dispatch to its end; `failure` is set if the client has no answer yet."""
        loop = asyncio.get_running_loop()
        total_s = self._client.total_s
        end_s = loop.time() + total_s - (time.monotonic() - self._client.started_s)
        timer = loop.call_at(end_s, self._post, TimeUp())
        self._left.add_done_callback(self._on_left)
        self._services.running.add(self)
        self._story.begin()
        try:
            await self._perform(self._dispatch.start())
            while self._outcome is None:
                await self._step()
        except BaseException:
            await self._legs.cancel(*LegName)
            raise
        finally:
            timer.cancel()
            self._legs.release_prefill()
            self._watches.stop()
            self._services.running.discard(self)
            self._left.remove_done_callback(self._on_left)
        self._let_run_out()
        return self._outcome

    def stop(self) -> None:
        """The router is being shut down: end now, and tell the client."""
        self._post(RouterStopped())

    # Events.

    def _post(self, event: Event, decode_leg: int | None = None) -> None:
        """`decode_leg`: which of the legs to D says so, counted from 1."""
        self._events.put_nowait((decode_leg, event))

    def _on_left(self, _task: asyncio.Task[None]) -> None:
        self._post(ClientLeft())

    async def _step(self) -> None:
        leg, event = await self._events.get()
        if leg not in (None, self._num_decode_legs):
            # Of a leg that was given up for another.
            return
        self.pairing.judge(event)
        self._story.happened(event)
        if isinstance(event, PrefillAnswered) and event.answer.ok:
            self.pairing.prefilled(event.answer, *self._legs.prefill_took)
        await self._perform(self._dispatch.handle(event))

    # Actions.

    async def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._story.happened(action)
            match action:
                case StartPrefill():
                    self._start_prefill()
                case AwaitNear():
                    self._watches.await_near()
                case WatchDecode():
                    self._watches.watch_decode()
                case StartDecode(params):
                    self._start_decode(params)
                case Cancel(leg):
                    await self._legs.cancel(leg)
                    if leg is LegName.PREFILL:
                        self._let_go()
                case Note():
                    self._note(action)
                case Reply(answer):
                    await self._answer.whole(answer)
                case ReplyError():
                    self.failure = action
                case Relay():
                    self._legs.release_prefill()
                    self._answer.relay()
                case EndStream():
                    await self._answer.stream.end()
                case BreakStream(kind, reason):
                    decode = self.pairing.chosen[LegName.DECODE].name
                    message = f"The decode instance {decode} {reason} in the middle of the answer."
                    await self._answer.stream.break_off(message, kind)
                case Finish(outcome):
                    self._outcome = outcome
                    self._legs.release_prefill()
                    if outcome is CallOutcome.OK:
                        self._ask_for_state()

    def _start_prefill(self) -> None:
        prefill, upstream = self.pairing.chosen[LegName.PREFILL], self._services.upstream
        leg = prefill_leg(self._call, self._story.send(LegName.PREFILL, prefill.spec.url))
        url = prefill.spec.url + self._client.path
        self._legs.start(LegName.PREFILL, prefill, lambda: upstream.prefill(url, leg, self._post))

    def _start_decode(self, params: Params) -> None:
        decode, upstream, answer = self.pairing.next_decode(), self._services.upstream, self._answer
        if decode is None:
            mode = self._client.mode
            reason = f"takes part in {mode}, is not drained, and was not tried already"
            self._post(LegLost(LegName.DECODE, FailureKind.NO_INSTANCE, reason))
            return
        self._num_decode_legs += 1
        post = partial(self._post, decode_leg=self._num_decode_legs)
        carrier = self._story.send(LegName.DECODE, decode.spec.url)
        leg = decode_leg(self._call, params, decode.spec.dp_rank, carrier)
        url = decode.spec.url + self._client.path
        self._legs.start(
            LegName.DECODE,
            decode,
            lambda: upstream.decode(url, leg, post, answer.may_relay, answer.stream),
        )

    def _note(self, note: Note) -> None:
        self._services.metrics.failures.labels(note.leg, note.kind).inc()
        if note.rebound:
            self._services.metrics.rebinds.labels(note.kind).inc()
        _log.warning(
            "request %s, transfer %s: %s %s",
            self._call.request_id,
            self._call.transfer_id,
            self.pairing.subject(note.leg, note.kind),
            note.reason,
        )
        self.pairing.failed(note)

    # What outlives it.

    def _keep_state(self, params: object) -> None:
        decode = self.pairing.chosen[LegName.DECODE].name
        self._services.conversations.put(self._client.conversation, params, decode)

    def _ask_for_state(self) -> None:
        """Not every engine's streams tell of what is kept."""
        if self._answer.lacks_state:
            name, decode = self._call.transfer_id, self.pairing.chosen[LegName.DECODE]
            asking = self._services.states.learn(self._client.conversation, name, decode)
            self._services.in_background(asking)

    def _let_go(self) -> None:
        """P may have computed the prompt, and D not heard of it: then no one else will tell P."""
        prefill = self.pairing.chosen.get(LegName.PREFILL)
        if prefill is None or self._legs.get(LegName.PREFILL) is None or prefill.info is None:
            # Never asked, or not one of ours: there the lease has to do.
            return
        url = f"{prefill.spec.url}/kvcourier/transfers/{self._call.transfer_id}"
        self._services.in_background(self._services.upstream.let_go(url, self._call.headers))

    def _let_run_out(self) -> None:
        """D has all it needs, but P has not answered yet: closing now would look like an abort."""
        task = self._legs.get(LegName.PREFILL)
        if task is None or (task.done() and self._events.empty()):
            return
        self._services.in_background(self._run_out(task))

    async def _run_out(self, prefill: asyncio.Task[None]) -> None:
        try:
            await asyncio.gather(prefill, return_exceptions=True)
        except asyncio.CancelledError:
            await self._legs.cancel(LegName.PREFILL)
            raise
        while not self._events.empty():
            await self._step()
