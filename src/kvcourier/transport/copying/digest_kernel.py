# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The sum over cells on a GPU; with `kernel` the only file that imports triton.

Decides how threads share the cells of a part. Refuses to know streams and events, and trusts its
numbers: `bounds` has checked them. What is summed up is `layout.digests.digest_of`.

Where a cell lies is computed from the table that `kernel` describes, with a unit for each position
and an offset for each head. What it weighs comes from the keys, one number each:

    [rows] [units] [offsets]   what a cell's weight is mixed from
    [words]                    what each word of a cell weighs
"""

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from kvcourier.transport.copying.kernel import place

PARTS = {8: tl.uint64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}

PROGRAM_WORDS = 1024
"""Words that a program sums up at a time: with its one warp, 32 of each thread. On an H200 that
reads 3.6 TB/s; as many in more warps read less, other numbers of words a thread much less."""
_NUM_WARPS = 1
_MOST_WORDS = 128


@triton.jit
def mixed(words):
    """`layout.digests.mixed`."""
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)


@triton.jit(
    do_not_specialize=[
        "first_cell",
        "num_cells",
        "num_rows",
        "num_units",
        "num_offsets",
        "parts_per_cell",
    ]
)
def sum_cells(
    table,
    keys,
    sums,
    first_cell,
    num_cells,
    num_rows,
    num_units,
    num_offsets,
    parts_per_cell,
    NUM_WORDS: tl.constexpr,
    PART: tl.constexpr,
    PART_BYTES: tl.constexpr,
    PARTS_PER_WORD: tl.constexpr,
    CELLS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Sum up `CELLS` cells per program; each program has a number of its own in `sums`.

    Args:
        table: int64 tensor of the segment, see `kernel`.
        keys: int64 tensor, see above.
        sums: int64 tensor with a number for each program.
        first_cell: number of the part's first cell in its segment.
        num_cells: cells of the part.
        num_rows: rows of the segment.
        num_units: positions of the segment.
        num_offsets: heads of the segment.
        parts_per_cell: pieces of `PART` that a cell consists of.
        NUM_WORDS: words of a cell.
        PART: integer type that is loaded at a time; every address is a multiple of its size.
        PART_BYTES: that size.
        PARTS_PER_WORD: as many make a word.
        CELLS: cells of a program, a power of two.
        WORDS: words of a cell that are summed up at a time, a power of two.
    """
    cell_of_part = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    present = cell_of_part < num_cells
    cell = first_cell + cell_of_part
    row, unit, offset, address = place(table, cell, num_units, num_offsets, present)

    key = tl.load(keys + row, mask=present, other=0)
    key += tl.load(keys + num_rows + unit, mask=present, other=0)
    key += tl.load(keys + num_rows + num_units + offset, mask=present, other=0)
    weight = mixed(key.to(tl.uint64)) | 1
    word_weights = keys + num_rows + num_units + num_offsets

    value = tl.full([CELLS], 1, tl.int64)
    cells = address.to(tl.pointer_type(PART))[:, None]
    for first_word in tl.static_range(0, NUM_WORDS, WORDS):
        word = first_word + tl.arange(0, WORDS)[None, :]
        bits = tl.zeros([CELLS, WORDS], tl.uint64)
        for number in tl.static_range(PARTS_PER_WORD):
            at = word * PARTS_PER_WORD + number
            here = present[:, None] & (at < parts_per_cell)
            part = tl.load(cells + at, mask=here, other=0).to(tl.uint64)
            bits = bits | (part << (8 * PART_BYTES * number))
        folded = (bits ^ (bits >> 32)).to(tl.int64, bitcast=True)
        weights = tl.load(word_weights + word, mask=word < NUM_WORDS, other=0)
        value += tl.sum(folded * weights, axis=1)
    weighed = value * weight.to(tl.int64, bitcast=True)
    total = tl.sum(tl.where(present, weighed, 0), axis=0)
    tl.store(sums + tl.program_id(0), total)


def num_programs(num_cells: int, num_words: int) -> int:
    """Numbers that `start` needs room for."""
    cells, _ = _shape(num_words)
    return -(-num_cells // cells)


def start(
    table,
    keys,
    sums,
    cells: range,
    shape: tuple[int, int, int],
    *,
    cell_bytes: int,
    num_words: int,
    part_bytes: int,
) -> None:
    """Start summing up on the current device and stream.

    Args:
        table: int64 tensor of the segment on the device.
        keys: int64 tensor of what its cells weigh, on the device.
        sums: int64 tensor of `num_programs` numbers, whose sum modulo 2**64 is the part's.
        cells: numbers of the cells in their segment.
        shape: rows, positions and heads of the segment.
        cell_bytes: bytes of a cell.
        num_words: words of a cell, the last one padded with zeros.
        part_bytes: 1, 2, 4 or 8; every address is a multiple of it, and so is `cell_bytes`.
    """
    per_program, words = _shape(num_words)
    sum_cells[(num_programs(len(cells), num_words),)](
        table,
        keys,
        sums,
        cells.start,
        len(cells),
        *shape,
        cell_bytes // part_bytes,
        NUM_WORDS=num_words,
        PART=PARTS[part_bytes],
        PART_BYTES=part_bytes,
        PARTS_PER_WORD=8 // part_bytes,
        CELLS=per_program,
        WORDS=words,
        num_warps=_NUM_WARPS,
    )


def _shape(num_words: int) -> tuple[int, int]:
    """Cells of a program, and words of each that it sums up at a time."""
    words = min(_MOST_WORDS, 1 << (num_words - 1).bit_length())
    return PROGRAM_WORDS // words, words
