"""Which tiles of a transfer have landed.

Decides completeness by coverage, not by counting notices: a duplicate counts once, a foreign
tile not at all. Refuses to know who sent what. A tile is a set of layers times a span of tokens.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from kvcourier.layout.geometry import TokenSpan


class Coverage:
    """Landed token spans of each expected layer."""

    def __init__(self, layers: Iterable[int], span: TokenSpan) -> None:
        self._span = span
        self._open = {layer: [(span.start, span.stop)] for layer in layers if len(span)}
        """Per layer, the disjoint spans still missing, in order; covered layers are removed."""
        self._layers = frozenset(self._open)

    @property
    def complete(self) -> bool:
        """Whether every expected tile has landed."""
        return not self._open

    def expects(self, span: TokenSpan, layers: Iterable[int] | None = None) -> bool:
        """Whether a tile (None: all expected layers) is wanted, landed or not."""
        named = self._layers if layers is None else frozenset(layers)
        inside = self._span.start <= span.start < span.stop <= self._span.stop
        return named <= self._layers and inside

    def land(self, span: TokenSpan, layers: Iterable[int] | None = None) -> bool:
        """A tile has landed (None: all expected layers); False if any of it was not expected."""
        if not self.expects(span, layers):
            return False
        named = self._layers if layers is None else frozenset(layers)
        for layer in named & self._open.keys():
            missing = _subtract(self._open[layer], span)
            if missing:
                self._open[layer] = missing
            else:
                del self._open[layer]
        return True


def _subtract(spans: list[tuple[int, int]], taken: TokenSpan) -> list[tuple[int, int]]:
    """Disjoint ordered spans without what `taken` covers."""
    first = bisect_right([stop for _, stop in spans], taken.start)
    last = bisect_left([start for start, _ in spans], taken.stop)
    middle = []
    for start, stop in spans[first:last]:
        if start < taken.start:
            middle.append((start, taken.start))
        if taken.stop < stop:
            middle.append((taken.stop, stop))
    return spans[:first] + middle + spans[last:]
