"""Which target rank takes which layers and KV heads from which source rank.

Decides an exact cover of every target rank's (layer, head) cells by source ranks that hold them,
and which positions of a prompt each part needs. Cache groups are paired by the layers they hold,
so both instances may group them in their own way. Refuses to know blocks, bytes and addresses.
Both instances compute it for themselves and must agree, so the result depends on nothing but the
two arguments.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout.compatibility import require_same_model
from kvcourier.layout.geometry import CacheGeometry, GroupGeometries, TokenSpan


@dataclass(frozen=True, slots=True)
class Route:
    """One target rank takes these global layers and KV heads from one source rank.

    Attributes:
        source: rank of the instance that has the bytes.
        target: rank of the instance that wants them.
        layers: global layer indices, ascending.
        head_start: first global KV head.
        head_stop: one past the last.
        source_group: cache group of the layers on the source rank.
        target_group: cache group of the layers on the target rank.
        unit_tokens: tokens of a unit, the greatest common divisor of the block sizes: it never
            crosses a block border on either side.
        window: the target's sliding window in tokens; None if it looks at all positions.
    """

    source: Rank
    target: Rank
    layers: tuple[int, ...]
    head_start: int
    head_stop: int
    source_group: int
    target_group: int
    unit_tokens: int
    window: int | None

    def needed(self, wanted: TokenSpan) -> TokenSpan:
        """What moves where the target wants the positions of `wanted` and goes on after them."""
        return wanted.needed(self.window, self.unit_tokens)


Geometries = Mapping[Rank, GroupGeometries]


class _Place(NamedTuple):
    """Where a layer is held."""

    rank: Rank
    group: int


def route(sources: Geometries, targets: Geometries) -> tuple[Route, ...]:
    """Cover every target rank's (layer, head) cells exactly once.

    Where several source ranks hold the same cells (replicated KV), a target takes them from the
    one with the fewest cells to give so far, the lowest rank on a tie, which spreads the targets
    evenly over the replicas.

    Args:
        sources: geometries of *every* rank of the instance that has the bytes.
        targets: geometries of *every* rank of the instance that wants them.

    Returns:
        Routes in order of target rank, then group, then layer, then head.

    Raises:
        MappingError: the caches are of different models, a rank's geometry contradicts itself,
            a layer is held on one side only, or by two pipeline stages, nobody holds a head, or the
            source keeps fewer positions of a layer than the target needs.
    """
    _check_instances(sources, targets)
    holders_of_layer = _holders(sources)
    _check_same_layers(holders_of_layer, _holders(targets))
    given: Counter[Rank] = Counter()
    routes: list[Route] = []
    for target, groups in sorted(targets.items()):
        for target_group, geometry in enumerate(groups):
            for holders, layers in _stages(geometry.layers, holders_of_layer).items():
                for each in holders:
                    _check_layer(layers[0], sources[each.rank][each.group], geometry)
                for head_start, head_stop in _head_intervals(geometry, sources, holders):
                    source = min(
                        _holding(sources, holders, head_start, head_stop, layers[0]),
                        key=lambda place: (given[place.rank], place),
                    )
                    given[source.rank] += len(layers) * (head_stop - head_start)
                    held = sources[source.rank][source.group]
                    routes.append(
                        Route(
                            source.rank,
                            target,
                            layers,
                            head_start,
                            head_stop,
                            source.group,
                            target_group,
                            math.gcd(held.block_size, geometry.block_size),
                            geometry.window,
                        )
                    )
    return tuple(routes)


def routes_to(routes: Sequence[Route], target: Rank) -> tuple[Route, ...]:
    """Routes that end at one target rank: the pieces it waits for."""
    return tuple(each for each in routes if each.target == target)


def routes_from(routes: Sequence[Route], source: Rank) -> tuple[Route, ...]:
    """Routes that start at one source rank: the pieces it gives."""
    return tuple(each for each in routes if each.source == source)


def consumers_of(routes: Sequence[Route], source: Rank) -> tuple[Rank, ...]:
    """Target ranks that take anything from one source rank, ascending, each once."""
    return tuple(sorted({each.target for each in routes_from(routes, source)}))


def _check_instances(sources: Geometries, targets: Geometries) -> None:
    if not sources or not targets:
        raise MappingError(
            f"ranks: expected at least one on either side, found {len(sources)} source and "
            f"{len(targets)} target ranks"
        )
    for side, ranks in (("source", sources), ("target", targets)):
        for rank, groups in sorted(ranks.items()):
            _check_rank(f"{side} rank {rank}", groups)
        _check_stages(side, ranks)


def _check_stages(side: str, ranks: Geometries) -> None:
    """Ranks of one stage share a layer's heads, or replicate them; those of two stages do not."""
    stage_of: dict[int, int] = {}
    for rank, groups in sorted(ranks.items()):
        for layer in (layer for geometry in groups for layer in geometry.layers):
            stage = stage_of.setdefault(layer, rank.pp_rank)
            if stage != rank.pp_rank:
                raise MappingError(
                    f"layer {layer}: expected on one pipeline stage of the {side} ranks, found on "
                    f"stages {stage} and {rank.pp_rank}, which is meant?"
                )


def _check_rank(name: str, groups: GroupGeometries) -> None:
    layers = Counter(layer for geometry in groups for layer in geometry.layers)
    repeated = [layer for layer, count in layers.items() if count > 1]
    if repeated:
        raise MappingError(f"{name}: holds layer {repeated[0]} more than once, which is meant?")
    for geometry in groups:
        if not 0 <= geometry.head_start < geometry.head_stop <= geometry.num_kv_heads:
            raise MappingError(
                f"{name}: expected heads within 0 to {geometry.num_kv_heads}, "
                f"found {geometry.head_start} to {geometry.head_stop}"
            )


def _check_layer(layer: int, source: CacheGeometry, target: CacheGeometry) -> None:
    """Whether this layer holds the same on both sides, and the source enough of it."""
    try:
        require_same_model(source, target)
    except MappingError as error:
        raise MappingError(f"layer {layer}: {error}") from None
    if source.window is not None and (target.window is None or target.window > source.window):
        wanted = "all positions" if target.window is None else f"a window of {target.window}"
        raise MappingError(
            f"layer {layer}: the source keeps a sliding window of {source.window} tokens, the "
            f"target needs {wanted}; let both keep sliding windows, or neither"
        )


def _holders(ranks: Geometries) -> dict[int, tuple[_Place, ...]]:
    """Where each layer is held, ascending by rank."""
    holders: dict[int, list[_Place]] = defaultdict(list)
    for rank, groups in sorted(ranks.items()):
        for group, geometry in enumerate(groups):
            for layer in geometry.layers:
                holders[layer].append(_Place(rank, group))
    return {layer: tuple(found) for layer, found in holders.items()}


def _check_same_layers(
    source_layers: Mapping[int, object], target_layers: Mapping[int, object]
) -> None:
    one_sided = source_layers.keys() ^ target_layers.keys()
    if one_sided:
        layer = min(one_sided)
        has, lacks = ("source", "target") if layer in source_layers else ("target", "source")
        raise MappingError(
            f"layer {layer}: held by a {has} rank, but by no {lacks} rank "
            f"({len(source_layers)} source and {len(target_layers)} target layers in all)"
        )


def _stages(
    layers: Sequence[int], holders_of_layer: Mapping[int, tuple[_Place, ...]]
) -> dict[tuple[_Place, ...], tuple[int, ...]]:
    """Layers by who holds them: one set per pipeline stage and group of the sources."""
    stages: dict[tuple[_Place, ...], list[int]] = defaultdict(list)
    for layer in sorted(layers):
        stages[holders_of_layer[layer]].append(layer)
    return {holders: tuple(held) for holders, held in stages.items()}


def _head_intervals(
    target: CacheGeometry, sources: Geometries, holders: Sequence[_Place]
) -> list[tuple[int, int]]:
    """The target's heads, cut wherever a holder's range starts or stops.

    Inside such an interval all heads have the same holders.
    """
    edges = {target.head_start, target.head_stop}
    for rank, group in holders:
        edges |= {sources[rank][group].head_start, sources[rank][group].head_stop}
    inside = sorted(edge for edge in edges if target.head_start <= edge <= target.head_stop)
    return list(pairwise(inside))


def _holding(
    sources: Geometries, holders: Sequence[_Place], head_start: int, head_stop: int, layer: int
) -> list[_Place]:
    found = [
        place
        for place in holders
        if sources[place.rank][place.group].head_start <= head_start
        and head_stop <= sources[place.rank][place.group].head_stop
    ]
    if not found:
        raise MappingError(
            f"layer {layer}, heads {head_start} to {head_stop}: wanted by a target rank, "
            f"but held by no source rank"
        )
    return found
