"""Blocks that belong to the endpoint, until it releases them.

Decides which loans that are kept, for somebody who may come, are called back when blocks run out:
the oldest. Refuses to know sequences, and who is short of blocks (`scheduler`).
"""

from collections.abc import Iterator, Mapping

from kvcourier.engine.blocks import BlockPool
from kvcourier.ids import BlockId, RequestId


class Loans(Mapping[RequestId, list[BlockId]]):
    """All loans of one pool, by the name that the endpoint knows them by; not thread-safe."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[RequestId, list[BlockId]] = {}
        self._kept: dict[RequestId, None] = {}
        self._called_back: dict[RequestId, None] = {}
        self._to_tell: list[RequestId] = []

    def __getitem__(self, name: RequestId) -> list[BlockId]:
        return self._blocks[name]

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def kept(self) -> list[list[BlockId]]:
        """The blocks of each loan that is kept and not called back, oldest first.

        May be read from any thread.
        """
        names, blocks = list(self._kept), dict(self._blocks)
        return [blocks[name] for name in names if name in blocks]

    def lend(self, name: RequestId, blocks: list[BlockId]) -> None:
        """Blocks now belong to the endpoint, until `take_back`."""
        assert name not in self._blocks, f"{name} has blocks on loan already"
        self._blocks[name] = blocks

    def keep(self, name: RequestId, blocks: list[BlockId]) -> None:
        """Blocks now belong to the endpoint, until `take_back` or until they are called back."""
        self.lend(name, blocks)
        self._kept[name] = None

    def filled(self, name: RequestId) -> list[BlockId]:
        """The endpoint has released a loan that somebody waits for: the blocks are the caller's."""
        return self._blocks.pop(name)

    def take_back(self, name: RequestId) -> bool:
        """The endpoint has released a loan that nobody waits for; False if there was none."""
        self._kept.pop(name, None)
        self._called_back.pop(name, None)
        blocks = self._blocks.pop(name, None)
        if blocks is not None:
            self._pool.release(blocks)
        return blocks is not None

    # Calling back.

    @property
    def num_coming(self) -> int:
        """Blocks that will be free when what was called back is released."""
        return self._pool.num_freed_by(
            [block for name in self._called_back for block in self._blocks[name]]
        )

    def call_back(self, num_needed: int) -> bool:
        """Call kept loans back until so many blocks are free or will be; False if none is left."""
        while num_needed > self._pool.num_free + self.num_coming:
            if not self._kept:
                return False
            name = next(iter(self._kept))
            del self._kept[name]
            self._called_back[name] = None
            self._to_tell.append(name)
        return True

    def take_called_back(self) -> list[RequestId]:
        """Which kept loans are needed back; it is for the endpoint to release them."""
        called, self._to_tell = self._to_tell, []
        return called
