"""A model of an engine on virtual time: its calls to the endpoint and what it makes of reports.

Decides what happens to a request between submission and its last event, as `engine.engine` and a
vLLM scheduler do. Refuses to know how KV travels. It computes real bytes, and reads all KV of a
sequence before it says a token, so wrong bytes cannot stay unseen.
"""

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcourier.config import Granularity
from kvcourier.core.histories import Miss, usable_tokens
from kvcourier.core.outcomes import Outcome, Report
from kvcourier.core.params import History, HoldIntent, Intent, PullIntent
from kvcourier.core.token_proof import LEAST_STEP, prove
from kvcourier.errors import ParamsError
from kvcourier.ids import RequestId, fetched_as, kept_as, owner_of
from kvcourier.layout import TokenSpan
from kvcourier.runtime.endpoint import KvEndpoint
from kvcourier.runtime.interface import let_holder_go
from kvcourier.sim.content import next_token, prefix_hashes
from kvcourier.sim.invariants import Violation
from kvcourier.sim.memory import Memory
from kvcourier.sim.scheduler import Admitted, Chunk, Phase, SimScheduler, SimSequence
from kvcourier.sim.timeline import Timeline

VOCAB_SIZE = 50


class LoadPolicy(enum.StrEnum):
    """What D does with a request whose KV does not come; vLLM's `kv_load_failure_policy`."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine works.

    Attributes:
        step_s: duration of a step without its tokens.
        token_s: what each token of a step adds.
        device_lag_s: after which the KV of a step that is over is there, as on a GPU that still
            computes; 0: at once.
        keep_s: how long an answer's KV is kept for the next turn; 0: not at all.
    """

    max_batch_tokens: int = 16
    step_s: float = 0.004
    token_s: float = 0.0005
    device_lag_s: float = 0.0
    granularity: Granularity = Granularity.CHUNK
    load_policy: LoadPolicy = LoadPolicy.FAIL
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The last an engine says of a request; `error` is empty if it went well."""

    request_id: str
    tokens: tuple[int, ...] = ()
    params: Mapping[str, Any] | None = None
    error: str = ""


@dataclass(slots=True)
class _Live:
    sequence: SimSequence
    on_end: Callable[[Answer], None]
    on_token: Callable[[], None]
    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    keeps: bool = False


class SimEngine:
    """One life of an engine.

    Args:
        on_report: shown every report of the endpoint.
        wake_couriers: has them look whether what they wait for is computed.
    """

    def __init__(
        self,
        timeline: Timeline,
        endpoint: KvEndpoint,
        memory: Memory,
        scheduler: SimScheduler,
        settings: EngineSettings,
        on_report: Callable[[Report], None],
        wake_couriers: Callable[[], None],
    ) -> None:
        self.scheduler = scheduler
        self.is_stopped = False
        self.is_stalled = False
        self.grants: dict[str, dict[int, int]] = {}
        """For each request that was received for: its blocks, and `changes` of each by then."""
        self.misses: Counter[Miss] = Counter()
        self.num_fetched = 0
        self._timeline = timeline
        self._endpoint = endpoint
        self._memory = memory
        self._settings = settings
        self._on_report = on_report
        self._wake_couriers = wake_couriers
        self._live: dict[str, _Live] = {}
        self._num_arrived = 0
        self._is_stepping = False
        self._is_woken = False
        self._preempts_next = False
        self._aborts: list[str] = []
        self._has_reports = False

    @property
    def num_live(self) -> int:
        """Requests that have not had their answer."""
        return len(self._live)

    def sequence(self, request_id: str) -> SimSequence | None:
        """A request that is not over."""
        live = self._live.get(request_id)
        return live.sequence if live else None

    # From outside.

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        intent: Intent | None,
        on_end: Callable[[Answer], None],
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a request. Raises ParamsError if its endpoint refuses it."""
        sequence = SimSequence(
            request_id,
            self._num_arrived,
            len(prompt),
            prefix_hashes(prompt),
            max_tokens,
            is_remote=intent is not None and not isinstance(intent, HoldIntent),
            is_ready=isinstance(intent, PullIntent),
            is_held=isinstance(intent, HoldIntent),
            owes_endpoint=intent is not None,
        )
        if isinstance(intent, HoldIntent):
            self._endpoint.begin_hold(RequestId(request_id), intent)
            if intent.history is not None:
                self._expect_history(sequence, prompt, intent.history)
        elif intent is not None:
            self._endpoint.expect(RequestId(request_id), intent)
            sequence.num_remote, sequence.remote_name = len(prompt), request_id
        self._num_arrived += 1
        keeps = intent is not None and not isinstance(intent, HoldIntent) and intent.keeps
        keeps = keeps and self._settings.keep_s > 0
        self._live[request_id] = _Live(sequence, on_end, on_token, tuple(prompt), keeps=keeps)
        self.scheduler.add(sequence)
        self.wake()

    def _expect_history(
        self, sequence: SimSequence, prompt: Sequence[int], history: History
    ) -> None:
        """Of what earlier turns left elsewhere, fetch what the prompt begins with."""
        name = fetched_as(RequestId(sequence.request_id))
        usable = usable_tokens(history, prompt, LEAST_STEP)
        if isinstance(usable, Miss):
            self.misses[usable] += 1
            if history.is_proven:
                let_holder_go(self._endpoint, name, history.source)
            return
        self._endpoint.expect(name, history.source)
        sequence.is_remote = sequence.is_ready = True
        sequence.num_remote, sequence.remote_name = usable, name

    def refuse(self, request_id: str, intent: Intent | None) -> None:
        """Its HTTP layer takes no such request: whoever holds its KV may let go."""
        if intent is not None and not isinstance(intent, HoldIntent):
            let_holder_go(self._endpoint, RequestId(request_id), intent)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; unknown ones are fine."""
        self._aborts.append(request_id)
        self.wake()

    def preempt(self) -> None:
        """Take the youngest running sequence's blocks away; if none runs, in the middle of the next
        step that goes on with one."""
        self._preempts_next = not self.scheduler.running
        if self.scheduler.running:
            self.scheduler.preempt(max(self.scheduler.running, key=lambda each: each.arrival))
            self._roll_back()
            self.wake()

    def calm(self) -> None:
        """Nobody is preempted any more for want of another reason."""
        self._preempts_next = False

    def report_ready(self) -> None:
        """The endpoint has something to tell."""
        self._has_reports = True
        self.wake()

    def wake(self) -> None:
        """Something has changed: look again, once the running step is over."""
        if not (self._is_woken or self._is_stepping or self.is_stopped):
            self._is_woken = True
            self._timeline.after(0.0, self._begin_step)

    # Steps.

    def _begin_step(self) -> None:
        self._is_woken = False
        if self.is_stopped or self.is_stalled or self._is_stepping:
            return
        aborts, self._aborts = self._aborts, []
        for request_id in aborts:
            live = self._live.get(request_id)
            if live is not None:
                self._end(live, error="aborted")
        self._take_reports()
        for admitted in self.scheduler.admit():
            self._receive(admitted)
        chunks = self.scheduler.schedule()
        for sequence in self.scheduler.recalls():
            self._endpoint.recall(RequestId(sequence.request_id))
        self._roll_back()
        self._give_up()
        if not chunks:
            return
        self._is_stepping = True
        preempted = [chunk.sequence.num_preempted for chunk in chunks]
        seconds = self._settings.step_s + self._settings.token_s * sum(
            chunk.stop - chunk.start for chunk in chunks
        )
        for chunk in chunks:
            self._tell(chunk.sequence, chunk.start)
        if self._preempts_next and any(chunk.start for chunk in chunks):
            self._timeline.after(0.7 * seconds, self.preempt)
        if self._settings.granularity is Granularity.LAYER:
            self._timeline.after(seconds / 2, lambda: self._halfway(chunks, preempted))
        self._timeline.after(seconds, lambda: self._end_step(chunks, preempted))

    def _halfway(self, chunks: Sequence[Chunk], preempted: Sequence[int]) -> None:
        """Half the layers of the step are computed."""
        if self.is_stopped or self.is_stalled:
            return
        layers = self._memory.shape.num_layers // 2
        for chunk in self._standing(chunks, preempted):
            sequence = chunk.sequence
            is_awaited = self._endpoint.is_awaited(RequestId(sequence.request_id))
            if is_awaited and chunk.stop == sequence.num_prompt and layers:
                self._write(chunk, layers)
                sequence.num_told = max(sequence.num_told, 1)
                self._endpoint.advance_prefill(
                    RequestId(sequence.request_id),
                    [self._blocks(sequence, chunk.stop)],
                    chunk.stop,
                    range(layers),
                    ready=self._written(),
                )

    def _end_step(self, chunks: Sequence[Chunk], preempted: Sequence[int]) -> None:
        if self.is_stalled and not self.is_stopped:
            self._timeline.after(0.01, lambda: self._end_step(chunks, preempted))
            return
        self._is_stepping = False
        if self.is_stopped:
            return
        for chunk in self._standing(chunks, preempted):
            self._write(chunk)
            self.scheduler.computed(chunk)
            if chunk.completes:
                self._say_token(self._live[chunk.sequence.request_id])
            else:
                self._tell(chunk.sequence, chunk.stop)
        self.wake()

    def _standing(self, chunks: Sequence[Chunk], preempted: Sequence[int]) -> list[Chunk]:
        """Those whose sequence has not lost its blocks since the step began."""
        return [
            chunk
            for chunk, before in zip(chunks, preempted, strict=True)
            if chunk.sequence.phase is Phase.RUNNING and chunk.sequence.num_preempted == before
        ]

    def _write(self, chunk: Chunk, layers: int | None = None) -> None:
        span = TokenSpan(chunk.start, chunk.stop)
        self._memory.write(chunk.sequence.hashes, chunk.sequence.blocks, span, layers)

    def _say_token(self, live: _Live) -> None:
        sequence = live.sequence
        self._read(sequence, TokenSpan(0, len(sequence.hashes)))
        token = next_token(sequence.hashes[-1], VOCAB_SIZE)
        live.tokens.append(token)
        sequence.append(token)
        live.on_token()
        if sequence.num_generated == sequence.max_tokens:
            self._end(live)

    def _read(self, sequence: SimSequence, span: TokenSpan) -> None:
        wrong = self._memory.wrong(sequence.hashes, sequence.blocks, span)
        if wrong:
            raise Violation(f"{sequence.request_id} reads KV that is not its own: {wrong[:3]}")

    # The endpoint.

    def _tell(self, sequence: SimSequence, num_computed: int) -> None:
        """P: so much of a prompt is computed that somebody may wait for."""
        if not sequence.is_held or self._settings.granularity is Granularity.REQUEST:
            return
        num_tokens = min(num_computed, sequence.num_prompt)
        if num_tokens > sequence.num_told:
            sequence.num_told = num_tokens
            self._endpoint.advance_prefill(
                RequestId(sequence.request_id),
                [self._blocks(sequence, num_tokens)],
                num_tokens,
                ready=self._written(),
            )

    def _written(self) -> Callable[[], bool] | None:
        """Whether the device has computed what it was given so far; None where it has."""
        lag_s = self._settings.device_lag_s
        if not lag_s:
            return None
        at = self._timeline.now + lag_s
        self._timeline.at(at, self._wake_couriers)
        return lambda: self._timeline.now >= at

    def _roll_back(self) -> None:
        for sequence in self.scheduler.take_preempted():
            if sequence.num_told:
                sequence.num_told = 0
                self._endpoint.roll_back(RequestId(sequence.request_id))

    def _give_up(self) -> None:
        """Somebody is short of blocks: take the oldest back of what is kept."""
        if self.scheduler.is_short and self.scheduler.kept:
            name = next(iter(self.scheduler.kept))
            del self.scheduler.kept[name]
            self._endpoint.abort(RequestId(name))
        self.scheduler.is_short = False

    def _receive(self, admitted: Admitted) -> None:
        sequence = admitted.sequence
        request_id = RequestId(sequence.remote_name)
        if not admitted.blocks:
            self._is_settled(sequence)
            self._endpoint.decline(request_id)
            return
        changes = self.scheduler.pool.changes
        self.grants[request_id] = {block: changes[block] for block in admitted.blocks}
        self._endpoint.receive(request_id, [list(admitted.blocks)], admitted.span)

    def _take_reports(self) -> None:
        if not self._has_reports:
            return
        self._has_reports = False
        reports = self._endpoint.poll()
        # Of one batch, what happened comes before what it releases.
        for report in sorted(reports, key=lambda each: each.outcome is Outcome.RELEASED):
            self._on_report(report)
            self._take_report(report)

    def _take_report(self, report: Report) -> None:
        live = self._live.get(owner_of(report.request_id))
        receiving = (
            live is not None
            and live.sequence.phase is Phase.RECEIVING
            and live.sequence.remote_name == report.request_id
        )
        if report.outcome is Outcome.HELD:
            if live is not None:
                live.sequence.is_ready = True
        elif report.outcome is Outcome.RECALLED:
            if live is not None and receiving:
                self.scheduler.recalled(live.sequence)
            elif not self.scheduler.take_back(report.request_id):
                raise Violation(f"{report.request_id} is recalled, and nothing of it is on loan")
        elif report.outcome is Outcome.RELEASED:
            self._take_released(report, live if receiving else None)
        elif live is None or not receiving:
            return
        elif report.outcome is Outcome.RECEIVED:
            live.sequence.has_received = True
        elif report.outcome is Outcome.RECEIVE_FAILED:
            self._is_settled(live.sequence)
            if live.sequence.is_held:
                self.misses[Miss(report.cause.value) if report.cause else Miss.FAILED] += 1
            if live.sequence.is_held or self._settings.load_policy is LoadPolicy.RECOMPUTE:
                self.scheduler.compute_instead(live.sequence)
            else:
                self._end(live, error=f"KV not received: {report.reason}")

    def _take_released(self, report: Report, receiving: _Live | None) -> None:
        if receiving is not None and receiving.sequence.has_received:
            sequence = receiving.sequence
            self._is_settled(sequence)
            self.num_fetched += sequence.is_held
            self.scheduler.received(sequence)
            self._read(sequence, TokenSpan(0, sequence.num_computed))
        elif not self.scheduler.take_back(report.request_id):
            raise Violation(f"{report.request_id} is released, and nothing of it is on loan")
        elif receiving is not None:
            raise Violation(f"{report.request_id} is released before it is received or failed")

    def _is_settled(self, sequence: SimSequence) -> None:
        """The endpoint is owed nothing any more of what was to come for it."""
        if not sequence.is_held:
            sequence.owes_endpoint = False

    def _keep(self, live: _Live) -> Mapping[str, Any]:
        """D: an answer's KV is kept for the next turn, all but the last token's."""
        sequence = live.sequence
        num_tokens = len(sequence.hashes) - 1
        proof = prove([*live.prompt, *live.tokens][:num_tokens])
        name = kept_as(RequestId(sequence.request_id))
        num_blocks = len(self._blocks(sequence, num_tokens))
        kept = self.scheduler.keep(sequence, name, num_blocks)
        keep_s = self._settings.keep_s
        return self._endpoint.keep_history(name, [kept], num_tokens, keep_s, proof)

    def _end(self, live: _Live, *, error: str = "") -> None:
        """Give a request its answer and its blocks a new owner."""
        sequence = live.sequence
        request_id = RequestId(sequence.request_id)
        del self._live[request_id]
        params: Mapping[str, Any] | None = None
        if sequence.is_held and sequence.is_remote:
            self._endpoint.abort(RequestId(sequence.remote_name))
        if sequence.is_held and not error:
            num_blocks = len(self._blocks(sequence, sequence.num_prompt))
            lent = self.scheduler.lend(sequence, num_blocks)
            params = self._endpoint.finish_prefill(request_id, [lent], sequence.num_prompt)
            sequence.owes_endpoint = False
        elif sequence.owes_endpoint:
            kept = None
            if sequence.num_told and sequence.blocks:
                # Some of it may be on its way: out of use until the endpoint releases it.
                kept = [self.scheduler.lend(sequence, len(sequence.blocks))]
            self.scheduler.remove(sequence)
            self._endpoint.abort(request_id, kept)
        elif live.keeps and not error:
            params = self._keep(live)
        self.scheduler.remove(sequence)
        live.on_end(Answer(request_id, tuple(live.tokens), params, error))

    def _blocks(self, sequence: SimSequence, num_tokens: int) -> list[int]:
        return sequence.blocks[: -(-num_tokens // self._memory.shape.block_size)]


def refusal(error: ParamsError) -> str:
    """What a client reads of a request that was not taken."""
    return f"400: {error}"
