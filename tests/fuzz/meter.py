"""How much one input costs: counted, not timed, so that a busy machine changes nothing.

Decides the bounds. Calls are those of Python and C functions; bytes are what Python's allocators
have given at the most at any time of it, as msgspec and numpy use them too.
"""

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

MAX_CALLS, CALLS_A_BYTE = 50_000, 60
MAX_BYTES, BYTES_A_BYTE = 4 << 20, 400
"""A list of integers of a byte each takes some forty bytes an entry, twice while it is checked."""


@dataclass
class Cost:
    """The most that any input took, for each byte of it or in all."""

    calls: int = 0
    num_bytes: int = 0


class TooCostly(AssertionError):
    """An input took more than an input of its length may."""


def measure(
    feed: Callable[[bytes], Any], payload: bytes, most: Cost, max_calls: int = MAX_CALLS
) -> Any:
    """Feed one input; returns what `feed` does.

    Raises:
        TooCostly: it took more than its bounds.
    """
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    # Only here: drawing the inputs would take twice as long under it.
    tracemalloc.start()
    sys.setprofile(count)
    try:
        result = feed(payload)
    finally:
        sys.setprofile(None)
        _, num_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    most.calls, most.num_bytes = max(most.calls, calls), max(most.num_bytes, num_bytes)
    if calls > max_calls + CALLS_A_BYTE * len(payload):
        raise TooCostly(f"{calls} calls for an input of {len(payload)} bytes")
    if num_bytes > MAX_BYTES + BYTES_A_BYTE * len(payload):
        raise TooCostly(f"{num_bytes} bytes for an input of {len(payload)} bytes")
    return result
