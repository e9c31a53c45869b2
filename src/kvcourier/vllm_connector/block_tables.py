"""How vLLM's block ids name our blocks.

Decides which of a request's block ids, as vLLM's hooks give them, are a cache group's blocks for a
span of tokens. Refuses to know tensors and transfers.

vLLM gives one list per cache group, from position 0 on; blocks that have left a sliding window are
there as its null block, 0. A tensor may be made of smaller blocks than vLLM counts in, those of the
attention kernel: then block b of vLLM is blocks b * r to b * r + r - 1 of ours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcourier.layout import TokenSpan


@dataclass(frozen=True, slots=True)
class BlockTable:
    """One of our cache groups among vLLM's.

    Attributes:
        index: vLLM's cache group. Several of ours share one where its layers differ in shape.
        block_size: tokens in a block of vLLM's.
        kernel_blocks: blocks of ours in one of vLLM's.
        window: the group's sliding window in tokens; None if it has none.
    """

    index: int
    block_size: int
    kernel_blocks: int = 1
    window: int | None = None

    def ids(self, block_ids: Sequence[Sequence[int]], span: TokenSpan) -> list[int]:
        """Our blocks that hold what is needed of the span, as the core wants them listed.

        Args:
            block_ids: vLLM's, per group.
            span: positions held or wanted.
        """
        size = self.block_size // self.kernel_blocks
        first = span.needed(self.window, size).start // size
        stop = -(-span.stop // size)
        ratio = self.kernel_blocks
        held = block_ids[self.index][first // ratio : -(-stop // ratio)]
        before = first // ratio * ratio
        return self._ours(held)[first - before : stop - before]

    def num_needed(self, num_tokens: int) -> int:
        """vLLM's blocks that the KV of so many tokens takes at most; a window may begin and end
        within one."""
        whole = -(-num_tokens // self.block_size)
        return whole if self.window is None else min(whole, 1 + -(-self.window // self.block_size))

    def vllm_ids(self, ours: Iterable[int]) -> set[int]:
        """vLLM's blocks that blocks of ours are part of."""
        return {block // self.kernel_blocks for block in ours}

    def _ours(self, theirs: Sequence[int]) -> list[int]:
        if self.kernel_blocks == 1:
            return list(theirs)
        return [
            block * self.kernel_blocks + part
            for block in theirs
            for part in range(self.kernel_blocks)
        ]


def blocks_needed(tables: Iterable[BlockTable], num_tokens: int) -> int:
    """vLLM's blocks, of all its groups, that the KV of so many tokens takes at most."""
    groups = {table.index: table for table in tables}
    return sum(table.num_needed(num_tokens) for table in groups.values())
