"""Digests that are being taken of one rank's own blocks, for either side.

Decides which operation is which share's, and when all shares of a question are summed up. Refuses
to know what they are compared with. A digest only reads: it is dropped, and not waited for, when
its blocks are given back.
"""

from collections.abc import Sequence

from kvcourier.config import Integrity
from kvcourier.core.commands import Abandon, TakeDigest
from kvcourier.core.events import BlockGroups, OperationId
from kvcourier.core.workspace import Owner, Workspace
from kvcourier.layout.digests import Share
from kvcourier.layout.geometry import TokenSpan

GroupShare = tuple[int, Share]
"""A share, and the cache group of ours that holds it."""


class Digests:
    """All that one side has under way, by owner."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._taken: dict[Owner, dict[OperationId, int | None]] = {}

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._taken

    def take(
        self,
        owner: Owner,
        block_ids: BlockGroups,
        held: TokenSpan,
        shares: Sequence[GroupShare],
        integrity: Integrity,
        seed: int,
    ) -> None:
        """Begin, in place of what is under way for this owner."""
        self.drop(owner)
        taken: dict[OperationId, int | None] = {}
        self._taken[owner] = taken
        for group, share in shares:
            operation_id = self._space.flights.launch(owner)
            taken[operation_id] = None
            self._space.emit(
                TakeDigest(operation_id, group, block_ids, held, share, integrity, seed)
            )

    def took(self, owner: Owner, operation_id: OperationId, digest: int) -> list[int] | None:
        """One is there; all of them, in the order of their shares, with the last."""
        taken = self._taken[owner]
        taken[operation_id] = digest
        all_taken = [each for each in taken.values() if each is not None]
        if len(all_taken) < len(taken):
            return None
        del self._taken[owner]
        return all_taken

    def drop(self, owner: Owner) -> None:
        """Nobody needs them; unknown owners are fine."""
        if self._taken.pop(owner, None) is None:
            return
        for operation_id in sorted(self._space.flights.of(owner)):
            self._space.emit(Abandon(operation_id))
            self._space.flights.land(operation_id)
