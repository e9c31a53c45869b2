"""The engine: requests in, tokens out, KV handed to and taken from an endpoint.

Decides what happens to a request between submission and its last event. Refuses to know HTTP, how
models compute, and how KV travels. All state but the inbox belongs to one thread, which sleeps
until a client or a courier wakes it, and never waits for the network.
"""

import logging
import threading
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from kvcourier.core.outcomes import Cause
from kvcourier.core.params import HoldIntent, PullIntent, PushIntent
from kvcourier.engine.admission import RequestLimits
from kvcourier.engine.api import (
    FinishReason,
    GenerationRequest,
    ModelInfo,
    RequestRejected,
    TokenEvent,
)
from kvcourier.engine.blocks import BlockPool
from kvcourier.engine.config import EngineConfig, make_cache
from kvcourier.engine.first_token import pack_first_token, unpack_first_token
from kvcourier.engine.kv_cache import KVCache
from kvcourier.engine.models import LoadedModel
from kvcourier.engine.runner import ModelRunner
from kvcourier.engine.sampler import TokenSampler, sample
from kvcourier.engine.scheduler import Phase, Remote, Scheduler, Sequence, Work
from kvcourier.engine.streaming import PromptStreams
from kvcourier.engine.turns import Turns
from kvcourier.errors import KVCourierError, ParamsError
from kvcourier.ids import BlockId, RequestId, TransferId, fetched_as, kept_as, owner_of
from kvcourier.runtime.interface import Endpoint, let_holder_go
from kvcourier.runtime.reports import Outcome, Report

logger = logging.getLogger(__name__)


class EngineStopped(KVCourierError):
    """The engine was closed, or its thread died: HTTP 503."""


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has not had its last event.

    `owed`: names by which the endpoint knows it and is owed a hand-over, a decline or an abort.
    `received`: the endpoint's report that its KV is complete.
    `was_scheduled`: it has been part of a step.
    """

    request: GenerationRequest
    sequence: Sequence
    sampler: TokenSampler
    owed: set[RequestId]
    received: Report | None = None
    was_scheduled: bool = False

    def awaits(self, name: RequestId) -> bool:
        """Whether its blocks are on loan under this name, to be filled."""
        remote = self.sequence.remote
        is_receiving = self.sequence.phase is Phase.RECEIVING
        return is_receiving and remote is not None and remote.name == name


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: RequestId


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    kv_received: int = 0
    kv_receive_failures: int = 0
    kv_declined: int = 0
    first_tokens_seeded: int = 0
    kv_sent: int = 0
    kv_send_failures: int = 0
    ignored_reports: int = 0


class Engine:
    """Serves one model. Make it, `start` it, `submit` requests, `close` it."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        endpoint: Endpoint | None = None,
        *,
        cache: KVCache | None = None,
    ) -> None:
        """Prepare an engine; nothing runs yet.

        Args:
            endpoint: moves KV to and from other instances; started and closed by the engine.
            cache: the cache that the endpoint has registered, from `make_cache`; a new one if
                None.

        Raises:
            ConfigError: a setting does not fit the model.
        """
        self.info = ModelInfo(
            name=model.name,
            vocab_size=model.vocab_size,
            max_model_len=config.model_len(model),
            eos_token_ids=model.eos_token_ids,
        )
        self.cache = make_cache(model, config) if cache is None else cache
        self._config = config
        self._endpoint = endpoint
        self._runner = ModelRunner(model, self.cache)
        self._pool = BlockPool(self.cache.num_blocks, config.fragment)
        self._scheduler = Scheduler(
            self._pool,
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._limits = RequestLimits(
            self.info, self.cache.num_blocks, config.block_size, endpoint is not None
        )
        self._counters = _Counters()
        self._streams = None
        self._turns = None
        if endpoint is not None:
            self._turns = Turns(config, self._scheduler, endpoint)
            self._streams = PromptStreams(
                endpoint, config.granularity, self.cache.stage_geometries, model.device
            )
        self._live: dict[RequestId, _Live] = {}
        self._num_arrived = 0
        self._thread = threading.Thread(target=self._run, name="kvcourier-engine", daemon=True)
        # Shared with other threads, under this condition:
        self._wake = threading.Condition()
        self._inbox: list[_Live | _Abort] = []
        self._used_ids: set[RequestId] = set()
        self._has_reports = False
        self._is_stopping = False
        self._stopped_because: str | None = "it was not started"

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self._stopped_because is None

    @property
    def error(self) -> str | None:
        """Why the engine does not serve requests; None while it does."""
        return self._stopped_because

    def start(self) -> None:
        """Start the endpoint and the engine's thread. Raises ConfigError as the endpoint does."""
        if self._endpoint is not None:
            self._endpoint.start(self._on_report_ready)
        with self._wake:
            self._stopped_because = None
        self._thread.start()

    def close(self) -> None:
        """End all requests with ABORT, stop the thread, close the endpoint; idempotent.

        Blocks until the step that is running has ended.
        """
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        if self._endpoint is not None:
            self._endpoint.close()

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request; events follow on the engine's thread, the last one always comes.

        Thread-safe, does not wait for the engine.

        Raises:
            RequestRejected: it can never be served, or its id is in use; nothing was kept.
            ParamsError: its endpoint refuses the transfer it takes part in; nothing was kept.
            EngineStopped: the engine is not running.
        """
        request_id, intent = request.request_id, request.intent
        with self._wake:
            if self._stopped_because is not None or self._is_stopping:
                raise EngineStopped(f"the engine has stopped: {self._stopped_because or 'closing'}")
            if request_id in self._used_ids:
                raise RequestRejected(f"request_id: {request_id!r} is in use; send a new one")
            self._used_ids.add(request_id)
        try:
            self._limits.check(request)
            remote = self._announce(request)
        except BaseException as error:
            refused = isinstance(error, RequestRejected | ParamsError)
            if refused and self._endpoint and isinstance(intent, PullIntent | PushIntent):
                let_holder_go(self._endpoint, request_id, intent)
            self._forget_id(request_id)
            raise
        sequence = Sequence(request_id, 0, list(request.prompt_token_ids), remote)
        sequence.is_held = not isinstance(intent, PushIntent)
        sampler = TokenSampler(request.sampling, self.info.eos_token_ids)
        owed = {request_id} if intent is not None else set()
        if remote is not None:
            owed.add(remote.name)
        live = _Live(request, sequence, sampler, owed)
        with self._wake:
            stopped_because = self._stopped_because
            if stopped_because is None:
                self._inbox.append(live)
                self._wake.notify()
        if stopped_because is not None:  # meanwhile
            if self._endpoint is not None:
                for name in owed:
                    self._endpoint.abort(name)
            self._forget_id(request_id)
            raise EngineStopped(f"the engine has stopped: {stopped_because}")

    def abort(self, request_id: RequestId) -> None:
        """End a request with an ABORT event; unknown and finished ones are ignored. Thread-safe."""
        with self._wake:
            self._inbox.append(_Abort(request_id))
            self._wake.notify()

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters, read without stopping the engine."""
        scheduler, pool = self._scheduler, self._pool
        # What is kept for a later turn is given up as soon as somebody needs it.
        kept = [block for name in list(scheduler.kept) for block in scheduler.loans.get(name, ())]
        used = pool.num_blocks - pool.num_free - pool.num_freed_by(kept)
        counters = {
            name: getattr(source, name)
            for source in (self._counters, scheduler.counters)
            for name in source.__slots__
        }
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(scheduler.ready),
            "waiting_remote": len(scheduler.wanting) + len(scheduler.receiving),
            "kv_blocks": pool.num_blocks,
            "kv_blocks_used": used,
            "kv_usage": used / pool.num_blocks,
            "kv_loans": len(scheduler.loans) - len(scheduler.kept),
            **counters,
            **(self._turns.stats() if self._turns is not None else {}),
        }

    def progress(self, transfer_id: TransferId) -> tuple[int, int] | None:
        """Of the prompts that are computed for somebody under a transfer id: tokens computed, and
        all. None if there is none, or no more. Thread-safe, does not stop the engine."""
        with self._wake:
            waiting = [item for item in self._inbox if isinstance(item, _Live)]
        found = [
            (live.sequence.num_computed, len(live.request.prompt_token_ids))
            for live in (*waiting, *list(self._live.values()))
            if isinstance(live.request.intent, HoldIntent)
            and live.request.intent.transfer_id == transfer_id
        ]
        computed = sum(min(num_computed, num_prompt) for num_computed, num_prompt in found)
        return (computed, sum(num_prompt for _, num_prompt in found)) if found else None

    # --- called from other threads ---

    def _announce(self, request: GenerationRequest) -> Remote | None:
        """Tell the endpoint at once: P may be asked, and who holds KV wants a heartbeat.

        Returns what is to come from elsewhere.
        """
        request_id, intent, prompt = request.request_id, request.intent, request.prompt_token_ids
        if self._endpoint is None or self._turns is None or intent is None:
            return None
        if not isinstance(intent, HoldIntent):
            self._endpoint.expect(request_id, intent)
            return Remote(request_id, len(prompt), self._config.recompute_threshold)
        self._endpoint.begin_hold(request_id, intent)
        if intent.history is None:
            return None
        return self._turns.expect(request_id, prompt, intent.history)

    def _on_report_ready(self) -> None:
        with self._wake:
            self._has_reports = True
            self._wake.notify()

    def _forget_id(self, request_id: RequestId) -> None:
        with self._wake:
            self._used_ids.discard(request_id)

    # --- the engine's thread ---

    def _run(self) -> None:
        if self._config.num_cpu_threads:
            torch.set_num_threads(self._config.num_cpu_threads)
        reason, text = FinishReason.ABORT, "the engine was closed"
        try:
            batch: list[Work] = []
            while self._wait(is_busy=bool(batch)):
                self._take_inbox()
                self._take_reports()
                self._admit_remote()
                batch = self._scheduler.schedule()
                if self._turns is not None:
                    self._turns.give_up()
                self._recall()
                preempted = self._scheduler.take_preempted()
                if self._streams is not None:
                    self._streams.roll_back(preempted)
                if batch:
                    self._step(batch)
        except BaseException as error:
            logger.exception("the engine's thread died")
            reason, text = FinishReason.ERROR, f"the engine failed: {error!r}"
        finally:
            with self._wake:
                self._stopped_because = text
            self._end_all(reason, text)

    def _wait(self, *, is_busy: bool) -> bool:
        """Sleep while there is nothing to do; False once the engine is to stop."""
        with self._wake:
            while not (is_busy or self._inbox or self._has_reports or self._is_stopping):
                self._wake.wait()
            return not self._is_stopping

    def _take_inbox(self) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, _Live):
                self._num_arrived += 1
                item.sequence.arrival = self._num_arrived
                self._live[item.request.request_id] = item
                self._scheduler.add(item.sequence)
                if self._streams is not None and isinstance(item.request.intent, HoldIntent):
                    self._streams.begin(item.request.request_id, len(item.sequence.tokens))
            elif (live := self._live.get(item.request_id)) is not None:
                self._end(live, FinishReason.ABORT)

    def _take_reports(self) -> None:
        with self._wake:
            has_reports, self._has_reports = self._has_reports, False
        if self._endpoint is None or not has_reports:
            return
        # Of one batch, what happened comes before what it releases.
        for report in sorted(
            self._endpoint.poll(), key=lambda report: report.outcome is Outcome.RELEASED
        ):
            self._on_report(report)

    def _on_report(self, report: Report) -> None:
        counters = self._counters
        name, live = report.request_id, self._live.get(owner_of(report.request_id))
        is_receiving = live is not None and live.awaits(name)
        match report.outcome:
            case Outcome.RELEASED:
                self._on_released(name, live)
            case Outcome.SENT | Outcome.SEND_FAILED if name == kept_as(owner_of(name)):
                assert self._turns is not None, "nothing was kept"
                self._turns.collected(report)
            case Outcome.SENT:
                counters.kv_sent += 1
            case Outcome.SEND_FAILED:
                counters.kv_send_failures += 1
            case Outcome.HELD:
                if live is not None:
                    live.sequence.is_held = True
            case Outcome.RECALLED:
                self._on_recalled(report.request_id, live if is_receiving else None)
            case Outcome.RECEIVED if live is not None and is_receiving:
                live.received = report
            case Outcome.RECEIVE_FAILED if live is not None and is_receiving:
                self._on_receive_failed(live, report.reason, report.cause)
            case _:
                counters.ignored_reports += 1

    def _on_released(self, name: RequestId, live: _Live | None) -> None:
        """Blocks come back: filled ones to their sequence, others to the pool."""
        is_receiving = live is not None and live.awaits(name)
        if live is not None and is_receiving and live.received is not None:
            self._on_received(live, live.received)
        elif not self._scheduler.take_back(name):
            self._counters.ignored_reports += 1
        elif live is None:
            self._forget_if_over(owner_of(name))
        elif is_receiving:
            self._on_receive_failed(live, "its blocks were released before it came")

    def _on_recalled(self, request_id: RequestId, live: _Live | None) -> None:
        """A request has lent its blocks for others, unless it has ended meanwhile."""
        if live is not None:
            self._scheduler.recalled(live.sequence)
        elif self._scheduler.take_back(request_id):
            self._forget_if_over(owner_of(request_id))

    def _on_received(self, live: _Live, report: Report) -> None:
        """Its KV is complete and its blocks are its own: it goes on with the first or, where that
        is known, with the second token."""
        live.owed.discard(report.request_id)
        if self._turns is not None and isinstance(live.request.intent, HoldIntent):
            self._scheduler.received(live.sequence)
            self._turns.fetched(live.sequence)
            return
        self._counters.kv_received += 1
        token = None
        if self._config.first_token_seeding and report.continuation is not None:
            prompt, vocab_size = live.request.prompt_token_ids, self.info.vocab_size
            token = unpack_first_token(report.continuation, prompt, live.sampler, vocab_size)
        self._scheduler.received(live.sequence, next_is_known=token is not None)
        if token is not None:
            self._counters.first_tokens_seeded += 1
            live.sampler.num_sampled += 1
            self._on_token(live, token)

    def _on_receive_failed(self, live: _Live, reason: str, cause: Cause | None = None) -> None:
        assert live.sequence.remote is not None, "nothing was to come for it"
        live.owed.discard(live.sequence.remote.name)
        if self._turns is not None and isinstance(live.request.intent, HoldIntent):
            self._turns.lost(live.request.request_id, reason, cause)
            self._scheduler.compute_instead(live.sequence)
            return
        self._counters.kv_receive_failures += 1
        logger.warning("request %s: KV not received: %s", live.request.request_id, reason)
        if self._config.kv_load_failure_policy == "recompute":
            self._scheduler.compute_instead(live.sequence)
        else:
            self._end(live, FinishReason.ERROR, error=f"the prompt's KV did not come: {reason}")

    def _admit_remote(self) -> None:
        for admission in self._scheduler.admit_remote():
            assert self._endpoint is not None, "requests with an intent need an endpoint"
            name, live = admission.name, self._live[admission.sequence.request_id]
            try:
                if admission.blocks:
                    self._endpoint.receive(name, [admission.blocks], admission.span)
                else:
                    live.owed.discard(name)
                    self._count_declined(live)
                    self._endpoint.decline(name)
            except Exception as error:
                logger.exception("request %s: the endpoint refused it", name)
                self._scheduler.take_back(name)  # it raised, so nothing was handed over
                self._end(live, FinishReason.ERROR, error=f"the KV endpoint failed: {error}")

    def _count_declined(self, live: _Live) -> None:
        if self._turns is not None and isinstance(live.request.intent, HoldIntent):
            self._turns.declined()
        else:
            self._counters.kv_declined += 1

    def _recall(self) -> None:
        """Who needs nothing but blocks does not wait for prompts that may never be begun."""
        for sequence in self._scheduler.take_recalls():
            assert self._endpoint is not None, "requests with an intent need an endpoint"
            assert sequence.remote is not None, "nothing is to come for it"
            self._endpoint.recall(sequence.remote.name)

    def _step(self, batch: SequenceOf[Work]) -> None:
        self._tell_scheduled(batch)
        completing = [self._live[w.sequence.request_id] for w in batch if w.completes]
        try:
            on_layer = self._streams.before(batch) if self._streams is not None else None
            logits = self._runner.run(batch, on_layer)
            tokens = sample(logits, [live.sampler for live in completing])
        except Exception as error:
            logger.exception("a step of %d requests failed", len(batch))
            for work in batch:
                live = self._live[work.sequence.request_id]
                self._end(live, FinishReason.ERROR, error=f"the engine's step failed: {error!r}")
            return
        self._counters.steps += 1
        for work in batch:
            num_prompt = len(self._live[work.sequence.request_id].request.prompt_token_ids)
            self._counters.prompt_tokens += min(work.count, max(0, num_prompt - work.start))
            self._scheduler.computed(work)
        for live, token in zip(completing, tokens, strict=True):
            self._on_token(live, token)
        if self._streams is not None:
            self._streams.after([w for w in batch if w.sequence.request_id in self._live])

    def _tell_scheduled(self, batch: SequenceOf[Work]) -> None:
        for work in batch:
            live = self._live[work.sequence.request_id]
            if not live.was_scheduled:
                live.was_scheduled = True
                live.request.on_scheduled()

    def _on_token(self, live: _Live, token: int) -> None:
        sequence, sampler = live.sequence, live.sampler
        sequence.tokens.append(token)
        self._counters.generated_tokens += 1
        if token in sampler.stop_token_ids:
            self._end(live, FinishReason.STOP, token)
        elif (
            sampler.num_sampled >= live.request.sampling.max_tokens
            or len(sequence.tokens) >= self._limits.max_tokens
        ):
            self._end(live, FinishReason.LENGTH, token)
        else:
            self._emit(live, (token,))

    def _end(
        self, live: _Live, reason: FinishReason, token: int | None = None, *, error: str = ""
    ) -> None:
        """Give a request its last event and its blocks a new owner."""
        request_id = live.request.request_id
        del self._live[request_id]
        params = None
        may_be_read = self._streams is not None and self._streams.end(request_id)
        if self._turns is not None and token is not None:
            try:
                if isinstance(live.request.intent, HoldIntent):
                    params = self._hand_over(live)
                else:
                    params = self._turns.keep(live.request.intent, live.sequence)
            except Exception as failure:
                logger.exception("request %s: its KV could not be handed over", request_id)
                if not may_be_read:
                    self._scheduler.take_back(request_id)
                reason, error = FinishReason.ERROR, f"the KV endpoint failed: {failure}"
        is_owed = request_id in live.owed
        unfinished = self._keep_for_readers(live) if is_owed and may_be_read else None
        self._scheduler.remove(live.sequence)
        self._abort(live, unfinished)
        self._counters.finished_requests += 1
        self._forget_if_over(request_id)
        tokens = () if token is None else (token,)
        self._emit(live, tokens, reason, params=params, error=error)

    def _abort(self, live: _Live, unfinished: list[list[BlockId]] | None) -> None:
        """Tell the endpoint that nothing of a request is needed any more."""
        if self._endpoint is None:
            return
        for name in live.owed:
            is_prompt = name == live.request.request_id
            try:
                self._endpoint.abort(name, unfinished if is_prompt else None)
            except Exception:
                logger.exception("request %s: the endpoint failed to abort it", name)

    def _forget_if_over(self, request_id: RequestId) -> None:
        """The id stays in use while reports about it may come."""
        names = {request_id, fetched_as(request_id), kept_as(request_id)}
        if request_id not in self._live and self._scheduler.loans.keys().isdisjoint(names):
            self._forget_id(request_id)

    def _keep_for_readers(self, live: _Live) -> list[list[BlockId]]:
        """P: an unfinished prompt's blocks are out of use until the endpoint releases them."""
        sequence, loans = live.sequence, self._scheduler.loans
        if sequence.request_id not in loans:
            self._scheduler.lend(sequence.request_id, sequence.blocks)
            sequence.blocks = []
        return [loans[sequence.request_id]]

    def _hand_over(self, live: _Live) -> dict[str, Any]:
        """P: lend the prompt's blocks to the endpoint; those of the answer stay ours."""
        assert self._endpoint is not None, "requests with an intent need an endpoint"
        sequence, num_tokens = live.sequence, len(live.request.prompt_token_ids)
        num_blocks = -(-num_tokens // self._config.block_size)
        lent, sequence.blocks = sequence.blocks[:num_blocks], sequence.blocks[num_blocks:]
        self._scheduler.lend(sequence.request_id, lent)
        first = None
        if self._config.first_token_seeding:
            prompt = live.request.prompt_token_ids
            first = pack_first_token(sequence.tokens[num_tokens], prompt, live.sampler)
        params = self._endpoint.finish_prefill(sequence.request_id, [lent], num_tokens, first)
        live.owed.discard(sequence.request_id)
        return params

    def _emit(
        self,
        live: _Live,
        tokens: tuple[int, ...],
        reason: FinishReason | None = None,
        *,
        params: dict[str, Any] | None = None,
        error: str = "",
    ) -> None:
        event = TokenEvent(
            request_id=live.request.request_id,
            token_ids=tokens,
            finish_reason=reason,
            kv_transfer_params=params,
            error=error,
            num_cached_tokens=live.sequence.num_cached_tokens or 0,
        )
        try:
            live.request.on_event(event)
        except Exception:
            logger.exception("request %s: its listener failed", live.request.request_id)
            if reason is None:
                self.abort(live.request.request_id)

    def _end_all(self, reason: FinishReason, text: str) -> None:
        """The engine's thread has ended: nobody may be left waiting."""
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, _Live):
                self._live[item.request.request_id] = item
                self._scheduler.add(item.sequence)
        for live in list(self._live.values()):
            self._end(live, reason, error=text if reason is FinishReason.ERROR else "")
