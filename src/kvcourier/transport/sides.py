"""Checks on what a caller hands to a transport, the same for every implementation.

Decides which regions, descriptor tables and selections are well formed and which two sides pair up.
Refuses to know what is registered or connected, and how bytes move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcourier.errors import LocalProtocolError, RegistrationFailed
from kvcourier.ids import AgentName
from kvcourier.layout.geometry import Int64Array, MemoryKind, Region
from kvcourier.transport.interface import DescriptorListId, Descriptors, Selection, Side

ADDRESS, LENGTH, DEVICE = 0, 1, 2
"""Columns of a descriptor table."""

_ADDRESS_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True, eq=False)
class PreparedList:
    """A descriptor list kept for use by index.

    Attributes:
        agent: whose memory it describes; None for our own.
        memory: kind of that memory.
        table: its descriptors, int64 [n, 3].
        native: what the implementation made of it, if anything.
    """

    agent: AgentName | None
    memory: MemoryKind
    table: Int64Array
    native: Any = None


def check_regions(regions: Sequence[Region]) -> None:
    """Refuse regions that no memory can have; raises RegistrationFailed.

    NIXL itself takes an empty region without a word and fails only when it is used.
    """
    for region in regions:
        if region.size_bytes <= 0 or not 0 < region.address < _ADDRESS_LIMIT - region.size_bytes:
            raise RegistrationFailed(
                f"region at {region.address:#x}: expected an address above 0 and at least one "
                f"byte, found {region.size_bytes} bytes"
            )


def checked_table(descriptors: Descriptors) -> Int64Array:
    """The table as a contiguous int64 array of shape [n, 3], n > 0; raises LocalProtocolError."""
    table = descriptors.table
    if table.ndim != 2 or table.shape[1] != 3 or table.dtype != np.int64:
        raise LocalProtocolError(
            f"descriptors: expected an int64 array of shape [n, 3], found {table.dtype} of shape "
            f"{list(table.shape)}"
        )
    if len(table) == 0:
        raise LocalProtocolError("descriptors: expected at least one piece, found none")
    if table[:, LENGTH].min() <= 0:
        raise LocalProtocolError(
            f"descriptors: expected lengths above 0, found {int(table[:, LENGTH].min())}"
        )
    return np.ascontiguousarray(table)


def checked_indices(selection: Selection, prepared: PreparedList) -> npt.NDArray[np.int32]:
    """The indices as int32, which is what NIXL takes; raises LocalProtocolError.

    Checked before narrowing: an index of 2**32 must not turn into 0.
    """
    indices = np.asarray(selection.indices)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise LocalProtocolError(
            f"selection: expected integers of shape [n], found {indices.dtype} of shape "
            f"{list(indices.shape)}"
        )
    if len(indices) == 0:
        raise LocalProtocolError("selection: expected at least one piece, found none")
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= len(prepared.table):
        raise LocalProtocolError(
            f"selection: expected indices from 0 to {len(prepared.table) - 1}, found {low} to "
            f"{high}"
        )
    return np.ascontiguousarray(indices, dtype=np.int32)


def check_forms(local: Side, remote: Side) -> None:
    """Both sides must be of one form and have as many pieces; raises LocalProtocolError."""
    if type(local) is not type(remote):
        raise LocalProtocolError(
            f"sides: expected descriptors or selections on both, found {type(local).__name__} "
            f"and {type(remote).__name__}"
        )
    counts = [len(s.table if isinstance(s, Descriptors) else s.indices) for s in (local, remote)]
    if counts[0] != counts[1]:
        raise LocalProtocolError(
            f"sides: expected as many pieces on both, found {counts[0]} local and {counts[1]} "
            "remote"
        )


def check_lengths(local: Int64Array, remote: Int64Array) -> None:
    """Piece i must be as long on both sides; raises LocalProtocolError naming the first."""
    unequal = np.flatnonzero(local != remote)
    if len(unequal):
        piece = int(unequal[0])
        raise LocalProtocolError(
            f"piece {piece}: expected as many bytes on both sides, found {int(local[piece])} "
            f"local and {int(remote[piece])} remote"
        )


def find_list(
    lists: Mapping[DescriptorListId, PreparedList], selection: Selection, agent: AgentName | None
) -> PreparedList:
    """The list a selection is of, which must be of this agent; raises LocalProtocolError."""
    prepared = lists.get(selection.list_id)
    wanted = f"a prepared one of {agent or 'our own memory'}"
    if prepared is None:
        raise LocalProtocolError(
            f"descriptor list {selection.list_id}: expected {wanted}, found none"
        )
    if prepared.agent != agent:
        raise LocalProtocolError(
            f"descriptor list {selection.list_id}: expected {wanted}, found one of "
            f"{prepared.agent or 'our own memory'}"
        )
    return prepared
