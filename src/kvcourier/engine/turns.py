"""The turns of conversations: what is kept of one that has ended, and fetched for the next.

Decides which answers' KV is kept, which history may stand for the beginning of a prompt, and why
one is not fetched. Refuses to know who keeps which conversation's state (a router does) and how KV
travels.

A history is used as far as its proof shows that it is of this prompt's tokens, and of the very hold
that its reference names. Whatever is missing of it is computed.
"""

import contextlib
import logging
import threading
from collections import Counter
from dataclasses import dataclass

from kvcourier.core.histories import Miss, usable_tokens
from kvcourier.core.outcomes import Cause
from kvcourier.core.params import History, Intent, PullIntent, PushIntent
from kvcourier.core.token_proof import prove
from kvcourier.engine.config import EngineConfig
from kvcourier.engine.scheduler import Remote, Scheduler, Sequence
from kvcourier.errors import ParamsError
from kvcourier.ids import RequestId, fetched_as, kept_as
from kvcourier.runtime.interface import Endpoint
from kvcourier.runtime.reports import Outcome, Report

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TurnCounters:
    """Totals since the start."""

    histories_kept: int = 0
    histories_collected: int = 0
    histories_given_up: int = 0
    histories_fetched: int = 0
    history_tokens_fetched: int = 0


class Turns:
    """All histories of one engine, in both directions."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, endpoint: Endpoint) -> None:
        self.counters = TurnCounters()
        self._config = config
        self._scheduler = scheduler
        self._endpoint = endpoint
        self._misses: Counter[Miss] = Counter()
        self._lock = threading.Lock()

    def stats(self) -> dict[str, int]:
        """Gauges and counters; `NAME:REASON` is the part of a counter with that reason."""
        held = self._scheduler.loans.kept
        counters = {name: getattr(self.counters, name) for name in self.counters.__slots__}
        misses = {f"history_misses:{miss.value}": self._misses[miss] for miss in Miss}
        blocks = sum(map(len, held))
        return {"histories": len(held), "history_blocks": blocks, **counters, **misses}

    # Fetching (P).

    def expect(
        self, request_id: RequestId, prompt: tuple[int, ...], history: History
    ) -> Remote | None:
        """A prompt was accepted that comes with a history; returns what is to be fetched of it.

        Tells the endpoint at once, in either case. Thread-safe.
        """
        threshold, name = self._config.history_threshold, fetched_as(request_id)
        usable: int | Miss = Miss.OFF
        if self._config.bidirectional_kv_xfer:
            usable = usable_tokens(history, prompt, threshold)
        if isinstance(usable, Miss):
            self._miss(usable)
            if history.is_proven:
                with contextlib.suppress(ParamsError):
                    self._endpoint.expect(name, history.source)
                    self._endpoint.decline(name)
            return None
        try:
            self._endpoint.expect(name, history.source)
        except ParamsError as error:
            self.lost(request_id, str(error), None)
            return None
        return Remote(name, usable, threshold - 1)

    def declined(self) -> None:
        """What was expected is here already."""
        self._miss(Miss.NOT_NEEDED)

    def fetched(self, sequence: Sequence) -> None:
        """It has come; `sequence` goes on from there."""
        self.counters.histories_fetched += 1
        self.counters.history_tokens_fetched += sequence.num_computed - (
            sequence.num_cached_tokens or 0
        )

    def lost(self, request_id: RequestId, reason: str, cause: Cause | None) -> None:
        """It will not come."""
        logger.info("request %s: its history is computed again: %s", request_id, reason)
        self._miss(Miss.FAILED if cause is None else Miss(cause.value))

    # Keeping (D).

    def keep(self, intent: Intent | None, sequence: Sequence) -> dict[str, object] | None:
        """A request has ended well: keep what is computed of it, if that is wanted.

        Takes the sequence's blocks; returns the `kv_transfer_params` to answer with.
        """
        num_tokens = sequence.num_computed
        wants = isinstance(intent, PullIntent | PushIntent) and intent.keeps
        if not (self._config.bidirectional_kv_xfer and wants):
            return None
        proof = prove(sequence.tokens[:num_tokens])
        if not proof.num_tokens:
            return None
        num_blocks = -(-num_tokens // self._config.block_size)
        kept, sequence.blocks = sequence.blocks[:num_blocks], sequence.blocks[num_blocks:]
        name = kept_as(sequence.request_id)
        self._scheduler.loans.keep(name, kept)
        ttl_s = self._config.decoder_kv_blocks_ttl
        try:
            params = self._endpoint.keep_history(name, [kept], num_tokens, ttl_s, proof)
        except Exception:
            # The answer is good all the same.
            logger.exception("request %s: its KV could not be kept", sequence.request_id)
            self._endpoint.abort(name)
            self._scheduler.loans.take_back(name)  # it raised, so nothing was handed over
            return None
        self.counters.histories_kept += 1
        return params

    def give_up(self) -> None:
        """Blocks have run out: take back what is kept, as far as it takes."""
        for name in self._scheduler.loans.take_called_back():
            self.counters.histories_given_up += 1
            self._endpoint.abort(name)

    def collected(self, report: Report) -> None:
        """What happened to a history that is kept."""
        if report.outcome is Outcome.SENT:
            self.counters.histories_collected += 1

    def _miss(self, reason: Miss) -> None:
        with self._lock:
            self._misses[reason] += 1
