"""What the transport tests share: memory with canaries, and bounded waiting.

Decides how a test drives progress: by polling every end until something holds. Refuses to know
which transport it drives.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvcourier.layout.geometry import Int64Array, MemoryKind, Region
from kvcourier.transport.interface import (
    Descriptors,
    Notification,
    TransferHandle,
    TransferState,
    TransferStatus,
    Transport,
)

CANARY = 0xC5
MARGIN = 4096
POLL_LIMIT = 200_000


class Memory:
    """Registered bytes with canaries before and after; `data` is a view of what is registered."""

    def __init__(self, size: int, seed: int | None = None) -> None:
        self._all = np.full(size + 2 * MARGIN, CANARY, dtype=np.uint8)
        self.data = self._all[MARGIN : MARGIN + size]
        self.data[:] = 0
        if seed is not None:
            self.data[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def region(self) -> Region:
        return Region(self.address, len(self.data), MemoryKind.DRAM, 0)

    def canaries_intact(self) -> bool:
        return bool((self._all[:MARGIN] == CANARY).all() and (self._all[-MARGIN:] == CANARY).all())

    def descriptors(self, offsets: Sequence[int], sizes: Sequence[int]) -> Descriptors:
        return Descriptors(self.table(offsets, sizes), MemoryKind.DRAM)

    def table(self, offsets: Sequence[int], sizes: Sequence[int]) -> Int64Array:
        rows = [(self.address + o, n, 0) for o, n in zip(offsets, sizes, strict=True)]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)


class Ends:
    """Polls several transports and keeps what arrived at each."""

    def __init__(self, *transports: Transport) -> None:
        self._transports = transports
        self.arrived: dict[str, list[Notification]] = {t.agent_name: [] for t in transports}

    def poll(self) -> None:
        for transport in self._transports:
            self.arrived[transport.agent_name] += transport.notifications()

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(POLL_LIMIT):
            if condition():
                return
            self.poll()
        raise AssertionError(f"not so after {POLL_LIMIT} polls; arrived: {self.arrived}")

    def finish(self, transport: Transport, handle: TransferHandle) -> TransferStatus:
        """Poll until the operation is terminal; its status."""
        self.until(lambda: transport.poll(handle).state is not TransferState.IN_FLIGHT)
        return transport.poll(handle)

    def payloads(self, transport: Transport) -> list[bytes]:
        return [n.payload for n in self.arrived[transport.agent_name]]
