"""KV content that names itself: a cell is a function of all tokens so far, layer, plane and head.

So comparing bytes finds any shifted, stale or foreign block, and equal prefixes have equal KV, as
in a real model. A cell is 8 bytes long (`CELL_BYTES`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcourier.layout import CacheGeometry

CELL_BYTES = 8
Cells = npt.NDArray[np.uint64]
_WORD = (1 << 64) - 1


def prefix_hashes(tokens: Iterable[int], before: int = 0x9E3779B97F4A7C15) -> list[int]:
    """For each token a number that depends on it and on all tokens before it.

    `before` continues from the last of an earlier part.
    """
    hashes = []
    for token in tokens:
        before = _mixed(before * 0x5851F42D4C957F2D + token + 0x14057B7EF767814F)
        hashes.append(before)
    return hashes


def next_token(prefix_hash: int, vocab_size: int) -> int:
    """What the model says after a prefix."""
    return _mixed(prefix_hash ^ 0xA0761D6478BD642F) % vocab_size


def cells(geometry: CacheGeometry, hashes: Sequence[int]) -> Cells:
    """The KV of these positions: shape [layers, planes, positions, heads], this rank's share."""
    layers = np.array(geometry.layers, np.uint64)[:, None, None, None]
    planes = np.arange(geometry.kind.num_planes, dtype=np.uint64)[None, :, None, None]
    heads = np.arange(geometry.head_start, geometry.head_stop, dtype=np.uint64)
    place = (layers * np.uint64(2) + planes) * np.uint64(4096) + heads
    positions = np.array(hashes, np.uint64)[None, None, :, None]
    with np.errstate(over="ignore"):
        return _mixed_cells(positions + (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def _mixed(word: int) -> int:
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _mixed_cells(words: npt.NDArray[Any]) -> Cells:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Cells = words ^ (words >> np.uint64(31))
    return mixed
