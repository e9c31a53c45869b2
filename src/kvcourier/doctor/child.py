"""The process that does errands: `python -m kvcourier.doctor.child RESULT_FILE`, the errand on
standard input.

Decides which errand is done by what. Refuses to say anything on its standard output, which is
UCX's.
"""

import sys
from pathlib import Path

import msgspec
import numpy as np

from kvcourier.doctor.errands import Errand, FetchedTwice, FetchTwice, NixlTried, TryNixl
from kvcourier.doctor.fetching import fetch_twice
from kvcourier.errors import KVCourierError
from kvcourier.layout.geometry import MemoryKind, Region
from kvcourier.runtime.about import versions
from kvcourier.transport.interface import Descriptors, Operation, TransferState
from kvcourier.transport.nixl import NixlTransport

_NUM_BYTES = 1 << 20


def try_nixl(errand: TryNixl) -> NixlTried:
    """Move known bytes between two agents of this process."""
    told = {name: version for name, version in versions().items() if name.startswith("nixl")}
    version = next(iter(told.values()), "")
    source = np.arange(_NUM_BYTES, dtype=np.int64).astype(np.uint8)
    target = np.zeros_like(source)
    plugins: list[str] = []
    try:
        ends = [
            NixlTransport(f"kvcourier-doctor-{name}", backends=errand.backends) for name in "ab"
        ]
        plugins = ends[0].plugins()
        try:
            for end, memory in zip(ends, (source, target), strict=True):
                end.register([Region(memory.ctypes.data, _NUM_BYTES, MemoryKind.DRAM, 0)])
            _write(ends[0], ends[1], source, target)
        finally:
            for end in ends:
                end.close()
    except KVCourierError as error:
        return NixlTried(str(error), plugins, version)
    differing = int((source != target).sum())
    problem = f"{differing} of {_NUM_BYTES} bytes arrived wrong" if differing else ""
    return NixlTried(problem, plugins, version)


def _write(
    one: NixlTransport, other: NixlTransport, source: np.ndarray, target: np.ndarray
) -> None:
    agent = one.connect(other.agent_metadata())
    sides = [
        Descriptors(np.array([[each.ctypes.data, each.nbytes, 0]], np.int64), MemoryKind.DRAM)
        for each in (source, target)
    ]
    handle = one.post(Operation.WRITE, agent, local=sides[0], remote=sides[1])
    while (status := one.poll(handle)).state is TransferState.IN_FLIGHT:
        other.notifications()  # drives the other end
    one.release(handle)
    if status.state is TransferState.FAILED:
        raise KVCourierError(f"the WRITE failed: {status.reason}")


def do(errand: Errand) -> NixlTried | FetchedTwice:
    """Do an errand; blocks."""
    if isinstance(errand, FetchTwice):
        return fetch_twice(errand)
    return try_nixl(errand)


def main() -> None:
    """Read, do, write."""
    errand: Errand = msgspec.json.decode(sys.stdin.buffer.read(), type=Errand)
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(do(errand)))


if __name__ == "__main__":
    main()
