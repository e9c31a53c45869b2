"""What every copier refuses before it touches memory.

Decides that pieces lie in the cache's regions, parcels in their segment and slots in staging
memory. A copier works with bare addresses, so this is all that stands between a wrong number and
somebody else's memory.
"""

from collections.abc import Sequence

import numpy as np

from kvcourier.errors import MappingError
from kvcourier.layout.geometry import Int64Array, MemoryKind, Region
from kvcourier.layout.packing import PackedSide, Parcel

SLOT_ALIGNMENT_BYTES = 16
"""What every slot's address is a multiple of, so that copies can use the widest words."""

STAGING_ALIGNMENT_BYTES = 4096


def row_bounds(side: PackedSide) -> tuple[Int64Array, Int64Array]:
    """First address of each row, and one past its last: two arrays of shape [rows]."""
    first = side.row_address + int(side.piece_offset_bytes.min())
    stop = side.row_address + int(side.piece_offset_bytes.max()) + side.piece_bytes
    # Almost always all rows step alike, and then this is one pass over the units.
    for stride in strides_in(side):
        alike = side.row_block_stride_bytes == stride
        steps = unit_steps(side, stride)
        first[alike] += steps.min()
        stop[alike] += steps.max()
    return first, stop


def strides_in(side: PackedSide) -> list[int]:
    """How the rows step from a block to the next: each of the ways once."""
    return list(dict.fromkeys(side.row_block_stride_bytes.tolist()))


def unit_steps(side: PackedSide, block_stride_bytes: int) -> Int64Array:
    """Bytes from a row's address to each unit, in a row of this stride: shape [units]."""
    return side.block_of_unit * block_stride_bytes + side.unit_in_block * side.unit_stride_bytes


def require_inside(
    segments: Sequence[PackedSide], regions: Sequence[Region], memory: MemoryKind, device_id: int
) -> None:
    """Raise MappingError if a segment is elsewhere, or a row of it leaves its region."""
    starts = np.array([each.address for each in regions], np.int64)
    stops = starts + np.array([each.size_bytes for each in regions], np.int64)
    for segment, side in enumerate(segments):
        if (side.memory, side.device_id) != (memory, device_id):
            raise MappingError(
                f"segment {segment}: expected {memory} on device {device_id}, found {side.memory} "
                f"on device {side.device_id}"
            )
        first, stop = row_bounds(side)
        inside = ((first[:, None] >= starts) & (stop[:, None] <= stops)).any(axis=1)
        if not inside.all():
            row = int(np.flatnonzero(~inside)[0])
            raise MappingError(
                f"segment {segment}: expected pieces in one of the cache's {len(regions)} "
                f"regions, found row {row} from {int(first[row]):#x} to {int(stop[row]):#x}"
            )


def require_parcel(parcel: Parcel, sides: Sequence[PackedSide]) -> PackedSide:
    """The segment that a parcel is of. Raises MappingError if there are no such pieces."""
    if not 0 <= parcel.segment < len(sides):
        raise MappingError(
            f"parcel: expected one of {len(sides)} segments, found segment {parcel.segment}"
        )
    side = sides[parcel.segment]
    if not 0 <= parcel.start < parcel.stop <= side.num_pieces:
        raise MappingError(
            f"parcel: segment {parcel.segment} has {side.num_pieces} pieces, found pieces "
            f"{parcel.start} to {parcel.stop}"
        )
    return side


def require_slot(address: int, num_bytes: int, staging: Sequence[Region]) -> None:
    """Raise MappingError if a slot is not inside staging memory, or not aligned."""
    if address % SLOT_ALIGNMENT_BYTES:
        raise MappingError(
            f"slot: expected an address that is a multiple of {SLOT_ALIGNMENT_BYTES}, "
            f"found {address:#x}"
        )
    for region in staging:
        if region.address <= address <= region.address + region.size_bytes - num_bytes:
            return
    raise MappingError(
        f"slot: expected {num_bytes} bytes of staging memory, found address {address:#x}"
    )
