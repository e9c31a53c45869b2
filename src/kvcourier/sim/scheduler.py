"""Which sequences of an engine model compute next, and who holds blocks meanwhile. Pure.

Decides admission, chunks, preemption and loans, first come first served among those that need
nothing but blocks; who waits for a prompt that P has not finished gets what is left, on call.
Refuses to know time, the endpoint and clients. Smaller than a real engine's, and written apart from
it, so that a mistake about blocks would have to be made twice to go unseen.
"""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcourier.layout import TokenSpan
from kvcourier.sim.blocks import BlockPool
from kvcourier.sim.content import prefix_hashes


class Phase(enum.StrEnum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    OVER = "over"


@dataclass(slots=True, eq=False)
class SimSequence:
    """One request in an engine.

    Attributes:
        is_remote: KV of its first tokens is to come from elsewhere, until that is settled.
        num_remote: how many these are.
        remote_name: what the endpoint calls that.
        is_ready: who holds it has finished it, so that only blocks are wanting.
        is_recalled: its loan was called back.
        hashes: of each token's prefix; see `content`.
        num_preempted: how often it has lost its blocks.
        num_told: P: tokens that the endpoint was told of since the last preemption.
    """

    request_id: str
    arrival: int
    num_prompt: int
    hashes: list[int]
    max_tokens: int
    is_remote: bool = False
    num_remote: int = 0
    remote_name: str = ""
    is_ready: bool = False
    is_recalled: bool = False
    is_held: bool = False
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    num_generated: int = 0
    num_preempted: int = 0
    num_told: int = 0
    has_received: bool = False
    owes_endpoint: bool = False

    @property
    def may_wait_for_ever(self) -> bool:
        """Whether something else than blocks is wanting, which may be waiting for them."""
        return self.is_remote and not self.is_ready

    def append(self, token: int) -> None:
        """It has said one more token."""
        self.hashes += prefix_hashes([token], self.hashes[-1])
        self.num_generated += 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute positions [start, stop) of a sequence."""

    sequence: SimSequence
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        """Whether a token can be sampled then."""
        return self.stop == len(self.sequence.hashes)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence whose KV comes from elsewhere has blocks for `span`, or needs none of it."""

    sequence: SimSequence
    span: TokenSpan
    blocks: Sequence[int]


class SimScheduler:
    """Continuous batching over one pool."""

    def __init__(self, pool: BlockPool, block_size: int, max_batch_tokens: int) -> None:
        self.pool = pool
        self.waiting: list[SimSequence] = []
        self.running: list[SimSequence] = []
        self.receiving: list[SimSequence] = []
        self.loans: dict[str, list[int]] = {}
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self.kept: dict[str, None] = {}
        """Loans for a later turn, oldest first."""
        self.is_short = False
        """Somebody has found no block since that was last set to False."""
        self._preempted: list[SimSequence] = []
        self.num_preempted: Counter[str] = Counter()
        """How often each request has lost its blocks."""

    def add(self, sequence: SimSequence) -> None:
        """It waits for its turn."""
        sequence.phase = Phase.WAITING
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda each: each.arrival)

    def admit(self) -> list[Admitted]:
        """Give blocks to those whose turn it is; returns the ones whose KV comes from elsewhere.

        Each gets all it needs or none, and nobody overtakes one that needs nothing else, so none
        waits for ever.
        """
        remote = []
        size = self._block_size
        for sequence in self._by_claim():
            shared = self.pool.match(self._keys(sequence))
            needed = self._num_blocks(len(sequence.hashes)) - len(shared)
            taken = needed + sum(not self.pool.is_owned(block) for block in shared)
            if taken + self._num_lacking() > self.pool.num_free:
                self.is_short = True
                break
            blocks = self.pool.allocate(shared, needed)
            if blocks is None:
                self.is_short = True
                break
            self.waiting.remove(sequence)
            cached = len(shared) * size
            sequence.num_computed, sequence.num_published = cached, len(shared)
            if sequence.is_remote and sequence.num_remote - cached > 1:
                sequence.blocks = blocks[: len(shared)]
                sequence.phase = Phase.RECEIVING
                self.receiving.append(sequence)
                self.loans[sequence.remote_name] = lent = blocks[len(shared) :]
                remote.append(Admitted(sequence, TokenSpan(cached, sequence.num_remote), lent))
                continue
            if sequence.is_remote:
                remote.append(Admitted(sequence, TokenSpan(0, 0), ()))
            sequence.is_remote = False
            sequence.blocks = blocks
            self._run(sequence)
        return remote

    def recalls(self) -> list[SimSequence]:
        """Whose loans to call back, once each, for those who need nothing but blocks."""
        short = self._num_lacking() - self.pool.num_free
        first = next(iter(self._by_claim()), None)
        if first is not None and not first.may_wait_for_ever:
            short += self._num_blocks(len(first.hashes))
            short -= sum(map(self.pool.is_owned, self.pool.match(self._keys(first))))
        recalled = []
        for sequence in sorted(self.receiving, key=lambda each: -each.arrival):
            if sequence.is_recalled:
                short -= len(self.loans[sequence.remote_name])
        for sequence in sorted(self.receiving, key=lambda each: -each.arrival):
            if short > 0 and sequence.may_wait_for_ever and not sequence.is_recalled:
                sequence.is_recalled = True
                recalled.append(sequence)
                short -= len(self.loans[sequence.remote_name])
        return recalled

    def recalled(self, sequence: SimSequence) -> None:
        """A loan came back as it was asked for."""
        self.receiving.remove(sequence)
        self.take_back(sequence.remote_name)
        self._give_back(sequence)
        self.add(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's work; those who were short of a block may have preempted others."""
        for sequence in sorted(self.running, key=lambda each: each.arrival):
            while sequence.phase is Phase.RUNNING and not self._has_room(sequence):
                fresh = self.pool.allocate((), 1)
                if fresh is not None:
                    sequence.blocks += fresh
                elif any(each.may_wait_for_ever for each in self.receiving):
                    break
                else:
                    self.is_short = True
                    self.preempt(max(self.running, key=lambda each: each.arrival))
        budget, chunks = self._max_batch_tokens, []
        for sequence in sorted(self.running, key=lambda each: each.arrival):
            count = min(len(sequence.hashes) - sequence.num_computed, budget)
            if count > 0 and self._has_room(sequence):
                budget -= count
                start = sequence.num_computed
                chunks.append(Chunk(sequence, start, start + count))
        return chunks

    def preempt(self, sequence: SimSequence) -> None:
        """Take a running sequence's blocks away; it is computed anew."""
        sequence.num_preempted += 1
        self.num_preempted[sequence.request_id] += 1
        self.running.remove(sequence)
        self._give_back(sequence)
        self._preempted.append(sequence)
        self.add(sequence)

    def take_preempted(self) -> list[SimSequence]:
        """Who has lost its blocks since the last time."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def computed(self, chunk: Chunk) -> None:
        """The KV of the chunk is there."""
        self._mark(chunk.sequence, chunk.stop)

    def received(self, sequence: SimSequence) -> None:
        """A loan came back filled; the last token is computed again."""
        self.receiving.remove(sequence)
        sequence.blocks += self.loans.pop(sequence.remote_name)
        sequence.is_remote = sequence.is_recalled = False
        self._mark(sequence, min(sequence.num_remote, len(sequence.hashes) - 1))
        self._run(sequence)

    def compute_instead(self, sequence: SimSequence) -> None:
        """Its KV will not come: it is computed here, in other blocks."""
        self.receiving.remove(sequence)
        self._give_back(sequence)
        sequence.is_remote = False
        self.add(sequence)

    def lend(self, sequence: SimSequence, num_blocks: int) -> list[int]:
        """Its first blocks are the endpoint's now."""
        lent, sequence.blocks = sequence.blocks[:num_blocks], sequence.blocks[num_blocks:]
        self.loans[sequence.request_id] = lent
        return lent

    def keep(self, sequence: SimSequence, name: str, num_blocks: int) -> list[int]:
        """Its first blocks are the endpoint's now, for a later turn."""
        kept, sequence.blocks = sequence.blocks[:num_blocks], sequence.blocks[num_blocks:]
        self.loans[name] = kept
        self.kept[name] = None
        return kept

    def take_back(self, request_id: str) -> bool:
        """A loan that nobody waits for is over; False if there was none."""
        self.kept.pop(request_id, None)
        blocks = self.loans.pop(request_id, None)
        if blocks is not None:
            self.pool.release(blocks)
        return blocks is not None

    def remove(self, sequence: SimSequence) -> None:
        """It is over; what is on loan comes back later."""
        for places in (self.waiting, self.running, self.receiving):
            if sequence in places:
                places.remove(sequence)
        self._give_back(sequence)
        sequence.phase = Phase.OVER

    def _run(self, sequence: SimSequence) -> None:
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)

    def _by_claim(self) -> list[SimSequence]:
        """Who waits, those first who need nothing but blocks."""
        return sorted(self.waiting, key=lambda each: (each.may_wait_for_ever, each.arrival))

    def _keys(self, sequence: SimSequence) -> list[int]:
        """Of the blocks it could share. At least the last token is computed here: somebody has to
        say what comes next."""
        size = self._block_size
        return sequence.hashes[size - 1 : len(sequence.hashes) - 1 : size]

    def _num_lacking(self) -> int:
        """Blocks that running sequences need for their newest tokens."""
        return sum(self._num_blocks(len(each.hashes)) - len(each.blocks) for each in self.running)

    def _give_back(self, sequence: SimSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.is_recalled = False
        sequence.blocks = []
        sequence.num_computed = sequence.num_published = 0

    def _mark(self, sequence: SimSequence, num_computed: int) -> None:
        sequence.num_computed = num_computed
        num_full = num_computed // self._block_size
        for index in range(sequence.num_published, num_full):
            key = sequence.hashes[(index + 1) * self._block_size - 1]
            self.pool.publish(sequence.blocks[index], key)
        sequence.num_published = max(sequence.num_published, num_full)

    def _has_room(self, sequence: SimSequence) -> bool:
        return self._num_blocks(len(sequence.hashes)) <= len(sequence.blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
