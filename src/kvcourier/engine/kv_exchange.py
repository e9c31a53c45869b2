"""KV that comes for requests from elsewhere, and that is handed to others.

Decides what an endpoint is told of each request, and what its reports mean for the request's
blocks. Refuses to know how KV travels (`kvcourier.runtime`) and what is computed (`scheduler`).
`announce`, `refuse` and `withdraw` may be called from any thread, all else from the engine's.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcourier.core.outcomes import Cause
from kvcourier.core.params import HoldIntent, PullIntent, PushIntent
from kvcourier.engine.api import GenerationRequest
from kvcourier.engine.config import EngineConfig
from kvcourier.engine.first_token import pack_first_token, unpack_first_token
from kvcourier.engine.kv_cache import KVCache
from kvcourier.engine.live import LiveRequest
from kvcourier.engine.models import LoadedModel
from kvcourier.engine.scheduler import Remote, Scheduler, Sequence
from kvcourier.engine.streaming import PromptStreams
from kvcourier.engine.turns import Turns
from kvcourier.ids import BlockId, RequestId, kept_as, owner_of
from kvcourier.runtime.interface import Endpoint, let_holder_go
from kvcourier.runtime.reports import Outcome, Report

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class KVCounters:
    """Totals since the start."""

    kv_received: int = 0
    kv_receive_failures: int = 0
    kv_declined: int = 0
    first_tokens_seeded: int = 0
    kv_sent: int = 0
    kv_send_failures: int = 0
    ignored_reports: int = 0


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of an engine, and what this may do with one.

    Attributes:
        live: those that are served.
        go_on: its first token has come with its KV.
        fail: it cannot be served; the text says why.
        forget_if_over: nothing may come for it any more, unless some of it is still on loan.
    """

    live: Mapping[RequestId, LiveRequest]
    go_on: Callable[[LiveRequest, int], None]
    fail: Callable[[LiveRequest, str], None]
    forget_if_over: Callable[[RequestId], None]


@dataclass(frozen=True, slots=True)
class Parting:
    """What becomes of the KV of a request that has ended.

    Attributes:
        params: `kv_transfer_params` to answer with, if others may have it.
        error: why they may not, though they should.
        unfinished: blocks of an unfinished prompt that may be read still.
    """

    params: dict[str, Any] | None = None
    error: str = ""
    unfinished: list[list[BlockId]] | None = None


class KVExchange:
    """The requests of one engine, as its endpoint knows them."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: EngineConfig,
        scheduler: Scheduler,
        model: LoadedModel,
        cache: KVCache,
        requests: Requests,
    ) -> None:
        self.counters = KVCounters()
        self.turns = Turns(config, scheduler, endpoint)
        self.streams = PromptStreams(
            endpoint, config.granularity, cache.stage_geometries, model.device
        )
        self._endpoint = endpoint
        self._config = config
        self._scheduler = scheduler
        self._vocab_size = model.vocab_size
        self._requests = requests

    # A request comes.

    def announce(self, request: GenerationRequest) -> Remote | None:
        """Tell the endpoint at once: P may be asked, and who holds KV wants a heartbeat.

        Returns what is to come from elsewhere. Raises ParamsError if the endpoint refuses it.
        """
        request_id, intent, prompt = request.request_id, request.intent, request.prompt_token_ids
        if intent is None:
            return None
        if not isinstance(intent, HoldIntent):
            self._endpoint.expect(request_id, intent)
            return Remote(request_id, len(prompt), self._config.recompute_threshold)
        self._endpoint.begin_hold(request_id, intent)
        if intent.history is None:
            return None
        return self.turns.expect(request_id, prompt, intent.history)

    def refuse(self, request: GenerationRequest) -> None:
        """It was refused: who holds KV for it need not wait."""
        if isinstance(request.intent, PullIntent | PushIntent):
            let_holder_go(self._endpoint, request.request_id, request.intent)

    def withdraw(self, names: Iterable[RequestId]) -> None:
        """What was announced under these names will not be served."""
        for name in names:
            self._endpoint.abort(name)

    # Between steps.

    def take_reports(self) -> None:
        """Act on what the endpoint has to tell."""
        # Of one batch, what happened comes before what it releases.
        for report in sorted(
            self._endpoint.poll(), key=lambda report: report.outcome is Outcome.RELEASED
        ):
            self._on_report(report)

    def admit(self) -> None:
        """Lend blocks to those that wait for KV, as far as there are any."""
        for admission in self._scheduler.admit_remote():
            name, live = admission.name, self._requests.live[admission.sequence.request_id]
            try:
                if admission.blocks:
                    self._endpoint.receive(name, [admission.blocks], admission.span)
                else:
                    live.owed.discard(name)
                    self._count_declined(live)
                    self._endpoint.decline(name)
            except Exception as error:
                logger.exception("request %s: the endpoint refused it", name)
                self._scheduler.loans.take_back(name)  # it raised, so nothing was handed over
                self._requests.fail(live, f"the KV endpoint failed: {error}")

    def after_schedule(self, preempted: Iterable[Sequence]) -> None:
        """Blocks were given out, and may have run out: tell the endpoint whose."""
        self.turns.give_up()
        # Who needs nothing but blocks does not wait for prompts that may never be begun.
        for sequence in self._scheduler.take_recalls():
            assert sequence.remote is not None, "nothing is to come for it"
            self._endpoint.recall(sequence.remote.name)
        self.streams.roll_back(preempted)

    # Reports.

    def _on_report(self, report: Report) -> None:
        counters = self.counters
        name, live = report.request_id, self._requests.live.get(owner_of(report.request_id))
        is_receiving = live is not None and live.awaits(name)
        match report.outcome:
            case Outcome.RELEASED:
                self._on_released(name, live)
            case Outcome.SENT | Outcome.SEND_FAILED if name == kept_as(owner_of(name)):
                self.turns.collected(report)
            case Outcome.SENT:
                counters.kv_sent += 1
            case Outcome.SEND_FAILED:
                counters.kv_send_failures += 1
            case Outcome.HELD:
                if live is not None:
                    live.sequence.is_held = True
            case Outcome.RECALLED:
                self._on_recalled(name, live if is_receiving else None)
            case Outcome.RECEIVED if live is not None and is_receiving:
                live.received = report
            case Outcome.RECEIVE_FAILED if live is not None and is_receiving:
                self._on_receive_failed(live, report.reason, report.cause)
            case _:
                counters.ignored_reports += 1

    def _on_released(self, name: RequestId, live: LiveRequest | None) -> None:
        """Blocks come back: filled ones to their sequence, others to the pool."""
        is_receiving = live is not None and live.awaits(name)
        if live is not None and is_receiving and live.received is not None:
            self._on_received(live, live.received)
        elif not self._scheduler.loans.take_back(name):
            self.counters.ignored_reports += 1
        elif live is None:
            self._requests.forget_if_over(owner_of(name))
        elif is_receiving:
            self._on_receive_failed(live, "its blocks were released before it came")

    def _on_recalled(self, request_id: RequestId, live: LiveRequest | None) -> None:
        """A request has lent its blocks for others, unless it has ended meanwhile."""
        if live is not None:
            self._scheduler.recalled(live.sequence)
        elif self._scheduler.loans.take_back(request_id):
            self._requests.forget_if_over(owner_of(request_id))

    def _on_received(self, live: LiveRequest, report: Report) -> None:
        """Its KV is complete and its blocks are its own: it goes on with the first or, where that
        is known, with the second token."""
        live.owed.discard(report.request_id)
        if isinstance(live.request.intent, HoldIntent):
            self._scheduler.received(live.sequence)
            self.turns.fetched(live.sequence)
            return
        self.counters.kv_received += 1
        token = None
        if self._config.first_token_seeding and report.continuation is not None:
            prompt = live.request.prompt_token_ids
            token = unpack_first_token(report.continuation, prompt, live.sampler, self._vocab_size)
        self._scheduler.received(live.sequence, next_is_known=token is not None)
        if token is not None:
            self.counters.first_tokens_seeded += 1
            live.sampler.num_sampled += 1
            self._requests.go_on(live, token)

    def _on_receive_failed(
        self, live: LiveRequest, reason: str, cause: Cause | None = None
    ) -> None:
        assert live.sequence.remote is not None, "nothing was to come for it"
        live.owed.discard(live.sequence.remote.name)
        if isinstance(live.request.intent, HoldIntent):
            self.turns.lost(live.request.request_id, reason, cause)
            self._scheduler.compute_instead(live.sequence)
            return
        self.counters.kv_receive_failures += 1
        logger.warning("request %s: KV not received: %s", live.request.request_id, reason)
        if self._config.kv_load_failure_policy == "recompute":
            self._scheduler.compute_instead(live.sequence)
        else:
            self._requests.fail(live, f"the prompt's KV did not come: {reason}")

    def _count_declined(self, live: LiveRequest) -> None:
        if isinstance(live.request.intent, HoldIntent):
            self.turns.declined()
        else:
            self.counters.kv_declined += 1

    # A request ends.

    def part(self, live: LiveRequest, *, is_well: bool) -> Parting:
        """Give its KV to who is to have it; `is_well`: it has its last token. `abort` follows."""
        request_id = live.request.request_id
        params, error = None, ""
        may_be_read = self.streams.end(request_id)
        if is_well:
            try:
                if isinstance(live.request.intent, HoldIntent):
                    params = self._hand_over(live)
                else:
                    params = self.turns.keep(live.request.intent, live.sequence)
            except Exception as failure:
                logger.exception("request %s: its KV could not be handed over", request_id)
                if not may_be_read:
                    self._scheduler.loans.take_back(request_id)
                error = f"the KV endpoint failed: {failure}"
        is_owed = request_id in live.owed
        unfinished = self._keep_for_readers(live) if is_owed and may_be_read else None
        return Parting(params, error, unfinished)

    def abort(self, live: LiveRequest, unfinished: list[list[BlockId]] | None) -> None:
        """Tell the endpoint that nothing of a request is needed any more."""
        for name in live.owed:
            is_prompt = name == live.request.request_id
            try:
                self._endpoint.abort(name, unfinished if is_prompt else None)
            except Exception:
                logger.exception("request %s: the endpoint failed to abort it", name)

    def _keep_for_readers(self, live: LiveRequest) -> list[list[BlockId]]:
        """P: an unfinished prompt's blocks are out of use until the endpoint releases them."""
        sequence, loans = live.sequence, self._scheduler.loans
        if sequence.request_id not in loans:
            loans.lend(sequence.request_id, sequence.blocks)
            sequence.blocks = []
        return [loans[sequence.request_id]]

    def _hand_over(self, live: LiveRequest) -> dict[str, Any]:
        """P: lend the prompt's blocks to the endpoint; those of the answer stay ours."""
        sequence, num_tokens = live.sequence, len(live.request.prompt_token_ids)
        num_blocks = -(-num_tokens // self._config.block_size)
        lent, sequence.blocks = sequence.blocks[:num_blocks], sequence.blocks[num_blocks:]
        self._scheduler.loans.lend(sequence.request_id, lent)
        first = None
        if self._config.first_token_seeding:
            prompt = live.request.prompt_token_ids
            first = pack_first_token(sequence.tokens[num_tokens], prompt, live.sampler)
        params = self._endpoint.finish_prefill(sequence.request_id, [lent], num_tokens, first)
        live.owed.discard(sequence.request_id)
        return params
