"""How pieces get from a cache into a staging slot, and out of one, on one device.

Decides the verbs (allocate, load, gather, scatter, and for digests: sum up) and runs them where the
memory is. Refuses to know who uses which slot, what moves the slot's bytes to the peer, and what a
digest is for.

Reading path: `interface` (the verbs, and what each promises), `bounds` (what is refused before
anything is touched), `host` (numpy, DRAM), `cuda` (streams, events and tables on a GPU),
`kernel` (the copy itself), `host_digests` and `cuda_digests` (sums of what lies there),
`digest_kernel` (one on a GPU). The kernels are the only files that import triton.

Common changes: another kind of memory is a Copier and a Digester of its own, and a line in
`copier_for` and `digester_for`. What a kernel reads of a table moves together with `cuda.table_of`
that writes it.
"""

from collections.abc import Sequence

from kvcourier.errors import ConfigError
from kvcourier.layout.geometry import MemoryKind, Region
from kvcourier.transport.copying.host import HostCopier
from kvcourier.transport.copying.host_digests import HostDigester
from kvcourier.transport.copying.interface import (
    Copier,
    Digester,
    Finished,
    LoadedCells,
    LoadedTables,
    Sum,
    Ticket,
)

__all__ = [
    "Copier",
    "Digester",
    "Finished",
    "LoadedCells",
    "LoadedTables",
    "Sum",
    "Ticket",
    "copier_for",
    "digester_for",
]


def copier_for(memory: MemoryKind, device_id: int, regions: Sequence[Region]) -> Copier:
    """Make the copier for one kind of memory; it is ready for use, which takes seconds on a GPU.

    Args:
        memory: kind of the cache's memory, and of the staging memory.
        device_id: device that both are on.
        regions: the cache's regions; nothing outside them and the staging memory is touched.

    Raises:
        ConfigError: torch or triton, which copies on a GPU need, is missing.
    """
    if memory is MemoryKind.DRAM:
        return HostCopier(regions, device_id)
    try:
        from kvcourier.transport.copying.cuda import CudaCopier

        copier = CudaCopier(regions, device_id)
    except ImportError as error:
        raise ConfigError(
            f"packed transfers of {memory} need torch and triton ({error}); install torch for "
            "your GPU, or choose the direct path"
        ) from error
    copier.warm_up()
    return copier


def digester_for(memory: MemoryKind, device_id: int, regions: Sequence[Region]) -> Digester:
    """Make the digester for one kind of memory.

    Args:
        memory: kind of the cache's memory.
        device_id: device that it is on.
        regions: the cache's regions; nothing outside them is read.

    Raises:
        ConfigError: torch or triton, which sums on a GPU need, is missing.
    """
    if memory is MemoryKind.DRAM:
        return HostDigester(regions, device_id)
    try:
        from kvcourier.transport.copying.cuda_digests import CudaDigester

        return CudaDigester(regions, device_id)
    except ImportError as error:
        raise ConfigError(
            f"kv_integrity for caches in {memory} needs torch and triton ({error}); install torch "
            "for your GPU, or turn it off"
        ) from error
