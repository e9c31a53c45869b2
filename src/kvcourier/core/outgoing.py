"""What of one route is still to be sent, while the prompt is computed and after.

Decides which tiles are ready, and where they begin and end. Refuses to know who is told and what
is in flight. A tile is a set of layers times a span of tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcourier.layout.geometry import TokenSpan
from kvcourier.layout.routes import Route


class Tile(NamedTuple):
    """Positions `span` of these layers, which are global indices, ascending."""

    span: TokenSpan
    layers: tuple[int, ...]


class Outgoing:
    """One route of a delivery, in one epoch. Every tile is taken once."""

    def __init__(self, route: Route, span: TokenSpan) -> None:
        """`span` is what moves of the route in all."""
        self._route = route
        self._span = span
        self._next = dict.fromkeys(route.layers, span.start)
        """Per layer, the first position that is not taken."""

    @property
    def complete(self) -> bool:
        """Whether everything is taken."""
        return all(position >= self._span.stop for position in self._next.values())

    def ready(self, written: Callable[[int], int]) -> list[Tile]:
        """Tiles that could be taken, the largest there are.

        `written` says how many positions of a layer are written, from 0 on.
        """
        stops = {layer: self._stop(written(layer)) for layer in self._next}
        tiles: dict[TokenSpan, list[int]] = {}
        for layer, start in self._next.items():
            if start < stops[layer]:
                tiles.setdefault(TokenSpan(start, stops[layer]), []).append(layer)
        return [Tile(span, tuple(layers)) for span, layers in tiles.items()]

    def share(self, tiles: Sequence[Tile]) -> float:
        """How much of all that moves these are."""
        cells = sum(len(tile.span) * len(tile.layers) for tile in tiles)
        return cells / (len(self._span) * len(self._next))

    def completed_by(self, tiles: Sequence[Tile]) -> bool:
        """Whether nothing is left to come after these."""
        left = sum(max(0, self._span.stop - start) for start in self._next.values())
        return left == sum(len(tile.span) * len(tile.layers) for tile in tiles)

    def take(self, tile: Tile) -> None:
        """This tile, one of those ready, is sent."""
        for layer in tile.layers:
            self._next[layer] = tile.span.stop

    def _stop(self, num_written: int) -> int:
        """Whole units move, and only the prompt's last one may be partly computed: a tile that
        ended inside another would have no successor that begins there."""
        if num_written >= self._span.stop:
            return self._span.stop
        return num_written - num_written % self._route.unit_tokens
