"""The scheduler's part in conversations' turns: what is kept of one, and fetched for the next.

Decides what of a request may be kept or fetched, which calls the couriers get about it, and when
what is kept is given up. Refuses to know prompts that are held and wanted: `scheduler_side` does
those, and gives every request to both.

vLLM tells a connector nothing of free blocks. That they have run out is seen by two things: a
request that was asked about and then got no blocks, and one that was preempted.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcourier.core.histories import Miss, usable_tokens
from kvcourier.core.params import History, WantIntent
from kvcourier.core.token_proof import TokenProof, prove
from kvcourier.ids import HoldId, RequestId, TransferId, TransferKey, fetched_as, kept_as
from kvcourier.layout import TokenSpan
from kvcourier.runtime.engine_link import (
    Abort,
    AnyCall,
    BeginHold,
    Decline,
    Expect,
    FinishPrefill,
    Receive,
)
from kvcourier.vllm_connector.block_tables import BlockTable
from kvcourier.vllm_connector.settings import TurnSettings

_log = logging.getLogger(__name__)
Send = Callable[[AnyCall], None]
LARGEST_SHARE = 0.5
"""Of all blocks, kept ones at most: preempting is what tells that too many are, and costs more."""


@dataclass(slots=True)
class _Fetch:
    """A history that is to come for a request; `is_receiving` once it has blocks."""

    num_tokens: int
    is_receiving: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What is handed over of a request that has ended; `key` is of the dispatch that it was of."""

    request_id: RequestId
    block_ids: list[list[int]]
    num_tokens: int
    proof: TokenProof
    key: TransferKey | None

    @property
    def name(self) -> RequestId:
        """What couriers call it."""
        return kept_as(self.request_id)


class Turns:
    """All histories of one scheduler."""

    def __init__(self, settings: TurnSettings | None, send: Send, num_blocks: int) -> None:
        """`num_blocks` are all that vLLM has of the group that has most."""
        self.counts: Counter[str] = Counter()
        self.misses: Counter[Miss] = Counter()
        self._settings = settings
        self._send = send
        self._max_kept = int(LARGEST_SHARE * num_blocks)
        self._to_keep: dict[RequestId, TransferKey | None] = {}
        self._kept: dict[RequestId, int] = {}
        # Read by another thread, entry by entry.
        self._states: dict[TransferKey, tuple[RequestId, Mapping[str, Any]]] = {}
        self._fetches: dict[RequestId, _Fetch] = {}
        self._asked: set[RequestId] = set()

    # Fetching.

    def expect(self, request: Any, history: History, params: Mapping[str, Any]) -> None:
        """A prompt was accepted that comes with a history. `params` give its source again."""
        request_id = RequestId(request.request_id)
        usable: int | Miss = Miss.OFF
        salt = _salt(request)
        if self._settings is not None and salt is not None:
            threshold = self._settings.threshold
            usable = usable_tokens(history, request.prompt_token_ids, threshold, salt)
        name = fetched_as(request_id)
        if isinstance(usable, Miss):
            self.misses[usable] += 1
            if not history.is_proven:
                return
        self._send(Expect(name, dict(params), history.source.is_written))
        if isinstance(usable, Miss):
            self._send(Decline(name))
        else:
            self._fetches[request_id] = _Fetch(usable)

    def num_external(self, request_id: RequestId, num_computed: int, is_aligned: bool) -> int:
        """How many tokens after the computed ones come from a history."""
        self._asked.add(request_id)
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.is_receiving or self._settings is None:
            return 0
        missing = fetch.num_tokens - num_computed
        return missing if missing >= self._settings.threshold and is_aligned else 0

    def passed_over(self, request_id: RequestId) -> None:
        """A request was asked about, and is to have no blocks in this step, whatever is free."""
        self._asked.discard(request_id)

    def allocated(
        self,
        request_id: RequestId,
        block_ids: Sequence[Sequence[int]],
        num_external: int,
        tables: Sequence[BlockTable],
    ) -> bool:
        """A request has got blocks; whether some are lent, to be filled with a history."""
        self._asked.discard(request_id)
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.is_receiving:
            return False
        name = fetched_as(request_id)
        if num_external <= 0:
            del self._fetches[request_id]
            self.misses[Miss.NOT_NEEDED] += 1
            self._send(Decline(name))
            return False
        fetch.is_receiving = True
        span = TokenSpan(fetch.num_tokens - num_external, fetch.num_tokens)
        wanted = [table.ids(block_ids, span) for table in tables]
        self._send(Receive(name, wanted, span.start, span.stop))
        return True

    def received(self, request_id: RequestId) -> None:
        """It has come, or will not; unknown ones are fine."""
        self._fetches.pop(request_id, None)

    def end_fetch(self, request_id: RequestId) -> bool:
        """A request is over; whether blocks of it are lent for a history."""
        self._asked.discard(request_id)
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            self._send(Abort(fetched_as(request_id)))
        return fetch is not None and fetch.is_receiving

    # Keeping.

    def want(self, request_id: RequestId, intent: WantIntent) -> None:
        """A request whose prompt comes from elsewhere was accepted."""
        if self._settings is not None and intent.keeps:
            named = intent.transfer_id
            self._to_keep[request_id] = None if named is None else TransferKey(named, intent.part)

    def kept_of(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        tables: Sequence[BlockTable],
        *,
        finished_well: bool,
    ) -> Kept | None:
        """What is to be handed over of a request that is over, if anything."""
        request_id = RequestId(request.request_id)
        salt = _salt(request)
        if request_id not in self._to_keep:
            return None
        key = self._to_keep.pop(request_id)
        # A layer with a window has no KV of the beginning any more.
        has_windows = any(table.window is not None for table in tables)
        if not finished_well or salt is None or has_windows or not all(block_ids):
            return None
        # The last token was sampled and not computed. A step that runs on may write its KV, which
        # is outside of what is kept.
        num_tokens = min(int(request.num_computed_tokens), int(request.num_tokens) - 1)
        proof = prove(list(request.all_token_ids)[:num_tokens], salt)
        if not proof.num_tokens:
            return None
        groups = [table.ids(block_ids, TokenSpan(0, num_tokens)) for table in tables]
        self._kept[request_id] = max(map(len, block_ids))
        self.counts["num_histories_kept"] += 1
        while sum(self._kept.values()) > self._max_kept and len(self._kept) > 1:
            self._give_oldest_up()
        return Kept(request_id, groups, num_tokens, proof, key)

    def hand_over(self, kept: Kept, hold_id: HoldId) -> float:
        """Tell the couriers; returns for how many seconds it is kept."""
        assert self._settings is not None, "nothing is kept"
        ttl_s = self._settings.ttl_s
        self._send(BeginHold(kept.name, hold_id, None, 0))
        self._send(FinishPrefill(kept.name, kept.block_ids, kept.num_tokens, ttl_s))
        return ttl_s

    def tell(self, kept: Kept, state: Mapping[str, Any]) -> None:
        """What the answer says of it, which a router has to ask for if the answer is streamed."""
        if kept.key is not None:
            self._states[kept.key] = kept.request_id, state

    def state_of(self, transfer_id: TransferId, part: int) -> Mapping[str, Any] | None:
        """What was told of the history of a dispatch; None if it is not kept. From any thread."""
        found = self._states.get(TransferKey(transfer_id, part))
        return None if found is None else found[1]

    def released(self, request_id: RequestId) -> None:
        """Blocks that were kept are vLLM's again; unknown ones are fine."""
        self._forget(request_id)

    def end_step(self, num_preempted: int) -> None:
        """A step was scheduled: make room for who found none."""
        for _ in range(min(len(self._kept), len(self._asked) + num_preempted)):
            self._give_oldest_up()
        self._asked.clear()

    def _give_oldest_up(self) -> None:
        request_id = next(iter(self._kept))
        self._forget(request_id)
        self.counts["num_histories_given_up"] += 1
        self._send(Abort(kept_as(request_id)))

    def _forget(self, request_id: RequestId) -> None:
        if self._kept.pop(request_id, None) is None:
            return
        for key in [key for key, (owner, _) in self._states.items() if owner == request_id]:
            del self._states[key]


def miss_key(miss: Miss) -> str:
    """Key of the number of histories that were missed for this reason, in `stats.COUNTS`."""
    return f"num_history_misses_{miss.value}"


def _salt(request: Any) -> str | None:
    """What else than its tokens a request's KV depends on; None where that cannot be told."""
    if getattr(request, "mm_features", None) or getattr(request, "prompt_embeds", None) is not None:
        return None
    if getattr(request, "lora_request", None) is not None or request.prompt_token_ids is None:
        return None
    return str(getattr(request, "cache_salt", None) or "")
