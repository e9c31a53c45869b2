"""After which layers of a step their KV is sent on.

Decides how many layers make a part that is worth its cost. Each part costs the threads of both
couriers about a millisecond of Python, whatever its size; on P that is taken from the thread that
launches the kernels of an eager prefill. Pure.
"""

from collections.abc import Mapping, Sequence

from kvcourier.config import MIB
from kvcourier.core.deliveries import LEAST_SHARE
from kvcourier.layout import CacheGeometry, MemoryKind

LEAST_BYTES: Mapping[MemoryKind, int] = {MemoryKind.VRAM: 256 * MIB, MemoryKind.DRAM: 1}
"""What a part must hold at least, by where the cache lies: NVLink moves so much in the time that a
part costs in Python; between processes on a CPU every part pays."""

MOST_PARTS = round(1 / LEAST_SHARE)
"""The core sends nothing smaller while the prompt is computed, so nothing smaller is told of."""


class LayerPace:
    """Follows the layers of one step.

    Args:
        geometries: the caches that the layers are in, each with some of them.
        least_bytes: what a part must hold at least to be sent by itself.
    """

    def __init__(self, geometries: Sequence[CacheGeometry], least_bytes: int) -> None:
        self._num_layers = sum(len(each.layers) for each in geometries)
        self._token_bytes = max(map(_token_bytes, geometries))
        self._least_bytes = least_bytes
        self._written: list[int] = []

    def begin(self) -> None:
        """A step begins."""
        self._written = []

    def after(self, layer: int, prompts_tokens: Sequence[int]) -> tuple[int, ...]:
        """A layer's kernels were launched, for prompts of so many tokens.

        Returns the layers to tell of now: all since the last time, or none yet.
        """
        self._written.append(layer)
        # Exact for the longest prompt; for others core.deliveries waits for more.
        layer_bytes = max(prompts_tokens) * self._token_bytes
        stride = max(-(-self._num_layers // MOST_PARTS), -(-self._least_bytes // layer_bytes))
        if len(self._written) < stride:
            return ()
        told, self._written = tuple(self._written), []
        return told


def _token_bytes(geometry: CacheGeometry) -> int:
    """Bytes of one token in one layer."""
    return geometry.block_bytes // geometry.block_size * geometry.kind.num_planes
