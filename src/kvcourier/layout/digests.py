"""What a share of a prompt's KV sums up to, wherever it lies.

Decides which cells are looked at, what each weighs, and the sum. Each side computes it from its own
cache alone: a cell weighs what its layer, plane, position and head make it weigh, so block sizes,
layouts, ranks and the mapping between two caches leave no trace in it, and a mistake in one of them
shows. Refuses to know who asks, and reads no memory: `transport.copying` does.

A cell is one head of one token in one plane. With `x` its bytes as words of 64 bits, little endian
and padded with zeros, `w` a weight of a word and `c` one of a cell, all odd and drawn from the
seed, the sum over all cells, modulo 2**64, is

    c * (1 + w[0] * fold(x[0]) + w[1] * fold(x[1]) + ...)      fold(x) = x ^ (x >> 32)

It does not depend on the order, so parts add up. The 1 makes a cell of zeros count. The weights are
odd, so one flipped bit always changes the sum; without `fold`, two flipped top bits never would. It
is no cryptographic digest: who can choose the bytes can choose them to fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcourier.config import Integrity
from kvcourier.errors import MappingError
from kvcourier.layout.blocks import BlockRun, locate
from kvcourier.layout.geometry import CacheGeometry, GroupCache, Int64Array, TokenSpan
from kvcourier.layout.packing import PackedSide
from kvcourier.layout.plan import strides_of
from kvcourier.layout.planes import planes_of

UInt64Array = npt.NDArray[np.uint64]

WORD_BYTES = 8
GROUP_TOKENS = 16
"""A sample has one position of each so many."""
MOST_CLASSES = 8
"""A sample has each of its positions in one plane of at most so many."""
GROUPS_PER_CLASS = 16
"""A class of planes for each so many groups of positions: few of a short prompt, which is looked at
more closely."""

_STEP = 0x9E3779B97F4A7C15
_ROWS, _TOKENS, _HEADS, _WORDS, _CHOICE = range(1, 6)


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a prompt's KV, by what it is and not by where it lies: global layers and KV heads,
    absolute positions."""

    layers: tuple[int, ...]
    head_start: int
    head_stop: int
    span: TokenSpan


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Cells of one cache: all combinations of some planes, positions and heads.

    Attributes:
        side: where they lie. Its rows are planes, its units positions, its pieces heads.
        row_keys: shape [rows]; with the next two, what a cell weighs.
        token_keys: shape [units].
        head_keys: shape [pieces].
        word_weights: what each word of a cell weighs, shape [words].
    """

    side: PackedSide
    row_keys: UInt64Array
    token_keys: UInt64Array
    head_keys: UInt64Array
    word_weights: UInt64Array

    def weights(self, start: int, stop: int) -> UInt64Array:
        """What the cells `start` to `stop` weigh, numbered in canonical order (`packing`)."""
        _, num_tokens, num_heads = self.side.shape
        per_row = num_tokens * num_heads
        keys = []
        for row in range(start // per_row, -(-stop // per_row)):
            low = max(start - row * per_row, 0)
            high = min(stop - row * per_row, per_row)
            first = low // num_heads
            tokens = self.token_keys[first : -(-high // num_heads), None]
            whole = (tokens + self.head_keys).ravel()
            keys.append(whole[low - first * num_heads : high - first * num_heads])
            keys[-1] += self.row_keys[row]
        weights: UInt64Array = mixed(np.concatenate(keys)) | np.uint64(1)
        return weights


def cells_of(
    cache: GroupCache, blocks: BlockRun, share: Share, integrity: Integrity, seed: int
) -> tuple[Cells, ...]:
    """Find the cells of a share that are looked at, in one cache that holds it.

    Two caches that hold a share give the same cells, in terms of layers, planes, positions and
    heads. With ALL these are all. With SAMPLE they are one position of each `GROUP_TOKENS`, with
    all heads, in all planes of a short prompt and at least in every `MOST_CLASSES`-th of any, so
    that every plane and every group of positions is looked at; which ones, the seed says.

    Args:
        cache: the group of a cache that holds the layers.
        blocks: the request's blocks in it.
        share: what is looked at.
        integrity: SAMPLE or ALL.
        seed: of the weights and of the sample; not negative.

    Raises:
        MappingError: the cache, or the blocks, do not hold the share.
    """
    _check(cache.geometry, share)
    geometry, planes = cache.geometry, cache.geometry.kind.num_planes
    rows = np.array([geometry.layers.index(layer) for layer in share.layers], np.int64)
    layers = np.array(share.layers, np.int64)
    row_names = (layers[:, None] * planes + np.arange(planes)).ravel()
    tokens = range(share.span.start, share.span.stop)
    places = locate("digest", cache, blocks, tokens, 1)
    held = planes_of("digest", cache, rows)
    strides = strides_of(geometry)
    heads = np.arange(share.head_start, share.head_stop, dtype=np.int64)
    inner = places.unit_in_block
    slots = np.zeros_like(places.block_of_unit) if inner is None else inner
    row_keys, head_keys = _drawn(seed, _ROWS, row_names), _drawn(seed, _HEADS, heads)
    num_words = -(-geometry.cell_bytes // WORD_BYTES)
    word_weights = _drawn(seed, _WORDS, np.arange(num_words)) | np.uint64(1)
    found = []
    for chosen_rows, chosen in _choices(len(row_names), share.span, integrity, seed):
        at = chosen - share.span.start
        side = PackedSide(
            row_address=held.address[chosen_rows],
            row_block_stride_bytes=held.block_stride_bytes[chosen_rows],
            piece_offset_bytes=(heads - geometry.head_start) * strides.head,
            piece_bytes=geometry.cell_bytes,
            block_of_unit=places.block_of_unit[at],
            unit_in_block=slots[at],
            unit_stride_bytes=strides.token,
            memory=held.memory,
            device_id=held.device_id,
        )
        found.append(
            Cells(
                side,
                row_keys[chosen_rows],
                _drawn(seed, _TOKENS, chosen),
                head_keys,
                word_weights,
            )
        )
    return tuple(found)


def digest_of(words: UInt64Array, weights: UInt64Array, word_weights: UInt64Array) -> int:
    """The sum over some cells, modulo 2**64.

    Args:
        words: their bytes, shape [cells, words].
        weights: what each cell weighs, shape [cells].
        word_weights: shape [words].
    """
    folded = words >> np.uint64(32)
    folded ^= words
    values = np.einsum("ij,j->i", folded, word_weights)
    values += np.uint64(1)
    return int(np.einsum("i,i->", values, weights))


def added(digests: Sequence[int]) -> int:
    """The sum over cells of which these are the sums of parts."""
    return sum(digests) % (1 << 64)


def mixed(words: UInt64Array) -> UInt64Array:
    """Each word scattered over all its bits (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scattered: UInt64Array = words ^ (words >> np.uint64(31))
    return scattered


def _check(geometry: CacheGeometry, share: Share) -> None:
    missing = set(share.layers).difference(geometry.layers)
    if missing or not share.layers or len(set(share.layers)) < len(share.layers):
        raise MappingError(
            f"share: expected some of the layers {geometry.layers}, each once, found {share.layers}"
        )
    if not geometry.head_start <= share.head_start < share.head_stop <= geometry.head_stop:
        raise MappingError(
            f"share: expected some of the heads {geometry.head_start} to {geometry.head_stop}, "
            f"found {share.head_start} to {share.head_stop}"
        )
    if not 0 <= share.span.start < share.span.stop:
        raise MappingError(
            f"share: expected 0 <= start < stop, found {share.span.start} to {share.span.stop}"
        )


def _choices(
    num_rows: int, span: TokenSpan, integrity: Integrity, seed: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Planes, by number, and the positions that are looked at in each of them."""
    rows = np.arange(num_rows, dtype=np.int64)
    if integrity is Integrity.ALL:
        yield rows, np.arange(span.start, span.stop, dtype=np.int64)
        return
    groups = np.arange(span.start // GROUP_TOKENS, -(-span.stop // GROUP_TOKENS), dtype=np.int64)
    low = np.maximum(groups * GROUP_TOKENS, span.start)
    high = np.minimum((groups + 1) * GROUP_TOKENS, span.stop)
    drawn = _drawn(seed, _CHOICE, groups)
    # A product of 32 bits each: drawn evenly from the group's positions.
    within = ((drawn >> np.uint64(32)) * (high - low).astype(np.uint64)) >> np.uint64(32)
    positions = low + within.astype(np.int64)
    num_classes = min(MOST_CLASSES, num_rows, -(-len(groups) // GROUPS_PER_CLASS))
    for number in range(num_classes):
        turn = (np.arange(len(groups)) + number + seed) % num_classes == 0
        yield rows[number::num_classes], positions[turn]


def _drawn(seed: int, what: int, numbers: Int64Array) -> UInt64Array:
    """A word for each number, drawn from the seed; others for another kind of thing."""
    start = mixed(np.array([seed * 8 + what], np.uint64))
    return mixed(start + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP))
