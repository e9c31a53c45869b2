"""From a post command to descriptors.

Decides nothing: it keeps one mapping plan for each route and binds block ids to it. Refuses to
know requests and handles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcourier.core.commands import PostRead, PostWrite
from kvcourier.core.wants import WriteTarget
from kvcourier.layout import (
    BlockRun,
    BoundPieces,
    GroupCache,
    MappingPlan,
    PackedSide,
    RankCache,
    Route,
    TokenSpan,
    bind,
    block_run,
    estimate_pieces,
    pack_source,
    pack_target,
    plan_mapping,
    units_of,
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
        pieces = bind(*self._bound(command), _layers(command))
        source, target = _sides(pieces)
        return LocalAndRemote(source, target, pieces.num_bytes)

    def for_read(self, command: PostRead) -> LocalAndRemote:
        """Descriptors of a READ. Raises MappingError: the block ids do not fit the caches."""
        pieces = bind(*self._bound(command))
        source, target = _sides(pieces)
        return LocalAndRemote(target, source, pieces.num_bytes)

    def estimate_pieces(self, command: PostWrite | PostRead) -> int:
        """How many descriptors `for_write` or `for_read` would make. Raises MappingError."""
        return estimate_pieces(*self._bound(command), _layers(command))

    def num_bytes(self, command: PostWrite | PostRead) -> int:
        """How many bytes would move. Raises MappingError."""
        plan, *_, span = self._bound(command)
        return len(units_of(span, plan.unit_tokens)) * plan.bytes_per_unit

    def pack_source(self, command: PostWrite) -> list[PackedSide]:
        """Our side of a packed WRITE, as `for_write` binds it. Raises MappingError."""
        plan, source, _, blocks, _, span = self._bound(command)
        return [pack_source(plan, source, blocks, span, command.notice.layers)]

    def pack_target(self, target: WriteTarget, layers: Sequence[int] | None) -> list[PackedSide]:
        """Our side of a peer's packed WRITE. Raises MappingError."""
        route, group = target.route, target.route.target_group
        plan = self._plan(route, self._peer, self._own, writes=False)
        blocks = block_run("target", self._own, group, target.block_ids, target.wanted)
        return [pack_target(plan, self._own.groups[group], blocks, target.span, layers)]

    def _bound(
        self, command: PostWrite | PostRead
    ) -> tuple[MappingPlan, GroupCache, GroupCache, BlockRun, BlockRun, TokenSpan]:
        """What `bind` and `estimate_pieces` are given first."""
        route, writes = command.route, isinstance(command, PostWrite)
        source, target = (self._own, self._peer) if writes else (self._peer, self._own)
        ids = command.own_block_ids, command.peer_block_ids
        source_ids, target_ids = ids if writes else reversed(ids)
        held = TokenSpan(0, command.num_held)
        return (
            self._plan(route, source, target, writes=writes),
            source.groups[route.source_group],
            target.groups[route.target_group],
            block_run("source", source, route.source_group, source_ids, held),
            block_run("target", target, route.target_group, target_ids, command.span),
            command.moved,
        )

    def _plan(
        self, route: Route, source: RankCache, target: RankCache, *, writes: bool
    ) -> MappingPlan:
        # Two ranks of equal position may have one and the same route in both directions.
        key = (writes, route)
        if key not in self._plans:
            self._plans[key] = plan_mapping(
                source.groups[route.source_group].geometry,
                target.groups[route.target_group].geometry,
                route,
            )
        return self._plans[key]


def _layers(command: PostWrite | PostRead) -> list[int] | None:
    """The layers that move; None for all of the route."""
    return command.notice.layers if isinstance(command, PostWrite) else None


def _sides(pieces: BoundPieces) -> tuple[Descriptors, Descriptors]:
    return (
        Descriptors(pieces.source_table, pieces.source_memory),
        Descriptors(pieces.target_table, pieces.target_memory),
    )
