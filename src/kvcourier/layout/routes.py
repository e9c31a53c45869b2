"""Which target rank takes which layers and KV heads from which source rank.

Decides an exact cover of every target rank's (layer, head) cells by source ranks that hold them.
Refuses to know blocks, bytes and addresses. Both instances compute it for themselves and must
agree, so the result depends on nothing but the two arguments.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvcourier.errors import MappingError
from kvcourier.ids import Rank
from kvcourier.layout.compatibility import require_same_model
from kvcourier.layout.geometry import CacheGeometry


@dataclass(frozen=True, slots=True)
class Route:
    """One target rank takes these global layers and KV heads from one source rank.

    Attributes:
        source: rank of the instance that has the bytes.
        target: rank of the instance that wants them.
        layers: global layer indices, ascending.
        head_start: first global KV head.
        head_stop: one past the last.
    """

    source: Rank
    target: Rank
    layers: tuple[int, ...]
    head_start: int
    head_stop: int


Geometries = Mapping[Rank, CacheGeometry]


def route(sources: Geometries, targets: Geometries) -> tuple[Route, ...]:
    """Cover every target rank's (layer, head) cells exactly once.

    Where several source ranks hold the same cells (replicated KV), a target takes them from the
    one with the fewest cells to give so far, the lowest rank on a tie, which spreads the targets
    evenly over the replicas.

    Args:
        sources: geometry of *every* rank of the instance that has the bytes.
        targets: geometry of *every* rank of the instance that wants them.

    Returns:
        Routes in order of target rank, then layer, then head.

    Raises:
        MappingError: the caches are of different models, a rank's geometry contradicts itself,
            a layer is held on one side only, or nobody holds a head.
    """
    _check_instances(sources, targets)
    holders_of_layer = _holders(sources)
    _check_same_layers(holders_of_layer, _holders(targets))
    given: Counter[Rank] = Counter()
    routes: list[Route] = []
    for target, geometry in sorted(targets.items()):
        for holders, layers in _stages(geometry.layers, holders_of_layer).items():
            for head_start, head_stop in _head_intervals(geometry, sources, holders):
                source = min(
                    _holding(sources, holders, head_start, head_stop, layers[0]),
                    key=lambda rank: (given[rank], rank),
                )
                given[source] += len(layers) * (head_stop - head_start)
                routes.append(Route(source, target, layers, head_start, head_stop))
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
    reference = sources[min(sources)]
    for side, ranks in (("source", sources), ("target", targets)):
        for rank, geometry in sorted(ranks.items()):
            _check_rank(f"{side} rank {rank}", geometry)
            require_same_model(reference, geometry)


def _check_rank(name: str, geometry: CacheGeometry) -> None:
    repeated = [layer for layer, count in Counter(geometry.layers).items() if count > 1]
    if repeated:
        raise MappingError(f"{name}: holds layer {repeated[0]} more than once, which is meant?")
    if not 0 <= geometry.head_start < geometry.head_stop <= geometry.num_kv_heads:
        raise MappingError(
            f"{name}: expected heads within 0 to {geometry.num_kv_heads}, "
            f"found {geometry.head_start} to {geometry.head_stop}"
        )


def _holders(ranks: Geometries) -> dict[int, tuple[Rank, ...]]:
    """Ranks that hold each layer, ascending."""
    holders: dict[int, list[Rank]] = defaultdict(list)
    for rank, geometry in sorted(ranks.items()):
        for layer in geometry.layers:
            holders[layer].append(rank)
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
    layers: Sequence[int], holders_of_layer: Mapping[int, tuple[Rank, ...]]
) -> dict[tuple[Rank, ...], tuple[int, ...]]:
    """Layers grouped by who holds them: one group per pipeline stage of the sources."""
    stages: dict[tuple[Rank, ...], list[int]] = defaultdict(list)
    for layer in sorted(layers):
        stages[holders_of_layer[layer]].append(layer)
    return {holders: tuple(held) for holders, held in stages.items()}


def _head_intervals(
    target: CacheGeometry, sources: Geometries, holders: Sequence[Rank]
) -> list[tuple[int, int]]:
    """The target's heads, cut wherever a holder's range starts or stops.

    Inside such an interval all heads have the same holders.
    """
    edges = {target.head_start, target.head_stop}
    for rank in holders:
        edges |= {sources[rank].head_start, sources[rank].head_stop}
    inside = sorted(edge for edge in edges if target.head_start <= edge <= target.head_stop)
    return list(pairwise(inside))


def _holding(
    sources: Geometries, holders: Sequence[Rank], head_start: int, head_stop: int, layer: int
) -> list[Rank]:
    found = [
        rank
        for rank in holders
        if sources[rank].head_start <= head_start and head_stop <= sources[rank].head_stop
    ]
    if not found:
        raise MappingError(
            f"layer {layer}, heads {head_start} to {head_stop}: wanted by a target rank, "
            f"but held by no source rank"
        )
    return found
