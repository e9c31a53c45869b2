"""Who owns which block of the KV cache, and which blocks hold a known prefix.

Decides allocation, sharing by reference count and eviction, least recently used first. Refuses to
know requests, tensors and threads. Which of the blocks that hold nothing are handed out is for
`free_runs` to say.

A block is *owned* (reference count above 0) or *free*. Either may be *published*: its KV is really
there and belongs to a known chain of tokens, so that others may share it. A free published block
stays findable until it is allocated for something else.
"""

import hashlib
import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NewType

from kvcourier.engine.free_runs import FreeRuns
from kvcourier.ids import BlockId

BlockKey = NewType("BlockKey", bytes)
"""Name of a full block's content: digest of its tokens and of all tokens before it."""


def extend_keys(keys: list[BlockKey], tokens: Sequence[int], block_size: int) -> None:
    """Append the keys of those full blocks of `tokens` that `keys` does not cover yet.

    A cryptographic digest, because an accidental or a crafted collision would answer one user
    with another's context.
    """
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        digest = hashlib.blake2b(keys[-1] if keys else b"", digest_size=16)
        digest.update(array("q", tokens[start : start + block_size]).tobytes())
        keys.append(BlockKey(digest.digest()))


class BlockPool:
    """All blocks of one engine. Every call is all or nothing."""

    def __init__(self, num_blocks: int, fragment: float = 0.0) -> None:
        """`fragment` is the part, 0 to 1, of each allocation whose order is shuffled.

        It makes on purpose the scattered caches that a busy server has by itself. The order is the
        same in every run.
        """
        self.num_blocks = num_blocks
        self._fragment = fragment
        self._random = random.Random(num_blocks)
        self._references = [0] * num_blocks
        # A free block is in one of the two. Published ones are evicted only for want of others.
        self._blank = FreeRuns(num_blocks)
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._block_of: dict[BlockKey, BlockId] = {}
        self._key_of: dict[BlockId, BlockKey] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give out, published ones included."""
        return len(self._blank) + len(self._cached)

    def num_needed(self, shared: Sequence[BlockId], num_new: int) -> int:
        """How many free blocks `allocate` would take."""
        return num_new + sum(self._references[block] == 0 for block in shared)

    def num_freed_by(self, blocks: Iterable[BlockId]) -> int:
        """How many blocks would be free if these ownerships ended; a block may be named twice."""
        ending = Counter(blocks)
        return sum(count == self._references[block] for block, count in ending.items())

    def match(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Published blocks for the longest prefix of `keys`; they are not owned by this."""
        found: list[BlockId] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_owned(self, blocks: Iterable[BlockId]) -> int:
        """How many of these somebody owns, so that sharing them needs no free block."""
        return sum(self._references[block] > 0 for block in blocks)

    def allocate(self, shared: Sequence[BlockId], num_new: int) -> list[BlockId] | None:
        """Own `shared` (as found by `match`) and `num_new` other blocks; None if too few are free.

        Give every block back with `release`, once per call that returned it.
        """
        if self.num_needed(shared, num_new) > self.num_free:
            return None
        for block in shared:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        self._evict(num_new - len(self._blank))
        fresh = self._blank.take(num_new)
        if self._fragment:
            self._scatter(fresh)
        for block in fresh:
            self._references[block] = 1
        return [*shared, *fresh]

    def release(self, blocks: Sequence[BlockId]) -> None:
        """End one ownership of each block. The end of a sequence is evicted before its start."""
        blank: list[BlockId] = []
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is not owned"
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                blank.append(block)
        self._blank.add(blank)

    def publish(self, block: BlockId, key: BlockKey) -> None:
        """Let others find an owned block whose KV is complete.

        The first block of a key stays the one that is found; a later copy is simply not shared.
        """
        assert self._references[block] > 0, f"block {block} is not owned"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def _evict(self, count: int) -> None:
        """Turn the `count` published blocks that were used least recently into blank ones.

        Not one more, and in this order: longer runs among the oldest few were to be had, but at the
        price of several per cent of the prefix hits.
        """
        evicted: list[BlockId] = []
        for _ in range(count):
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            evicted.append(block)
        self._blank.add(evicted)

    def _scatter(self, blocks: list[BlockId]) -> None:
        """Exchange a part of the blocks among each other."""
        places = self._random.sample(range(len(blocks)), round(self._fragment * len(blocks)))
        for place, block in zip(sorted(places), [blocks[at] for at in places], strict=True):
            blocks[place] = block
