"""From a post command to descriptors.

Decides nothing: it keeps one mapping plan for each route and binds block ids to it. Refuses to
know requests and handles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcourier.core.commands import PostRead, PostWrite
from kvcourier.core.events import BlockGroups
from kvcourier.core.wants import WriteTarget
from kvcourier.layout import (
    BlockRun,
    BoundPieces,
    Int64Array,
    MappingPlan,
    PackedSide,
    RankCache,
    Route,
    bind,
    estimate_pieces,
    pack_source,
    pack_target,
    plan_mapping,
)
from kvcourier.transport.interface import Descriptors


@dataclass(frozen=True, slots=True, eq=False)
class LocalAndRemote:
    """The two descriptor lists of one operation; entry i pairs with entry i."""

    local: Descriptors
    remote: Descriptors
    num_bytes: int


class MappingCache:
    """Plans between our rank's cache and one peer rank's."""

    def __init__(self, own: RankCache, peer: RankCache) -> None:
        self._own = own
        self._peer = peer
        self._plans: dict[tuple[bool, Route], MappingPlan] = {}

    def for_write(self, command: PostWrite) -> LocalAndRemote:
        """Descriptors of a WRITE. Raises MappingError: the block ids do not fit the caches."""
        own = BlockRun(_ids(command.own_block_ids), 0)
        peer = BlockRun(_ids(command.peer_block_ids), command.peer_first_token)
        plan = self._plan(command.route, writes=True)
        pieces = bind(plan, self._own, self._peer, own, peer, command.span)
        source, target = _sides(pieces)
        return LocalAndRemote(source, target, pieces.num_bytes)

    def for_read(self, command: PostRead) -> LocalAndRemote:
        """Descriptors of a READ. Raises MappingError: the block ids do not fit the caches."""
        own = BlockRun(_ids(command.own_block_ids), command.own_first_token)
        peer = BlockRun(_ids(command.peer_block_ids), 0)
        plan = self._plan(command.route, writes=False)
        pieces = bind(plan, self._peer, self._own, peer, own, command.span)
        source, target = _sides(pieces)
        return LocalAndRemote(target, source, pieces.num_bytes)

    def estimate_pieces(self, command: PostWrite) -> int:
        """How many descriptors `for_write` would make. Raises MappingError."""
        own = BlockRun(_ids(command.own_block_ids), 0)
        peer = BlockRun(_ids(command.peer_block_ids), command.peer_first_token)
        plan = self._plan(command.route, writes=True)
        layers = command.notice.layers
        return estimate_pieces(plan, self._own, self._peer, own, peer, command.span, layers)

    def pack_source(self, command: PostWrite) -> list[PackedSide]:
        """Our side of a packed WRITE, as `for_write` binds it. Raises MappingError."""
        plan = self._plan(command.route, writes=True)
        own = BlockRun(_ids(command.own_block_ids), 0)
        return [pack_source(plan, self._own, own, command.span, command.notice.layers)]

    def pack_target(self, target: WriteTarget, layers: Sequence[int] | None) -> list[PackedSide]:
        """Our side of a peer's packed WRITE. Raises MappingError."""
        plan = self._plan(target.route, writes=False)
        own = BlockRun(_ids(target.block_ids), target.first_token)
        return [pack_target(plan, self._own, own, target.span, layers)]

    def _plan(self, route: Route, *, writes: bool) -> MappingPlan:
        # Two ranks of equal position may have one and the same route in both directions.
        key = (writes, route)
        if key not in self._plans:
            source, target = (self._own, self._peer) if writes else (self._peer, self._own)
            self._plans[key] = plan_mapping(source.geometry, target.geometry, route)
        return self._plans[key]


def _ids(block_ids: BlockGroups) -> Int64Array:
    # One cache group is what registrations and params are checked for before they get here.
    return np.array(block_ids[0], dtype=np.int64)


def _sides(pieces: BoundPieces) -> tuple[Descriptors, Descriptors]:
    return (
        Descriptors(pieces.source_table, pieces.source_memory),
        Descriptors(pieces.target_table, pieces.target_memory),
    )
