"""When the kernels that were launched so far have run: an event on a GPU, at once on a CPU.

Decides how "this KV is written" is known without waiting for it in a step.
"""

from collections.abc import Callable
from typing import Any, Protocol

from kvcourier.layout import MemoryKind


class StepClock(Protocol):
    """Marks points in a device's work."""

    def mark(self) -> Callable[[], bool] | None:
        """Whether everything launched before has run, to be asked later; None: it has."""


class HostClock:
    """A CPU has done what was called."""

    def mark(self) -> None:
        """Nothing to wait for."""


class CudaClock:
    """Events on the stream that the step's kernels are launched on; used on that thread."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch

    def mark(self) -> Callable[[], bool]:
        """Record an event."""
        event = self._torch.cuda.Event()
        event.record()
        query: Callable[[], bool] = event.query
        return query


def step_clock(memory: MemoryKind) -> StepClock:
    """The clock of the device that the cache is on."""
    return HostClock() if memory is MemoryKind.DRAM else CudaClock()
