# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The copy itself, for GPUs: the only file that imports triton.

Decides how threads share the bytes of a parcel. Refuses to know streams and events, and trusts its
numbers: `bounds` has checked them.

A piece is cut into chunks of `CHUNK_WORDS` words, and the chunks of a parcel follow each other in
the slot without gaps, so that a program's share of the slot is one range. Where a chunk lies in
the cache is computed by the program, from the segment's table:

    [units]   (block id, bytes from the block's start to the unit), two numbers each
    [pieces]  bytes from the unit's start
    [rows]    (address of block 0, bytes from a block to the next), two numbers each
"""

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

PROGRAM_WORDS = 1024
"""Words that a program copies: four loads of 16 bytes per thread, so that many are on their way."""


@triton.jit
def place(table, piece, num_units, num_offsets, present):
    """Row, unit and offset of pieces, and their addresses, from the segment's table.

    Args:
        table: int64 tensor of the segment, see above.
        piece: numbers of the pieces in their segment.
        num_units: units of the segment.
        num_offsets: pieces of a unit.
        present: which of the pieces there are; nothing is read for the others.
    """
    unit_of_segment = piece // num_offsets
    offset = piece - unit_of_segment * num_offsets
    row = unit_of_segment // num_units
    unit = unit_of_segment - row * num_units

    offsets_table = table + 2 * num_units
    rows_table = offsets_table + num_offsets
    block = tl.load(table + 2 * unit, mask=present, other=0)
    in_block = tl.load(table + 2 * unit + 1, mask=present, other=0)
    in_unit = tl.load(offsets_table + offset, mask=present, other=0)
    row_address = tl.load(rows_table + 2 * row, mask=present, other=0)
    block_stride = tl.load(rows_table + 2 * row + 1, mask=present, other=0)
    return row, unit, offset, row_address + block * block_stride + in_block + in_unit


# The numbers differ from call to call: none may become a part of the compiled code, or a transfer
# would wait for the compiler.
@triton.jit(
    do_not_specialize=[
        "slot_address",
        "first_piece",
        "num_chunks",
        "chunks_per_piece",
        "num_units",
        "num_offsets",
    ]
)
def copy_chunks(
    table,
    slot_address,
    first_piece,
    num_chunks,
    chunks_per_piece,
    num_units,
    num_offsets,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TO_SLOT: tl.constexpr,
):
    """Copy `CHUNKS` chunks per program between a slot and the cache.

    Args:
        table: int64 tensor of the segment, see above.
        slot_address: where the parcel's first piece lies in staging memory.
        first_piece: number of that piece in its segment.
        num_chunks: chunks of the parcel.
        chunks_per_piece: chunks of a piece.
        num_units: units of the segment.
        num_offsets: pieces of a unit.
        WORD: integer type that is copied at a time; every address is a multiple of its size.
        WORD_BYTES: that size.
        CHUNK_WORDS: words of a chunk, a power of two.
        CHUNKS: chunks of a program, a power of two.
        ALIGNMENT: what every chunk's address on both sides is a multiple of, in bytes.
        TO_SLOT: whether to gather (cache to slot) or to scatter.
    """
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    present = chunk < num_chunks

    piece_of_parcel = chunk // chunks_per_piece
    part = chunk - piece_of_parcel * chunks_per_piece
    piece = first_piece + piece_of_parcel
    _row, _unit, _offset, address = place(table, piece, num_units, num_offsets, present)

    in_cache = address + part.to(tl.int64) * (CHUNK_WORDS * WORD_BYTES)
    in_slot = slot_address.to(tl.int64) + chunk.to(tl.int64) * (CHUNK_WORDS * WORD_BYTES)

    word = tl.arange(0, CHUNK_WORDS)[None, :]
    cache_words = in_cache.to(tl.pointer_type(WORD))[:, None] + word
    slot_words = in_slot.to(tl.pointer_type(WORD))[:, None] + word
    # Loaded numbers promise nothing to the compiler; with the promise, it uses the widest words.
    cache_words = tl.multiple_of(cache_words, (ALIGNMENT, ALIGNMENT))
    slot_words = tl.multiple_of(slot_words, (ALIGNMENT, ALIGNMENT))
    if TO_SLOT:
        tl.store(slot_words, tl.load(cache_words, mask=present[:, None]), mask=present[:, None])
    else:
        tl.store(cache_words, tl.load(slot_words, mask=present[:, None]), mask=present[:, None])


def start(
    table,
    slot_address: int,
    pieces: range,
    shape: tuple[int, int],
    *,
    word_bytes: int,
    chunk_words: int,
    chunks_per_piece: int,
    alignment: int,
    to_slot: bool,
) -> None:
    """Start a copy on the current device and stream.

    Args:
        table: int64 tensor of the segment on the device.
        slot_address: where the first of the pieces lies in staging memory.
        pieces: numbers of the pieces in their segment.
        shape: units of the segment, and pieces of a unit.
        word_bytes: 1, 2, 4 or 8; every address is a multiple of it.
        chunk_words: words of a chunk, a power of two up to `PROGRAM_WORDS`.
        chunks_per_piece: chunks of a piece.
        alignment: what every chunk's address is a multiple of, in bytes; 16 is enough.
        to_slot: whether to gather or to scatter.
    """
    num_chunks = len(pieces) * chunks_per_piece
    chunks = PROGRAM_WORDS // chunk_words
    copy_chunks[(-(-num_chunks // chunks),)](
        table,
        slot_address,
        pieces.start,
        num_chunks,
        chunks_per_piece,
        *shape,
        WORD=WORDS[word_bytes],
        WORD_BYTES=word_bytes,
        CHUNK_WORDS=chunk_words,
        CHUNKS=chunks,
        ALIGNMENT=alignment,
        TO_SLOT=to_slot,
    )
