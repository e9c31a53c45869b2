"""A second process with a NIXL agent, for tests that kill it.

Run as a script: takes the agent's name and the size of its memory. Prints one JSON line of
{metadata, address}, reads one line of the other agent's metadata in hex, prints "ready". Then
answers every notification with the CRC32 of its memory, until its standard input closes.
"""

import json
import os
import select
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from kvcourier.errors import PeerLost
from kvcourier.layout.geometry import MemoryKind, Region
from kvcourier.transport.interface import Descriptors, Transport
from kvcourier.transport.nixl import NixlTransport


@dataclass
class PeerProcess:
    """Our handle on such a process; its agent has loaded ours once `start` returns."""

    process: subprocess.Popen[str]
    metadata: bytes
    address: int

    def descriptors(self, size: int) -> Descriptors:
        return Descriptors(np.array([[self.address, size, 0]], dtype=np.int64), MemoryKind.DRAM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)


@contextmanager
def peer_process(transport: Transport, name: str, size: int) -> Iterator[PeerProcess]:
    """Start a peer that knows `transport`; it is gone when the block ends."""
    process = subprocess.Popen(
        [sys.executable, __file__, name, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        told = json.loads(process.stdout.readline())
        process.stdin.write(transport.agent_metadata().hex() + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        yield PeerProcess(process, bytes.fromhex(told["metadata"]), told["address"])
    finally:
        process.kill()
        process.wait(timeout=30)
        for stream in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                stream.close()


def main(name: str, size: int) -> None:
    memory = np.zeros(size, dtype=np.uint8)
    address = int(memory.ctypes.data)
    transport = NixlTransport(name)
    transport.register([Region(address, size, MemoryKind.DRAM, 0)])
    print(
        json.dumps({"metadata": transport.agent_metadata().hex(), "address": address}), flush=True
    )
    transport.connect(bytes.fromhex(sys.stdin.readline()))
    print("ready", flush=True)
    parent = os.getppid()
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 0.0002)[0]:
        for notification in transport.notifications():
            with suppress(PeerLost):
                transport.notify(notification.sender, str(zlib.crc32(memory)).encode())
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
