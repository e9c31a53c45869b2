"""`kvcourier serve`, whose engine or transfers stand still at a point while a file says so.

    CHAOS_HOLDS=FOLDER python -m chaos.instance serve ...

While FOLDER/POINT exists, whoever comes to that point waits there, and FOLDER/POINT.reached says
that somebody does. So a test can end or stop a process exactly there. The points:

finish   the engine has computed a prompt that somebody has registered for, and hands it over
receive  the engine has reserved blocks for KV, and is about to say so
WRITE    a WRITE has moved half of its descriptors; the other half follows when the file has gone
READ     the same for a READ

With FOLDER/seize, `finish` keeps the interpreter from all threads for as many seconds as it says.
`CHAOS_TIMING` has durations of the protocol, as JSON, that no flag sets.
"""

import ctypes
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcourier.cli import instance
from kvcourier.cli.app import main
from kvcourier.config import Timing
from kvcourier.errors import PeerLost as PeerLostError
from kvcourier.errors import TransportError
from kvcourier.ids import AgentName, RequestId
from kvcourier.layout import TokenSpan
from kvcourier.runtime.endpoint import KvEndpoint
from kvcourier.transport import nixl
from kvcourier.transport.interface import (
    Descriptors,
    Operation,
    TransferHandle,
    TransferState,
    TransferStatus,
)

HOLDS = Path(os.environ["CHAOS_HOLDS"])
_PAUSE_S = 0.002


def is_held(point: str) -> bool:
    """Whether whoever comes to this point shall wait there; says that somebody has come."""
    held = (HOLDS / point).exists()
    if held:
        (HOLDS / f"{point}.reached").touch()
    return held


def stand(point: str) -> None:
    """Wait here for as long as the point is held."""
    while is_held(point):
        time.sleep(_PAUSE_S)


def seize() -> None:
    """Keep the interpreter, as a step of a model can that never lets go of it."""
    order = HOLDS / "seize"
    if order.exists():
        seconds = float(order.read_text())
        (HOLDS / "seize.reached").touch()
        # Called by way of PyDLL, a function of C holds the interpreter while it runs.
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))


class HeldEndpoint(KvEndpoint):
    """Waits where the engine calls it, and leaves the latest request's name in FOLDER/request."""

    def begin_hold(self, request_id: RequestId, intent: Any) -> None:
        (HOLDS / "request").write_text(request_id)
        super().begin_hold(request_id, intent)

    def expect(self, request_id: RequestId, intent: Any) -> None:
        (HOLDS / "request").write_text(request_id)
        super().expect(request_id, intent)

    def finish_prefill(
        self, request_id: RequestId, block_ids: Sequence[Sequence[int]], *args: Any, **named: Any
    ) -> dict[str, Any]:
        while (HOLDS / "finish").exists() and not self.is_awaited(request_id):
            time.sleep(_PAUSE_S)
        stand("finish")
        seize()
        return super().finish_prefill(request_id, block_ids, *args, **named)

    def receive(
        self, request_id: RequestId, block_ids: Sequence[Sequence[int]], span: TokenSpan
    ) -> None:
        stand("receive")
        super().receive(request_id, block_ids, span)


@dataclasses.dataclass
class _Half:
    """An operation of which the first half is posted, and what the second takes."""

    native: TransferHandle
    second: tuple[Any, ...] | None


class HeldTransport(nixl.NixlTransport):
    """Moves half of an operation, and the rest when its point is not held any more."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._halves: dict[TransferHandle, _Half] = {}
        self._half_ids = itertools.count(1 << 40)

    def post(
        self,
        operation: Operation,
        agent: AgentName,
        *,
        local: Descriptors,
        remote: Descriptors,
        notice: bytes = b"",
    ) -> TransferHandle:
        if not is_held(operation.value):
            return super().post(operation, agent, local=local, remote=remote, notice=notice)
        middle = len(local) // 2
        assert middle, "an operation of one piece has no middle"
        halves = [
            [Descriptors(side.table[part], side.memory) for side in (local, remote)]
            for part in (slice(None, middle), slice(middle, None))
        ]
        first = super().post(operation, agent, local=halves[0][0], remote=halves[0][1])
        handle = TransferHandle(next(self._half_ids))
        self._halves[handle] = _Half(first, (operation, agent, *halves[1], notice))
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        half = self._halves.get(handle)
        if half is None:
            return super().poll(handle)
        status = super().poll(half.native)
        if half.second is None or status.state is not TransferState.DONE:
            return status
        operation, agent, local, remote, notice = half.second
        if is_held(operation.value):
            return TransferStatus(TransferState.IN_FLIGHT)
        super().release(half.native)
        half.second = None
        try:
            half.native = super().post(operation, agent, local=local, remote=remote, notice=notice)
        except TransportError as error:
            lost = isinstance(error, PeerLostError)
            return TransferStatus(TransferState.FAILED, lost, str(error))
        return super().poll(half.native)

    def release(self, handle: TransferHandle) -> None:
        half = self._halves.pop(handle, None)
        super().release(handle if half is None else half.native)


def held_timing(*chosen: float) -> Timing:
    """What the flags say, and `CHAOS_TIMING`."""
    return dataclasses.replace(
        _timing_of(*chosen), **json.loads(os.environ.get("CHAOS_TIMING", "{}"))
    )


_timing_of = instance.timing_of

if __name__ == "__main__":
    import kvcourier.runtime.endpoint as endpoint_module

    nixl.NixlTransport = HeldTransport
    endpoint_module.KvEndpoint = HeldEndpoint
    instance.timing_of = held_timing
    sys.argv[0] = "kvcourier"
    main()
