"""Free blocks as runs of consecutive ids, so that a request gets few long runs.

Decides which free blocks are handed out. Refuses to know what they hold. What is consecutive on
both sides of a transfer moves in one piece, so long runs make cheap transfers.

Best fit: the smallest run that is long enough, so that long ones last for long prompts and single
blocks fill the gaps. Distinct lengths of runs are few (at most about the square root of twice the
number of blocks, as they add up to it), so finding one by bisection stays cheap.
"""

import bisect
from collections.abc import Iterable, Iterator

from kvcourier.ids import BlockId


class FreeRuns:
    """A set of block ids, by runs. Neighbouring runs are always one."""

    def __init__(self, num_blocks: int) -> None:
        """All of the ids from 0 on are free."""
        self._num_blocks = 0
        # First id of a run to its length, and the id after its last one to its first.
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        # A length to the first ids of the runs that have it, and those lengths, ascending.
        self._starts_of: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []
        if num_blocks:
            self._insert(0, num_blocks)

    def __len__(self) -> int:
        return self._num_blocks

    def runs(self) -> list[tuple[int, int]]:
        """First id and length of every run, ascending."""
        return sorted(self._length_at.items())

    def add(self, blocks: Iterable[BlockId]) -> None:
        """These blocks are free from now on; none of them was."""
        for start, length in runs_of(sorted(blocks)):
            assert start not in self._length_at, f"block {start} is free already"
            left = self._start_before.get(start)
            if left is not None:
                length += self._remove(left)
                start = left
            if start + length in self._length_at:
                length += self._remove(start + length)
            self._insert(start, length)

    def take(self, count: int) -> list[BlockId]:
        """`count` blocks in as few runs as best fit finds; there must be as many."""
        assert count <= self._num_blocks, f"{count} blocks wanted, {self._num_blocks} are free"
        taken: list[BlockId] = []
        while count:
            at = min(bisect.bisect_left(self._lengths, count), len(self._lengths) - 1)
            start = next(iter(self._starts_of[self._lengths[at]]))
            length = self._remove(start)
            used = min(count, length)
            if used < length:
                self._insert(start + used, length - used)
            taken += map(BlockId, range(start, start + used))
            count -= used
        return taken

    def _insert(self, start: int, length: int) -> None:
        self._num_blocks += length
        self._length_at[start] = length
        self._start_before[start + length] = start
        if length not in self._starts_of:
            self._starts_of[length] = {}
            bisect.insort(self._lengths, length)
        self._starts_of[length][start] = None

    def _remove(self, start: int) -> int:
        """Take a run out; its length."""
        length = self._length_at.pop(start)
        self._num_blocks -= length
        del self._start_before[start + length]
        starts = self._starts_of[length]
        del starts[start]
        if not starts:
            del self._starts_of[length]
            self._lengths.pop(bisect.bisect_left(self._lengths, length))
        return length


def runs_of(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First id and length of each run of consecutive ids, in the order given."""
    start = length = 0
    for block in blocks:
        if length and block == start + length:
            length += 1
            continue
        if length:
            yield start, length
        start, length = block, 1
    if length:
        yield start, length
