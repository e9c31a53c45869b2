"""The scheduler's part: which engine call each of vLLM's hooks means.

Decides nothing about transfers; it remembers, per request, how far vLLM has told us of it, so
that every courier hears a legal sequence of calls. Refuses to know workers beyond the link.

Nothing here may raise for what a client sent: an exception in vLLM's scheduler ends the engine
(CVE-2026-94622). Parameters that cannot be used are logged, and the prompt is computed locally.
"""

import enum
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcourier.config import Granularity
from kvcourier.core import handshake, inquiry
from kvcourier.core.inquiry import HistoryQuestion, HistoryTold
from kvcourier.core.outcomes import Side
from kvcourier.core.params import (
    HolderAddress,
    HoldIntent,
    PushIntent,
    WantIntent,
    handoff_params,
    history_params,
    parse_params,
)
from kvcourier.errors import MappingError, ParamsError
from kvcourier.ids import (
    HoldId,
    Rank,
    RequestId,
    TransferId,
    TransferKey,
    hold_id_of,
)
from kvcourier.layout import TokenSpan
from kvcourier.runtime.about import about
from kvcourier.runtime.engine_link import (
    Abort,
    BeginHold,
    Decline,
    EngineLink,
    Expect,
    FinishPrefill,
    Receive,
)
from kvcourier.runtime.handshake_server import HandshakeServer
from kvcourier.vllm_connector.admission import Admission
from kvcourier.vllm_connector.block_tables import BlockTable, blocks_needed
from kvcourier.vllm_connector.intents import (
    Source,
    leave_last_token_out,
    problem_of,
    source_of,
    understood,
)
from kvcourier.vllm_connector.progress import ProgressTracker, StepNews
from kvcourier.vllm_connector.settings import ConnectorSettings
from kvcourier.vllm_connector.turns import Kept, Turns, miss_key

if TYPE_CHECKING:
    from kvcourier.vllm_connector.worker_side import WorkerOffer

_log = logging.getLogger(__name__)
_FINISHED_WELL = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})


@dataclass(frozen=True, slots=True)
class _Loan:
    """A request's blocks, which vLLM has lent us: to be sent, or to be filled."""

    side: Side
    key: TransferKey | None = None


class _Phase(enum.Enum):
    """How far a request is whose KV somebody else holds."""

    QUEUED = enum.auto()
    RECEIVING = enum.auto()


class SchedulerSide:
    """Translates the hooks of one vLLM scheduler."""

    def __init__(self, settings: ConnectorSettings, num_blocks: int, largest: int) -> None:
        """`num_blocks` are all of vLLM's cache, `largest` those of the longest possible request."""
        self._settings = settings
        self._tables: tuple[BlockTable, ...] = ()
        self._link = EngineLink(settings.endpoint.engine_id, settings.endpoint.keys)
        self._holds: dict[RequestId, tuple[HoldId, TransferKey | None]] = {}
        self._keys: set[TransferKey | None] = set()
        self._wants: dict[RequestId, _Phase] = {}
        self._sources: dict[RequestId, Source] = {}
        self._lent: dict[RequestId, _Loan] = {}
        self._num_holds = 0
        self._progress = ProgressTracker()
        self._turns = Turns(settings.turns, self._link.send, num_blocks)
        # One is vLLM's null block.
        self._admission = Admission(num_blocks - 1, largest)
        if settings.may_receive and self._admission.room < largest:
            _log.info(
                "of %d KV blocks the longest possible request takes %d, so that pushes reserve at "
                "most %d before their prompts are computed; a smaller max_model_len makes it more",
                num_blocks - 1,
                largest,
                max(0, self._admission.room),
            )
        config = settings.endpoint
        told = about(config)
        answerers = self._answerers()
        self._server = HandshakeServer(
            config.side_channel_host,
            config.side_channel_port,
            lambda payload: inquiry.answer(payload, self._offer, told, answerers),
            config.limits.max_message_bytes,
            config.keys,
        )

    def _answerers(self) -> inquiry.Answerers:
        """What routers may ask for; answered on the server's thread."""
        turns = self._settings.turns
        if turns is None or not turns.tells:
            return {}
        return {HistoryQuestion: self._tell_history}

    def _tell_history(self, asked: HistoryQuestion) -> HistoryTold:
        state = self._turns.state_of(TransferId(asked.transfer_id), asked.part)
        return inquiry.tell_history(None if state is None else json.dumps(state))

    # Life.

    @property
    def side_channel(self) -> tuple[str, int]:
        """Host and port of the handshake server."""
        return self._settings.endpoint.side_channel_host, self._server.port

    def connect_workers(self, offers: "Mapping[tuple[int, int], WorkerOffer]") -> None:
        """All workers have registered their caches: answer handshakes from now on.

        Raises:
            MappingError: a worker is missing.
        """
        config = self._settings.endpoint
        tp_size, pp_size = handshake.topology([Rank(*rank) for rank in offers])
        if tp_size != self._settings.tp_size:
            raise MappingError(f"workers: {self._settings.tp_size} expected, {tp_size} answered")
        workers = list(offers.values())
        self._tables = workers[0].tables
        self._offer = handshake.Offer(
            engine_id=config.engine_id,
            incarnation=self._settings.incarnation,
            modes=sorted(config.modes),
            facts=workers[0].facts,
            tp_size=tp_size,
            pp_size=pp_size,
            ranks=[worker.offer for worker in workers],
            digests=True,
        )
        for worker in workers:
            self._link.connect(worker.host, worker.port, worker.token)
        self._server.start()

    def close(self) -> None:
        """Free the side channel's port."""
        self._server.close()
        self._link.close()

    # Hooks.

    def on_new_request(self, request: Any) -> None:
        """A request was accepted; it may take part in a transfer."""
        request_id = RequestId(request.request_id)
        params = request.kv_transfer_params
        try:
            intent = parse_params(params, self._settings.endpoint.limits)
        except ParamsError as error:
            _log.error("%s: computed without a transfer: %s", request_id, error)
            return
        if isinstance(intent, HoldIntent):
            if any(table.window is not None for table in self._tables):
                leave_last_token_out(request)
            self._begin_hold(request_id, intent)
            if intent.history is not None:
                source = understood(intent.history.source)
                self._turns.expect(request, intent.history, source)
            if self._settings.granularity is not Granularity.REQUEST:
                self._progress.follow(request_id, int(request.num_prompt_tokens))
        elif intent is not None and not self._settings.may_receive:
            _log.error(
                "%s: computed without a transfer: kv_role kv_producer cannot receive; use "
                "kv_consumer or kv_both",
                request_id,
            )
        elif intent is not None:
            # vLLM hands in a call that it refused as a prompt of one token, aborted at once.
            refused = getattr(request, "abort_immediately", False)
            if not refused:
                self._turns.want(request_id, intent)
            self._want(request_id, intent, None if refused else int(request.num_prompt_tokens))

    def num_external_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """How many tokens after the computed ones come from somebody else; None: ask again."""
        request_id = RequestId(request.request_id)
        count = self._num_to_come(request, num_computed_tokens)
        num_blocks = blocks_needed(self._tables, int(request.num_prompt_tokens)) if count else 0
        if self._admission.may_have_blocks(request_id, num_blocks):
            return count
        self._turns.passed_over(request_id)
        return None

    def _num_to_come(self, request: Any, num_computed_tokens: int) -> int:
        request_id = RequestId(request.request_id)
        aligned = all(num_computed_tokens % table.block_size == 0 for table in self._tables)
        from_history = self._turns.num_external(request_id, num_computed_tokens, aligned)
        if self._wants.get(request_id) is not _Phase.QUEUED:
            return from_history
        missing = int(request.num_prompt_tokens) - num_computed_tokens
        # The last prompt token is computed in any case, so its KV need not come. And vLLM must not
        # think that it came: it would drop a block that this token's window begins in.
        worth_it = missing > max(1, self._settings.recompute_threshold)
        return missing - 1 if worth_it and aligned else 0

    def on_allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Blocks for all but the prompt's last token are allocated, from position 0 on."""
        request_id = RequestId(request.request_id)
        self._allocated(request, block_ids, num_external_tokens)
        if self._turns.allocated(request_id, block_ids, num_external_tokens, self._tables):
            self._lent[request_id] = _Loan(Side.WANT)
        if self._wants.get(request_id) is not _Phase.QUEUED:
            return
        if num_external_tokens <= 0:
            del self._wants[request_id], self._sources[request_id]
            self._link.send(Decline(request_id))
            return
        span = TokenSpan(
            int(request.num_prompt_tokens) - 1 - num_external_tokens,
            int(request.num_prompt_tokens) - 1,
        )
        self._wants[request_id] = _Phase.RECEIVING
        self._lent[request_id] = _Loan(Side.WANT)
        wanted = [table.ids(block_ids, span) for table in self._tables]
        self._link.send(Receive(request_id, wanted, span.start, span.stop))

    def _allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """What it means for those who wait."""
        request_id = RequestId(request.request_id)
        if num_external_tokens <= 0:
            self._admission.finished(request_id)
        # Blocks that have left a window, or were never in it, are vLLM's null block.
        blocks = (block for group in block_ids for block in group if block)
        num_blocks = blocks_needed(self._tables, int(request.num_prompt_tokens))
        self._admission.allocated(request_id, blocks, num_blocks)

    def step_news(self, scheduler_output: Any) -> StepNews:
        """What the step that was scheduled means for held prompts."""
        self._admission.end_step(scheduler_output.num_scheduled_tokens)
        self._turns.end_step(len(scheduler_output.preempted_req_ids or ()))
        return self._progress.take(scheduler_output, self._tables)

    def on_held(self, held: Iterable[RequestId]) -> None:
        """These wait for nothing but blocks; some of them may be over."""
        for request_id in held:
            self._admission.finished(request_id)

    def on_results(self, received: set[str] | None, sent: set[str] | None) -> None:
        """Receives and sends have ended, well or not; their blocks are vLLM's again.

        Ids that we do not owe are taken out of the sets: one of them would end vLLM's engine by
        an assertion (vllm#46240).
        """
        for results in (received, sent):
            for request_id in list(results or ()):
                if request_id in self._lent:
                    # The couriers know a transfer id until now, whatever vLLM has finished.
                    self._keys.discard(self._lent.pop(RequestId(request_id)).key)
                    if request_id in self._wants or request_id in self._holds:
                        self._admission.complete(RequestId(request_id))
                    self._wants.pop(RequestId(request_id), None)
                    self._sources.pop(RequestId(request_id), None)
                    self._turns.received(RequestId(request_id))
                    self._turns.released(RequestId(request_id))
                elif results is not None:
                    _log.error("%s: a result for blocks that were not lent", request_id)
                    results.discard(request_id)

    def on_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: (whether its blocks stay ours until sent, params for the answer)."""
        request_id = RequestId(request.request_id)
        finished_well = request.status.name in _FINISHED_WELL
        self._admission.forget(request_id)
        is_receiving = self._turns.end_fetch(request_id)
        kept = self._turns.kept_of(request, block_ids, self._tables, finished_well=finished_well)
        if request_id in self._wants:
            del self._wants[request_id], self._sources[request_id]
            self._link.send(Abort(request_id))
            return False, None
        if kept is not None:
            return True, self._keep(request_id, kept)
        if request_id not in self._holds:
            return False, None
        hold_id, key = self._holds.pop(request_id)
        self._progress.forget(request_id)
        num_tokens = int(request.num_prompt_tokens)
        if is_receiving:
            # Nothing of it was computed, so nothing was sent; its blocks come back as received.
            self._keys.discard(key)
            self._link.send(Abort(request_id))
            return False, None
        if not finished_well or not any(block_ids):
            return self._give_up(request_id, key, block_ids), None
        self._lent[request_id] = _Loan(Side.HOLD, key)
        groups = [table.ids(block_ids, TokenSpan(0, num_tokens)) for table in self._tables]
        self._link.send(FinishPrefill(request_id, groups, num_tokens))
        return True, self._handoff(request_id, groups, num_tokens, hold_id, key)

    def _keep(self, request_id: RequestId, kept: Kept) -> dict[str, Any]:
        """A turn is over: keep its KV for the next; returns the params for the answer."""
        self._lent[request_id] = _Loan(Side.HOLD)
        hold_id = self._new_hold_id()
        ttl_s = self._turns.hand_over(kept, hold_id)
        told = self._handoff(kept.name, kept.block_ids, kept.num_tokens, hold_id, None)
        state = history_params(told, ttl_s, kept.proof)
        self._turns.tell(kept, state)
        return state

    def _handoff(
        self,
        name: RequestId,
        groups: list[list[int]],
        num_tokens: int,
        hold_id: HoldId,
        key: TransferKey | None,
    ) -> dict[str, Any]:
        config = self._settings.endpoint
        host, port = self.side_channel
        return handoff_params(
            HolderAddress(config.engine_id, host, port, self._settings.tp_size, 1),
            name,
            groups,
            num_tokens,
            hold_id,
            self._settings.incarnation,
            config.modes,
            key,
        )

    @property
    def num_held(self) -> int:
        """Prompts and answers whose blocks are kept for somebody. vLLM goes on stepping while
        there are any."""
        return sum(loan.side is Side.HOLD for loan in self._lent.values())

    def take_counts(self) -> dict[str, int]:
        """What happened to histories since the last time, by keys of `stats.COUNTS`."""
        counts, self._turns.counts = self._turns.counts, Counter()
        misses, self._turns.misses = self._turns.misses, Counter()
        return dict(counts) | {miss_key(miss): count for miss, count in misses.items()}

    def _new_hold_id(self) -> HoldId:
        self._num_holds += 1
        return hold_id_of(self._settings.incarnation, self._num_holds)

    def _give_up(
        self, request_id: RequestId, key: TransferKey | None, block_ids: Sequence[Sequence[int]]
    ) -> bool:
        """A held prompt has ended badly; returns whether its blocks stay ours until sent.

        Chunks of it may be on their way, from blocks that vLLM would give to somebody else.
        """
        if self._settings.granularity is Granularity.REQUEST or not any(block_ids):
            self._keys.discard(key)
            self._link.send(Abort(request_id))
            return False
        self._lent[request_id] = _Loan(Side.HOLD, key)
        self._link.send(Abort(request_id, [list(group) for group in block_ids]))
        return True

    def _want(self, request_id: RequestId, intent: WantIntent, num_tokens: int | None) -> None:
        problem = problem_of(intent, num_tokens, self._settings.endpoint.limits.max_block_ids)
        source = source_of(intent)
        if source in self._sources.values():
            # All prompts of one call carry the params of its first; the KV is that one's only.
            problem = "another request is waiting for the same KV"
        if problem:
            _log.error("%s: computed without a transfer: %s", request_id, problem)
            return
        self._wants[request_id] = _Phase.QUEUED
        self._sources[request_id] = source
        if isinstance(intent, PushIntent):
            self._admission.expect(request_id)
        self._link.send(Expect(request_id, understood(intent)))

    def _begin_hold(self, request_id: RequestId, intent: HoldIntent) -> None:
        key = intent.key
        if key in self._keys:
            _log.error("%s: transfer id %s is in use; held under its own id only", request_id, key)
            key = None
        if key is not None:
            self._keys.add(key)
        hold_id = self._new_hold_id()
        self._holds[request_id] = (hold_id, key)
        self._link.send(
            BeginHold(
                request_id,
                hold_id,
                key.transfer_id if key is not None else None,
                key.part if key is not None else 0,
                intent.rebindable,
            )
        )
