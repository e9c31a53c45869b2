"""The engine: requests in, tokens out.

Decides what happens to a request between submission and its last event. Refuses to know HTTP, how
models compute, and how KV comes and goes (`kv_exchange`). All state but the inbox belongs to one
thread, which sleeps until a client or a courier wakes it, and never waits for the network.
"""

import logging
import threading
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from kvcourier.core.params import HoldIntent, PushIntent
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
from kvcourier.engine.inbox import EngineStopped, Inbox
from kvcourier.engine.kv_cache import KVCache
from kvcourier.engine.kv_exchange import KVCounters, KVExchange, Parting, Requests
from kvcourier.engine.live import LiveRequest
from kvcourier.engine.models import LoadedModel
from kvcourier.engine.runner import ModelRunner
from kvcourier.engine.sampler import TokenSampler, sample
from kvcourier.engine.scheduler import Scheduler, Sequence, Work
from kvcourier.errors import ParamsError
from kvcourier.ids import RequestId, TransferId, fetched_as, kept_as
from kvcourier.runtime.interface import Endpoint

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0


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
        self._live: dict[RequestId, LiveRequest] = {}
        self._inbox = Inbox()
        self._kv = None
        if endpoint is not None:
            requests = Requests(self._live, self._on_token, self._fail, self._forget_if_over)
            self._kv = KVExchange(endpoint, config, self._scheduler, model, self.cache, requests)
        self._kv_counters = KVCounters() if self._kv is None else self._kv.counters
        self._num_arrived = 0
        self._thread = threading.Thread(target=self._run, name="kvcourier-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self._inbox.closed_because is None

    @property
    def error(self) -> str | None:
        """Why the engine does not serve requests; None while it does."""
        return self._inbox.closed_because

    def start(self) -> None:
        """Start the endpoint and the engine's thread. Raises ConfigError as the endpoint does."""
        if self._endpoint is not None:
            self._endpoint.start(self._inbox.on_reports)
        self._inbox.open()
        self._thread.start()

    def close(self) -> None:
        """End all requests with ABORT, stop the thread, close the endpoint; idempotent.

        Blocks until the step that is running has ended.
        """
        self._inbox.stop()
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
        self._inbox.claim(request_id)
        try:
            self._limits.check(request)
            remote = self._kv.announce(request) if self._kv is not None else None
        except BaseException as error:
            if self._kv is not None and isinstance(error, RequestRejected | ParamsError):
                self._kv.refuse(request)
            self._inbox.free(request_id)
            raise
        sequence = Sequence(request_id, 0, list(request.prompt_token_ids), remote)
        sequence.is_held = not isinstance(intent, PushIntent)
        sampler = TokenSampler(request.sampling, self.info.eos_token_ids)
        owed = {request_id} if intent is not None else set()
        if remote is not None:
            owed.add(remote.name)
        try:
            self._inbox.put(LiveRequest(request, sequence, sampler, owed))
        except EngineStopped:  # meanwhile
            if self._kv is not None:
                self._kv.withdraw(owed)
            self._inbox.free(request_id)
            raise

    def abort(self, request_id: RequestId) -> None:
        """End a request with an ABORT event; unknown and finished ones are ignored. Thread-safe."""
        self._inbox.abort(request_id)

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters, read without stopping the engine."""
        scheduler, pool = self._scheduler, self._pool
        # What is kept for a later turn is given up as soon as somebody needs it.
        kept = scheduler.loans.kept
        num_kept_blocks = pool.num_freed_by([block for blocks in kept for block in blocks])
        used = pool.num_blocks - pool.num_free - num_kept_blocks
        counters = {
            name: getattr(source, name)
            for source in (self._counters, self._kv_counters, scheduler.counters)
            for name in source.__slots__
        }
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(scheduler.ready),
            "waiting_remote": len(scheduler.wanting) + len(scheduler.receiving),
            "kv_blocks": pool.num_blocks,
            "kv_blocks_used": used,
            "kv_usage": used / pool.num_blocks,
            "kv_loans": len(scheduler.loans) - len(kept),
            **counters,
            **(self._kv.turns.stats() if self._kv is not None else {}),
        }

    def progress(self, transfer_id: TransferId) -> tuple[int, int] | None:
        """Of the prompts that are computed for somebody under a transfer id: tokens computed, and
        all. None if there is none, or no more. Thread-safe, does not stop the engine."""
        waiting = self._inbox.waiting()
        found = [
            (live.sequence.num_computed, len(live.request.prompt_token_ids))
            for live in (*waiting, *list(self._live.values()))
            if isinstance(live.request.intent, HoldIntent)
            and live.request.intent.transfer_id == transfer_id
        ]
        computed = sum(min(num_computed, num_prompt) for num_computed, num_prompt in found)
        return (computed, sum(num_prompt for _, num_prompt in found)) if found else None

    # --- the engine's thread ---

    def _run(self) -> None:
        if self._config.num_cpu_threads:
            torch.set_num_threads(self._config.num_cpu_threads)
        reason, text = FinishReason.ABORT, "the engine was closed"
        try:
            batch: list[Work] = []
            while self._inbox.wait(is_busy=bool(batch)):
                self._take_inbox()
                if self._kv is not None:
                    if self._inbox.take_has_reports():
                        self._kv.take_reports()
                    self._kv.admit()
                batch = self._scheduler.schedule()
                preempted = self._scheduler.take_preempted()
                if self._kv is not None:
                    self._kv.after_schedule(preempted)
                if batch:
                    self._step(batch)
        except BaseException as error:
            logger.exception("the engine's thread died")
            reason, text = FinishReason.ERROR, f"the engine failed: {error!r}"
        finally:
            self._inbox.close(text)
            self._end_all(reason, text)

    def _take_inbox(self) -> None:
        for item in self._inbox.take():
            if isinstance(item, LiveRequest):
                self._num_arrived += 1
                item.sequence.arrival = self._num_arrived
                self._live[item.request.request_id] = item
                self._scheduler.add(item.sequence)
                if self._kv is not None and isinstance(item.request.intent, HoldIntent):
                    self._kv.streams.begin(item.request.request_id, len(item.sequence.tokens))
            elif (live := self._live.get(item.request_id)) is not None:
                self._end(live, FinishReason.ABORT)

    def _step(self, batch: SequenceOf[Work]) -> None:
        self._tell_scheduled(batch)
        completing = [self._live[w.sequence.request_id] for w in batch if w.completes]
        try:
            on_layer = self._kv.streams.before(batch) if self._kv is not None else None
            logits = self._runner.run(batch, on_layer)
            tokens = sample(logits, [live.sampler for live in completing])
        except Exception as error:
            logger.exception("a step of %d requests failed", len(batch))
            for work in batch:
                live = self._live[work.sequence.request_id]
                self._fail(live, f"the engine's step failed: {error!r}")
            return
        self._counters.steps += 1
        for work in batch:
            num_prompt = len(self._live[work.sequence.request_id].request.prompt_token_ids)
            self._counters.prompt_tokens += min(work.count, max(0, num_prompt - work.start))
            self._scheduler.computed(work)
        for live, token in zip(completing, tokens, strict=True):
            self._on_token(live, token)
        if self._kv is not None:
            self._kv.streams.after([w for w in batch if w.sequence.request_id in self._live])

    def _tell_scheduled(self, batch: SequenceOf[Work]) -> None:
        for work in batch:
            live = self._live[work.sequence.request_id]
            if not live.was_scheduled:
                live.was_scheduled = True
                live.request.on_scheduled()

    def _on_token(self, live: LiveRequest, token: int) -> None:
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
        self, live: LiveRequest, reason: FinishReason, token: int | None = None, *, error: str = ""
    ) -> None:
        """Give a request its last event and its blocks a new owner."""
        request_id = live.request.request_id
        del self._live[request_id]
        parting = Parting()
        if self._kv is not None:
            parting = self._kv.part(live, is_well=token is not None)
        if parting.error:
            reason, error = FinishReason.ERROR, parting.error
        self._scheduler.remove(live.sequence)
        if self._kv is not None:
            self._kv.abort(live, parting.unfinished)
        self._counters.finished_requests += 1
        self._forget_if_over(request_id)
        tokens = () if token is None else (token,)
        self._emit(live, tokens, reason, params=parting.params, error=error)

    def _fail(self, live: LiveRequest, error: str) -> None:
        self._end(live, FinishReason.ERROR, error=error)

    def _forget_if_over(self, request_id: RequestId) -> None:
        """The id stays in use while reports about it may come."""
        names = {request_id, fetched_as(request_id), kept_as(request_id)}
        if request_id not in self._live and self._scheduler.loans.keys().isdisjoint(names):
            self._inbox.free(request_id)

    def _emit(
        self,
        live: LiveRequest,
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
        for item in self._inbox.take():
            if isinstance(item, LiveRequest):
                self._live[item.request.request_id] = item
                self._scheduler.add(item.sequence)
        for live in list(self._live.values()):
            self._end(live, reason, error=text if reason is FinishReason.ERROR else "")
