"""The block pool of an engine model: ownership, shared prefixes, and when a block changes hands.

Decides who gets which block. Refuses to know requests. As in real engines a block is owned by so
many, or free; a free one that holds a known prefix can be found until it is given to another.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """All blocks of one life of an engine.

    Attributes:
        changes: how often each block has changed hands. A peer that was granted a block may touch
            it only while this number is what it was.
    """

    def __init__(self, num_blocks: int, chance: random.Random) -> None:
        self.num_blocks = num_blocks
        self.changes = [0] * num_blocks
        self._owners = [0] * num_blocks
        # Shuffled, as on a server that has been busy for a while: blocks must not be consecutive.
        blank = list(range(num_blocks))
        chance.shuffle(blank)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(blank)
        self._key_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def is_owned(self, block: int) -> bool:
        """Whether anybody owns it."""
        return self._owners[block] > 0

    def match(self, keys: Sequence[int]) -> list[int]:
        """Blocks that hold the longest known prefix; not owned by this."""
        found = []
        for key in keys:
            if key not in self._block_of:
                break
            found.append(self._block_of[key])
        return found

    def allocate(self, shared: Sequence[int], num_new: int) -> list[int] | None:
        """Own what `match` found and so many others; None, and nothing owned, if too few are."""
        revived = sum(not self._owners[block] for block in shared)
        if revived + num_new > len(self._free):
            return None
        for block in shared:
            self._own(block)
        fresh = [self._free.popitem(last=False)[0] for _ in range(num_new)]
        for block in fresh:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            self.changes[block] += 1
            self._owners[block] = 1
        return [*shared, *fresh]

    def release(self, blocks: Sequence[int]) -> None:
        """End one ownership of each; the end of a sequence is reused before its start."""
        for block in reversed(blocks):
            assert self._owners[block], f"block {block} is released by one who does not own it"
            self._owners[block] -= 1
            if not self._owners[block]:
                self._free[block] = None
                # Blank ones first: what is known is kept as long as possible.
                self._free.move_to_end(block, last=block in self._key_of)

    def publish(self, block: int, key: int) -> None:
        """An owned block is full and holds the prefix of this name."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def _own(self, block: int) -> None:
        if not self._owners[block]:
            del self._free[block]
            self.changes[block] += 1
        self._owners[block] += 1
