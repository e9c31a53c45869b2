"""Which tokens are computed next, and who holds blocks meanwhile.

Decides admission, batching, chunking, preemption and the waiting for remote KV. Refuses to know
models, endpoints, clients and threads: it is told what was computed and what has arrived.

Life of a sequence::

    WANTING --blocks found--> RECEIVING --received--> READY --\\
       | little is missing        | lost                       \\
       v                          v                             v
    WAITING ---------------------------blocks and budget----> RUNNING
       ^-------------------------blocks ran out------------------/

Blocks have one owner at any time: a sequence, or a *loan* (the endpoint, until it releases them).
Loans that are *kept*, for somebody who may come, are called back when blocks run out (`loans`).

**Who may wait for whom.** A loan for a prompt that its holder has not finished is a guess: the
holder may be unable to begin it for want of the very blocks that it keeps for others who wait
here. So such loans are made of blocks that nobody else waits for, and recalled as soon as
somebody who needs nothing but blocks is short of them: a prompt that is held, one that is computed
here, or a sequence that runs. What is left to wait for is only what ends by itself.
"""

import bisect
import enum
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from kvcourier.engine.blocks import BlockKey, BlockPool, extend_keys
from kvcourier.engine.loans import Loans
from kvcourier.ids import BlockId, RequestId
from kvcourier.layout.geometry import TokenSpan


class Phase(enum.StrEnum):
    """Where a sequence stands."""

    WANTING = "wanting"
    """Its KV is to come from elsewhere, and it has no blocks yet."""
    RECEIVING = "receiving"
    """Its missing blocks are on loan to the endpoint."""
    READY = "ready"
    """Its KV has arrived; it waits for a place in the batch."""
    WAITING = "waiting"
    """It is to be computed here and has no blocks yet."""
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Remote:
    """KV of a sequence's first tokens that is to come from elsewhere.

    Attributes:
        name: what the endpoint calls it, and its loan.
        num_tokens: tokens that it is of.
        threshold: if so many of them or fewer are missing, they are computed here.
    """

    name: RequestId
    num_tokens: int
    threshold: int


_WITH_BLOCKS = frozenset({Phase.READY, Phase.RUNNING})


@dataclass(slots=True, eq=False)
class Sequence:
    """One request as the scheduler sees it.

    Attributes:
        arrival: order of arrival; older ones are served first and preempted last.
        tokens: the prompt and what was generated so far.
        num_computed: tokens, from the first on, whose KV is in `blocks`.
        num_cached_tokens: prompt tokens found in the prefix cache when first admitted.
        remote: what is to come from elsewhere, where something is.
        is_held: it is all there.
        is_recalled: it was asked to give its loan back.
    """

    request_id: RequestId
    arrival: int
    tokens: list[int]
    remote: Remote | None = None
    phase: Phase = Phase.WAITING
    blocks: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    num_cached_tokens: int | None = None
    is_held: bool = False
    is_recalled: bool = False
    keys: list[BlockKey] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `count` tokens of a sequence from position `start` on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether a token can be sampled afterwards."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that wanted remote KV has its turn.

    `blocks` are on loan for `span`; both are empty where so little is missing that it is computed
    here.
    """

    sequence: Sequence
    name: RequestId
    span: TokenSpan
    blocks: tuple[BlockId, ...]


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    preemptions: int = 0
    kv_recalls: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """Continuous batching over one block pool; not thread-safe."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_batch_tokens: int,
        max_num_seqs: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.counters = SchedulerCounters()
        self.running: list[Sequence] = []
        self.ready: deque[Sequence] = deque()
        self.waiting: list[Sequence] = []
        self.wanting: list[Sequence] = []
        self.receiving: list[Sequence] = []
        self.loans = Loans(pool)
        self._preempted: list[Sequence] = []
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._enable_prefix_caching = enable_prefix_caching

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence."""
        if sequence.remote is not None:
            self._want(sequence)
        else:
            self._wait(sequence)

    def admit_remote(self) -> list[Admission]:
        """Find blocks for sequences whose KV comes from elsewhere: held ones first, each kind in
        order of arrival.

        This needs no compute, so they may overtake local ones, but only with blocks that those
        with a better claim do not need. Each gets all its blocks or none.
        """
        admissions: list[Admission] = []
        for sequence in sorted(self.wanting, key=lambda s: (not s.is_held, s.arrival)):
            admission = self._admit(sequence)
            if admission is None:
                break
            admissions.append(admission)
        return admissions

    def _admit(self, sequence: Sequence) -> Admission | None:
        remote = sequence.remote
        assert remote is not None, "nothing is to come for it"
        shared = self._match(sequence)
        cached = len(shared) * self._block_size
        if remote.num_tokens - cached <= remote.threshold:
            self.wanting.remove(sequence)
            self._wait(sequence)
            return Admission(sequence, remote.name, TokenSpan(0, 0), ())
        num_new = self._num_blocks(len(sequence.tokens)) - len(shared)
        needed = self.pool.num_needed(shared, num_new) + self._claimed_before(sequence)
        blocks = None
        if needed <= self.pool.num_free:
            blocks = self.pool.allocate(shared, num_new)
        if blocks is None:
            self.loans.call_back(needed)
            return None
        self.wanting.remove(sequence)
        self._start_with(sequence, shared)
        lent = blocks[len(shared) :]
        self.loans.lend(remote.name, lent)
        sequence.phase = Phase.RECEIVING
        self.receiving.append(sequence)
        return Admission(sequence, remote.name, TokenSpan(cached, remote.num_tokens), tuple(lent))

    def take_recalls(self) -> list[Sequence]:
        """Whose loans are to be given back now, youngest first; ask each for it, then `recalled`
        or `received` follows.

        As many as it takes to serve who has the first claim on blocks and is short of them.
        """
        short = self._num_blocks_short() - self.loans.num_coming
        short -= sum(len(self._loan_of(each)) for each in self.receiving if each.is_recalled)
        recalls: list[Sequence] = []
        for sequence in sorted(self.receiving, key=lambda s: -s.arrival):
            if short <= 0:
                break
            if not (sequence.is_held or sequence.is_recalled):
                sequence.is_recalled = True
                recalls.append(sequence)
                short -= len(self._loan_of(sequence))
        self.counters.kv_recalls += len(recalls)
        return recalls

    def recalled(self, sequence: Sequence) -> None:
        """A receiving sequence has given its loan back; it is wanting again, at its old place."""
        assert sequence.remote is not None, "nothing was to come for it"
        self.receiving.remove(sequence)
        self.loans.take_back(sequence.remote.name)
        self._reset(sequence)
        self._want(sequence)

    def received(self, sequence: Sequence, *, next_is_known: bool = False) -> None:
        """The loan of a receiving sequence came back filled with its KV.

        The last token is computed again for the logits, which writes equal values to its slot;
        unless the next token is known, which is to be appended before the next `schedule`.
        """
        assert sequence.remote is not None, "nothing was to come for it"
        self.receiving.remove(sequence)
        sequence.is_recalled = False
        sequence.blocks += self.loans.filled(sequence.remote.name)
        sequence.phase = Phase.READY
        num_needed = len(sequence.tokens) - (0 if next_is_known else 1)
        self._mark_computed(sequence, min(sequence.remote.num_tokens, num_needed))
        self.ready.append(sequence)

    def compute_instead(self, sequence: Sequence) -> None:
        """The KV of a receiving sequence will not come: compute it here, in other blocks."""
        self.receiving.remove(sequence)
        self._reset(sequence)
        self._wait(sequence)

    def schedule(self) -> list[Work]:
        """Choose the next batch, single tokens first; empty if nothing can be computed now.

        Tell `computed` about each item before the next call.
        """
        self._make_room()
        budget = self._max_batch_tokens
        batch: list[Work] = []
        by_age = sorted(self.running, key=lambda s: s.arrival)
        # Prefills may use a budget up, so whoever needs a single token goes first.
        for sequence in (s for s in by_age if s.num_missing == 1):
            budget -= self._plan(sequence, budget, batch)
        while self.ready and self._has_place(budget):
            budget -= self._plan(self._run(self.ready.popleft()), budget, batch)
        for sequence in (s for s in by_age if s.num_missing > 1):
            budget -= self._plan(sequence, budget, batch)
        while self._has_place(budget) and (admitted := self._admit_waiting()) is not None:
            budget -= self._plan(admitted, budget, batch)
        return batch

    def take_preempted(self) -> list[Sequence]:
        """Who has lost its blocks since the last time; it may have others by now."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def computed(self, work: Work) -> None:
        """The KV of these tokens is in the cache."""
        self._mark_computed(work.sequence, work.start + work.count)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any phase; its blocks are free, those on loan once returned."""
        places: dict[Phase, SequenceOf[Sequence]] = {
            Phase.WANTING: self.wanting,
            Phase.RECEIVING: self.receiving,
            Phase.READY: self.ready,
            Phase.WAITING: self.waiting,
            Phase.RUNNING: self.running,
        }
        places[sequence.phase].remove(sequence)  # type: ignore[attr-defined]
        self._reset(sequence)

    def _plan(self, sequence: Sequence, budget: int, batch: list[Work]) -> int:
        room = len(sequence.blocks) * self._block_size - sequence.num_computed
        count = min(sequence.num_missing, budget, room)
        if count > 0:
            batch.append(Work(sequence, sequence.num_computed, count))
        return count

    def _has_place(self, budget: int) -> bool:
        return budget > 0 and len(self.running) < self._max_num_seqs

    def _run(self, sequence: Sequence) -> Sequence:
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)
        return sequence

    def _admit_waiting(self) -> Sequence | None:
        """Give the first local sequence all the blocks its tokens need, if they are free."""
        if not self.waiting:
            return None
        sequence = self.waiting[0]
        first = self._first_held()
        if first is not None and first.arrival < sequence.arrival:
            return None  # an older one is short of blocks: do not take them away from it
        shared = self._match(sequence)
        num_new = self._num_blocks(len(sequence.tokens)) - len(shared)
        blocks = self.pool.allocate(shared, num_new)
        if blocks is None:
            self.loans.call_back(self.pool.num_needed(shared, num_new))
            return None
        self.waiting.pop(0)
        self._start_with(sequence, shared)
        sequence.blocks = blocks
        return self._run(sequence)

    def _make_room(self) -> None:
        """Give each sequence in or before the batch the block its newest token needs, oldest
        first. One whose block is on its way back waits for it."""
        num_awaited = 0
        for sequence in sorted((*self.running, *self.ready), key=lambda s: s.arrival):
            while sequence.phase in _WITH_BLOCKS and self._num_blocks(len(sequence.tokens)) > len(
                sequence.blocks
            ):
                fresh = self.pool.allocate((), 1)
                if fresh is not None:
                    sequence.blocks += fresh
                elif self.loans.call_back(num_awaited + 1):
                    num_awaited += 1
                    break
                elif any(not each.is_held for each in self.receiving):
                    break
                else:
                    self._preempt(max((*self.running, *self.ready), key=lambda s: s.arrival))

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self._preempted.append(sequence)
        self.remove(sequence)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        bisect.insort(self.waiting, sequence, key=lambda s: s.arrival)

    def _want(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WANTING
        bisect.insort(self.wanting, sequence, key=lambda s: s.arrival)

    def _reset(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.is_recalled = False
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_published = 0

    def _start_with(self, sequence: Sequence, shared: list[BlockId]) -> None:
        cached = len(shared) * self._block_size
        sequence.blocks = list(shared)
        sequence.num_computed = cached
        sequence.num_published = len(shared)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = cached
            self.counters.prefix_queried_tokens += len(sequence.tokens)
            self.counters.prefix_hit_tokens += cached

    def _match(self, sequence: Sequence) -> list[BlockId]:
        """Cached blocks a sequence can start with; at least one token is left to compute."""
        if not self._enable_prefix_caching:
            return []
        extend_keys(sequence.keys, sequence.tokens, self._block_size)
        return self.pool.match(sequence.keys[: (len(sequence.tokens) - 1) // self._block_size])

    def _mark_computed(self, sequence: Sequence, num_computed: int) -> None:
        sequence.num_computed = num_computed
        if not self._enable_prefix_caching:
            return
        num_full = num_computed // self._block_size
        if num_full > sequence.num_published:
            extend_keys(sequence.keys, sequence.tokens, self._block_size)
            for index in range(sequence.num_published, num_full):
                self.pool.publish(sequence.blocks[index], sequence.keys[index])
            sequence.num_published = num_full

    def _claimed_before(self, sequence: Sequence) -> int:
        """Blocks that those still have to find who go before a wanting sequence: who runs, and the
        first local one, if that is older or the other's KV may never come."""
        lacking = sum(map(self._num_lacking, (*self.running, *self.ready)))
        if not self.waiting:
            return lacking
        first = self.waiting[0]
        goes_before = not sequence.is_held or first.arrival < sequence.arrival
        return lacking + (self._num_blocks(len(first.tokens)) if goes_before else 0)

    def _num_blocks_short(self) -> int:
        """Blocks that are wanting to those who run, and to the first who needs nothing else."""
        short = sum(map(self._num_lacking, (*self.running, *self.ready))) - self.pool.num_free
        has_place = len(self.running) + len(self.ready) < self._max_num_seqs
        first = self._first_held()
        if self.waiting and has_place:
            local = self.waiting[0]
            first = local if first is None or local.arrival < first.arrival else first
        if first is None:
            return short
        shared = self._match(first)
        num_new = self._num_blocks(len(first.tokens)) - len(shared)
        return short + self.pool.num_needed(shared, num_new)

    def _first_held(self) -> Sequence | None:
        """The first sequence whose KV is ready elsewhere, and that has no blocks to put it in."""
        return next((each for each in self.wanting if each.is_held), None)

    def _num_lacking(self, sequence: Sequence) -> int:
        """Blocks that a sequence with blocks still needs for its newest token."""
        return max(0, self._num_blocks(len(sequence.tokens)) - len(sequence.blocks))

    def _loan_of(self, sequence: Sequence) -> list[BlockId]:
        assert sequence.remote is not None, "nothing is to come for it"
        return self.loans[sequence.remote.name]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
