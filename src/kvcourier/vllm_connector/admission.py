"""Which waiting requests may have blocks, where blocks cannot be taken back.

Decides from sizes alone. Refuses to know vLLM, couriers and where KV comes from.

**Unfinished prompts leave room.** P may be unable to begin a prompt for want of the very blocks in
which it keeps finished prompts, and these may wait for blocks here. vLLM takes no blocks back from
a request that waits for KV. So unfinished prompts never get so many that the longest possible
request has no room beside them. Then whoever needs nothing but blocks gets them in the end, P has
its own back, and the unfinished are finished. It would not do to leave room for those who wait
now: a longer one may come, and be finished, before P begins what has blocks here.

**Who has all its KV goes first.** vLLM asks one waiting request after the other and stops at the
first that finds no blocks. One that was passed over may later be in front of others whose KV came
meanwhile, and wait for the blocks of those behind it (0.31 runs these first, 0.29 does not). So if
somebody found no blocks, and somebody else who has everything was not run, the next step is for
those who have blocks. Not every step, so that nobody waits for ever.
"""

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass

from kvcourier.ids import RequestId


@dataclass(frozen=True, slots=True)
class _Claim:
    """Blocks of an unfinished prompt: those it has, and how many it will need besides."""

    blocks: frozenset[int]
    num_more: int


class Admission:
    """All waiting requests of one scheduler."""

    def __init__(self, num_blocks: int, largest: int) -> None:
        """`num_blocks` can be given out, `largest` is what the longest possible request needs."""
        self.room = num_blocks - largest
        self._unfinished: set[RequestId] = set()
        self._claims: dict[RequestId, _Claim] = {}
        self._num_claims: Counter[int] = Counter()
        self._num_more = 0
        self._short: set[RequestId] = set()
        self._complete: set[RequestId] = set()
        self._stands_back = False

    @property
    def num_claimed(self) -> int:
        """Blocks that unfinished prompts have or will need; shared ones count once."""
        return len(self._num_claims) + self._num_more

    # Requests.

    def expect(self, request_id: RequestId) -> None:
        """A prompt was accepted that somebody else may not have finished yet."""
        self._unfinished.add(request_id)

    def finished(self, request_id: RequestId) -> None:
        """It waits for nothing but blocks, or for nothing at all; unknown ones are fine."""
        self._unfinished.discard(request_id)
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            self._num_more -= claim.num_more
            for block in claim.blocks:
                self._num_claims[block] -= 1
                if not self._num_claims[block]:
                    del self._num_claims[block]

    def complete(self, request_id: RequestId) -> None:
        """All its KV has come, or will not; it is to be run in the blocks that it has."""
        self.finished(request_id)
        self._complete.add(request_id)

    def forget(self, request_id: RequestId) -> None:
        """It is over; unknown ones are fine."""
        self.finished(request_id)
        self._short.discard(request_id)
        self._complete.discard(request_id)

    # Steps.

    def may_have_blocks(self, request_id: RequestId, num_blocks: int) -> bool:
        """Whether a request that has none may have them now; else it is to ask in the next step.

        `num_blocks` is what it would claim if it is unfinished, 0 if its KV need not come.
        """
        if self._stands_back:
            return False
        waits_for_kv = num_blocks and request_id in self._unfinished
        if waits_for_kv and self.num_claimed + num_blocks > self.room:
            return False
        self._short.add(request_id)
        return True

    def allocated(self, request_id: RequestId, blocks: Iterable[int], num_blocks: int) -> None:
        """A request got blocks; an unfinished one will need `num_blocks` in all."""
        self._short.discard(request_id)
        if request_id in self._unfinished:
            claim = frozenset(blocks)
            self._claims[request_id] = _Claim(claim, max(0, num_blocks - len(claim)))
            self._num_more += self._claims[request_id].num_more
            self._num_claims.update(claim)

    def end_step(self, ran: Container[str]) -> None:
        """A step was put together, of these requests."""
        self._complete = {each for each in self._complete if each not in ran}
        self._stands_back = bool(self._short and self._complete)
        self._short.clear()
