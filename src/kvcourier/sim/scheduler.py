"""Which sequences of an engine model compute next, and who holds blocks meanwhile. Pure.

Decides admission, chunks, preemption and loans, first come first served. Refuses to know time, the
endpoint and clients. Smaller than a real engine's, and written apart from it, so that a mistake
about blocks would have to be made twice to go unseen.
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
        is_remote: its prompt's KV is to come from elsewhere, until that is settled.
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

        Each gets all it needs or none, and nobody overtakes, so none waits for ever.
        """
        remote = []
        while self.waiting:
            sequence = self.waiting[0]
            size = self._block_size
            # At least the last token is computed here: somebody has to say what comes next.
            keys = sequence.hashes[size - 1 : len(sequence.hashes) - 1 : size]
            shared = self.pool.match(keys)
            needed = self._num_blocks(len(sequence.hashes))
            blocks = self.pool.allocate(shared, needed - len(shared))
            if blocks is None:
                break
            self.waiting.pop(0)
            cached = len(shared) * size
            sequence.num_computed, sequence.num_published = cached, len(shared)
            if sequence.is_remote and len(sequence.hashes) - cached > 1:
                sequence.blocks = blocks[: len(shared)]
                sequence.phase = Phase.RECEIVING
                self.receiving.append(sequence)
                self.loans[sequence.request_id] = lent = blocks[len(shared) :]
                remote.append(Admitted(sequence, TokenSpan(cached, len(sequence.hashes)), lent))
                continue
            if sequence.is_remote:
                remote.append(Admitted(sequence, TokenSpan(0, 0), ()))
            sequence.is_remote = False
            sequence.blocks = blocks
            self._run(sequence)
        return remote

    def schedule(self) -> list[Chunk]:
        """The next step's work; those who were short of a block may have preempted others."""
        for sequence in sorted(self.running, key=lambda each: each.arrival):
            while sequence.phase is Phase.RUNNING and not self._has_room(sequence):
                fresh = self.pool.allocate((), 1)
                if fresh is not None:
                    sequence.blocks += fresh
                else:
                    self.preempt(max(self.running, key=lambda each: each.arrival))
        budget, chunks = self._max_batch_tokens, []
        for sequence in sorted(self.running, key=lambda each: each.arrival):
            count = min(len(sequence.hashes) - sequence.num_computed, budget)
            if count > 0:
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
        """A loan came back filled; its last token is computed again."""
        self.receiving.remove(sequence)
        sequence.blocks += self.loans.pop(sequence.request_id)
        sequence.is_remote = False
        self._mark(sequence, len(sequence.hashes) - 1)
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

    def take_back(self, request_id: str) -> bool:
        """A loan that nobody waits for is over; False if there was none."""
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

    def _give_back(self, sequence: SimSequence) -> None:
        self.pool.release(sequence.blocks)
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
