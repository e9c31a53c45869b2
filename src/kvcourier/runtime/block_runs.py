"""How scattered the blocks are that an engine hands over: what decides the cost of a transfer.

Decides what counts as a run. Refuses to know what becomes of the figures. Pure.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from kvcourier.core.events import BlocksReserved, Event, PrefillFinished
from kvcourier.core.outcomes import Side
from kvcourier.layout.geometry import Int64Array

_SIDES = {PrefillFinished: Side.HOLD, BlocksReserved: Side.WANT}


def run_lengths(block_ids: Sequence[Sequence[int]]) -> Int64Array:
    """Blocks of each run of consecutive ascending ids, group after group; shape [runs]."""
    # A value between two groups that follows no id and that no id follows.
    ids = np.array(list(chain.from_iterable((*group, -2) for group in block_ids)), np.int64)
    ends = np.flatnonzero(np.diff(ids, append=-2) != 1) + 1
    runs: Int64Array = np.diff(ends, prepend=0)[ids[ends - 1] != -2]
    return runs


def hand_over(event: Event) -> tuple[Side, Int64Array] | None:
    """Which side handed blocks over by this event, in runs of which lengths; None if none did."""
    if not isinstance(event, PrefillFinished | BlocksReserved):
        return None
    return _SIDES[type(event)], run_lengths(event.block_ids)
