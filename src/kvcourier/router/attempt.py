"""One dispatch of a call, carried out.

Decides how the events of tasks, timer and client reach a `Dispatch` one at a time, and how its
actions are performed; D is chosen when its leg starts, not before. Refuses to know what follows
from what: that is `dispatch`.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import Receive, Send

from kvcourier.config import Binding, Limits, TransferMode
from kvcourier.ids import RequestId, TransferId
from kvcourier.router.answers import EventStream, send_answer
from kvcourier.router.config import RouterConfig
from kvcourier.router.conversations import Conversations, StateFilter
from kvcourier.router.dispatch import Dispatch
from kvcourier.router.events import (
    RETRYABLE,
    Action,
    AwaitNear,
    BreakStream,
    CallOutcome,
    Cancel,
    ClientLeft,
    DecodeStalled,
    EndStream,
    Event,
    FailureKind,
    Finish,
    LegLost,
    LegName,
    Note,
    PrefillAnswered,
    PrefillNear,
    Relay,
    Reply,
    ReplyError,
    RouterStopped,
    StartDecode,
    StartPrefill,
    TimeUp,
    WatchDecode,
    verdict,
)
from kvcourier.router.instances import Instance
from kvcourier.router.intake import BINDING_HEADER, MODE_HEADER
from kvcourier.router.legs import (
    Call,
    Leg,
    Params,
    decode_leg,
    prefill_leg,
    read_handoff,
)
from kvcourier.router.metrics import RouterMetrics
from kvcourier.router.pace import bind_after_s, look_again_s
from kvcourier.router.prompts import Prompt
from kvcourier.router.sides import NO_PROMPT, Side
from kvcourier.router.story import DispatchStory
from kvcourier.router.upstream import Upstream
from kvcourier.runtime.diary import Diary
from kvcourier.tracing.interface import Tracing

_log = logging.getLogger(__name__)

Chosen = Mapping[LegName, Instance]


@dataclass(frozen=True, slots=True)
class Services:
    """What all calls share.

    `background` holds tasks that outlive the call that made them, `running` the attempts that
    clients wait for.
    """

    config: RouterConfig
    upstream: Upstream
    sides: Mapping[LegName, Side]
    metrics: RouterMetrics
    conversations: Conversations
    background: set[asyncio.Task[None]] = field(default_factory=set)
    running: set["Attempt"] = field(default_factory=set)
    diary: Diary = field(default_factory=lambda: Diary(Limits()))
    tracing: Tracing | None = None

    def begin_stop(self) -> None:
        """End what runs, each client being told; on the event loop."""
        for attempt in self.running:
            attempt.stop()


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A checked call and the client's connection.

    Attributes:
        prompt: what is known of its prompt; an empty one where no policy needs it.
        conversation: which one it belongs to, if it says so.
        total_s: from its start to the end of its answer.
    """

    path: str
    body: Mapping[str, Any]
    headers: tuple[tuple[str, str], ...]
    mode: TransferMode
    binding: Binding
    request_id: RequestId
    receive: Receive
    send: Send
    total_s: float
    prompt: Prompt = NO_PROMPT
    conversation: str = ""
    started_s: float = field(default_factory=time.monotonic)


class Attempt:
    """One dispatch: the driver of a `Dispatch`.

    Args:
        prefill: who computes the prompt; None: the decode instance does.
        decode: the first to be asked for the answer; None: as the policy chooses, at that time.
        tried: whom this call need not be sent to any more, as they have failed; grows.
        left: ends when the client has gone.
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
        self._chosen: dict[LegName, Instance] = (
            {} if prefill is None else {LegName.PREFILL: prefill}
        )
        self._first_decode = decode
        self._tried = tried
        self._passed: set[Instance] = set()
        self._left = left
        turn = None
        self._filter = None
        if call.conversation:
            turn = services.conversations.take(call.conversation)
            services.metrics.turns.labels("none" if turn is None else "sent").inc()
            self._filter = StateFilter(self._keep_state)
        self._keeper = turn.decode if turn is not None else ""
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
        self._dispatch = Dispatch(self._call)
        self._story = DispatchStory(services.diary, services.tracing, self._call)
        self._events: asyncio.Queue[tuple[int | None, Event]] = asyncio.Queue()
        self._num_decode_legs = 0
        self._took = 0, 0.0
        self._tasks: dict[LegName, asyncio.Task[None]] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._relay = asyncio.Event()
        self._stream = EventStream(call.send, lambda: self.headers, self._filter)
        self._outcome: CallOutcome | None = None
        self._keeps_prefill = False

    @property
    def chosen(self) -> Chosen:
        """Who serves it, as far as that is decided."""
        return self._chosen

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What the client's answer tells of the dispatch."""
        return answer_headers(self._client, self._call.transfer_id, self._chosen)

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
            await self._cancel(*LegName)
            raise
        finally:
            timer.cancel()
            self._keep_prefill(False)
            for watch in self._watches:
                watch.cancel()
            self._services.running.discard(self)
            self._left.remove_done_callback(self._on_left)
        self._let_run_out()
        return self._outcome

    def stop(self) -> None:
        """The router is being shut down: end now, and tell the client."""
        self._post(RouterStopped())

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
        self._judge(event)
        self._story.happened(event)
        if isinstance(event, PrefillAnswered) and event.answer.ok:
            self._compare(event)
            self._chosen[LegName.PREFILL].work.pace.learn(*self._took)
        await self._perform(self._dispatch.handle(event))

    def _judge(self, event: Event) -> None:
        found = verdict(event)
        if found is not None and found[0] in self._chosen:
            self._chosen[found[0]].judge(found[1])

    def _compare(self, event: PrefillAnswered) -> None:
        try:
            handoff = read_handoff(event.answer.content)
        except ValueError:
            return
        self._chosen[LegName.PREFILL].check_handoff(handoff or {})

    async def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._story.happened(action)
            match action:
                case StartPrefill():
                    self._start_prefill(prefill_leg(self._call))
                case AwaitNear():
                    self._watches.append(asyncio.create_task(self._await_near()))
                case WatchDecode():
                    self._watches.append(asyncio.create_task(self._watch_decode()))
                case StartDecode(params):
                    self._start_decode(params)
                case Cancel(leg):
                    await self._cancel(leg)
                    if leg is LegName.PREFILL:
                        self._let_go()
                case Note():
                    self._note(action)
                case Reply(answer):
                    if answer.ok:
                        self._observe_first_byte()
                    content = answer.content
                    if self._filter is not None:
                        content = self._filter.whole(content)
                    await send_answer(
                        self._client.send,
                        answer.status,
                        content,
                        self.headers,
                        answer.content_type,
                    )
                case ReplyError():
                    self.failure = action
                case Relay():
                    self._keep_prefill(False)
                    self._observe_first_byte()
                    self._relay.set()
                case EndStream():
                    await self._stream.end()
                case BreakStream(kind, reason):
                    decode = self._chosen[LegName.DECODE].name
                    message = f"The decode instance {decode} {reason} in the middle of the answer."
                    await self._stream.break_off(message, kind)
                case Finish(outcome):
                    self._outcome = outcome
                    self._keep_prefill(False)

    def _keep_prefill(self, keeps: bool) -> None:
        """Whether D may still need what P has: until then P is not done, though its leg may be."""
        if keeps != self._keeps_prefill:
            self._keeps_prefill = keeps
            self._chosen[LegName.PREFILL].work.num_kept += 1 if keeps else -1

    def _start_prefill(self, leg: Leg) -> None:
        self._keep_prefill(True)
        prefill = self._chosen[LegName.PREFILL].spec
        leg = self._story.sent(LegName.PREFILL, prefill.url, leg)
        url = prefill.url + self._client.path
        upstream = self._services.upstream
        self._start(LegName.PREFILL, lambda: upstream.prefill(url, leg, self._post))

    async def _await_near(self) -> None:
        """Wait out the estimate, then ask P, if it tells, until it is nearly done."""
        prefill, lead_s = self._chosen[LegName.PREFILL], self._services.config.timeouts.near_lead_s
        work = prefill.work
        # Our own leg has begun by the time this runs, and is part of what is ahead.
        await asyncio.sleep(bind_after_s(work.pace.expected_s(work.backlog), lead_s))
        while (progress := await prefill.progress(self._call.transfer_id)) is not None:
            left_s = work.pace.expected_s(progress.left * self._client.prompt.num_parts)
            wait_s = look_again_s(left_s, lead_s)
            if wait_s is None:
                break
            await asyncio.sleep(wait_s)
        self._post(PrefillNear())

    async def _watch_decode(self) -> None:
        """D has all it needs: if it does not begin, somebody else might, sooner."""
        await asyncio.sleep(self._services.config.timeouts.stall_s)
        current = self._chosen.get(LegName.DECODE)
        other = self._next_decode({*self._tried, *self._passed, *([current] if current else [])})
        if current and other and other.work.num_requests < current.work.num_requests:
            self._post(DecodeStalled())

    def _next_decode(self, tried: Collection[Instance]) -> Instance | None:
        call, side = self._client, self._services.sides[LegName.DECODE]
        mode = None if self._call.is_alone else call.mode
        return side.pick(mode, tried, call.prompt, call.conversation, self._keeper)

    def _start_decode(self, params: Params) -> None:
        call = self._client
        if LegName.DECODE in self._chosen:
            self._passed.add(self._chosen[LegName.DECODE])
        decode, self._first_decode = self._first_decode, None
        decode = decode or self._next_decode(self._tried | self._passed)
        if decode is None:
            reason = f"takes part in {call.mode}, is not drained, and was not tried already"
            self._post(LegLost(LegName.DECODE, FailureKind.NO_INSTANCE, reason))
            return
        self._chosen[LegName.DECODE] = decode
        self._num_decode_legs += 1
        post = partial(self._post, decode_leg=self._num_decode_legs)
        leg = decode_leg(self._call, params, decode.spec.dp_rank)
        leg = self._story.sent(LegName.DECODE, decode.spec.url, leg)
        url = decode.spec.url + call.path
        upstream = self._services.upstream
        self._start(
            LegName.DECODE,
            lambda: upstream.decode(url, leg, post, self._relay, self._stream),
        )

    def _start(self, leg: LegName, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        # Not yet the coroutine itself: a leg that is cancelled before its task begins, as when the
        # client leaves in that moment, would leave it behind, never awaited.
        self._tasks[leg] = asyncio.create_task(self._timed(leg, self._chosen[leg], send))

    async def _timed(
        self, leg: LegName, instance: Instance, send: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        missing = instance.begin(self._client.prompt)
        ahead = instance.work.backlog
        began_s = time.monotonic()
        try:
            await send()
        finally:
            instance.end(missing)
            seconds = time.monotonic() - began_s
            if leg is LegName.PREFILL:
                self._took = ahead, seconds
            self._services.metrics.leg_seconds.labels(leg, self._call.mode).observe(seconds)

    async def _cancel(self, *legs: LegName) -> None:
        tasks = [self._tasks[leg] for leg in legs if leg in self._tasks]
        for task in tasks:
            task.cancel()
        # Only when a task has ended is its connection closed, and nothing more relayed by it.
        await asyncio.gather(*tasks, return_exceptions=True)

    def _let_go(self) -> None:
        """P may have computed the prompt, and D not heard of it: then no one else will tell P."""
        prefill, name = self._chosen.get(LegName.PREFILL), self._call.transfer_id
        if prefill is None or LegName.PREFILL not in self._tasks or prefill.info is None:
            # Never asked, or not one of ours: there the lease has to do.
            return
        url = f"{prefill.spec.url}/kvcourier/transfers/{name}"
        self._in_background(self._services.upstream.let_go(url, self._call.headers))

    def _note(self, note: Note) -> None:
        self._services.metrics.failures.labels(note.leg, note.kind).inc()
        if note.rebound:
            self._services.metrics.rebinds.labels(note.kind).inc()
        instance = self._chosen.get(note.leg)
        _log.warning(
            "request %s, transfer %s: %s %s",
            self._call.request_id,
            self._call.transfer_id,
            subject(note.leg, note.kind, self._chosen),
            note.reason,
        )
        if instance is None:
            return
        if note.kind is not FailureKind.NO_KV:
            self._tried.add(instance)
        if note.kind in RETRYABLE:
            instance.lost()
        elif note.kind is FailureKind.STALE_COORDINATES:
            instance.forget()

    def _keep_state(self, params: object) -> None:
        decode = self._chosen[LegName.DECODE].name
        self._services.conversations.put(self._client.conversation, params, decode)

    def _observe_first_byte(self) -> None:
        seconds = time.monotonic() - self._client.started_s
        self._services.metrics.first_byte_seconds.labels(self._call.mode).observe(seconds)

    def _let_run_out(self) -> None:
        """D has all it needs, but P has not answered yet: closing now would look like an abort."""
        task = self._tasks.get(LegName.PREFILL)
        if task is None or (task.done() and self._events.empty()):
            return
        self._in_background(self._run_out(task))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._services.background.add(task)
        task.add_done_callback(self._services.background.discard)

    async def _run_out(self, prefill: asyncio.Task[None]) -> None:
        try:
            await asyncio.gather(prefill, return_exceptions=True)
        except asyncio.CancelledError:
            await self._cancel(LegName.PREFILL)
            raise
        while not self._events.empty():
            await self._step()


def subject(leg: LegName, kind: FailureKind, chosen: Chosen) -> str:
    """Who failed, to begin a sentence with."""
    if kind is FailureKind.NO_INSTANCE or leg not in chosen:
        return f"no {leg} instance"
    return f"the {leg} instance {chosen[leg].name}"


def answer_headers(
    call: ClientCall, transfer_id: TransferId | None, chosen: Chosen
) -> tuple[tuple[str, str], ...]:
    """What every answer tells of the call, and of its dispatch where there was one."""
    headers = [
        ("x-request-id", str(call.request_id)),
        (MODE_HEADER, str(call.mode)),
        (BINDING_HEADER, str(call.binding)),
    ]
    if transfer_id is not None:
        headers.append(("x-kv-transfer-id", transfer_id))
    headers += [(f"x-kv-{leg}", chosen[leg].name) for leg in LegName if leg in chosen]
    return tuple(headers)
