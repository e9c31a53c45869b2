"""What the NIXL transport makes of a peer process that dies, stops, or comes back."""

import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator

import pytest

from kvcourier.errors import ConfigError, PeerLost
from kvcourier.ids import AgentName
from kvcourier.transport.interface import Operation, TransferState, TransferStatus
from kvcourier.transport.nixl import NixlTransport
from transport.ends import Memory
from transport.peer_process import PeerProcess, peer_process

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

_SIZE = 64 << 20
_PATIENCE_S = 30.0
_PEER = AgentName("peer")


def _until(condition: Callable[[], bool]) -> None:
    """Wait for another process; the bound only keeps a broken test from hanging."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not so within {_PATIENCE_S:g} s"
        os.sched_yield()


@pytest.fixture(params=["shared memory", "tcp"])
def transport(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NixlTransport]:
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    try:
        made = NixlTransport("here")
    except ConfigError as error:
        pytest.skip(f"NIXL cannot be used here: {error}")
    yield made
    made.close()


@pytest.fixture
def memory(transport: NixlTransport) -> Memory:
    memory = Memory(_SIZE, seed=1)
    transport.register([memory.region])
    return memory


def _write(
    transport: NixlTransport, memory: Memory, peer: PeerProcess, size: int
) -> TransferStatus:
    """Write, wait for the end, and check what the peer says it has."""
    handle = transport.post(
        Operation.WRITE,
        _PEER,
        local=memory.descriptors([0], [size]),
        remote=peer.descriptors(size),
        notice=b"check",
    )
    _until(lambda: transport.poll(handle).state is not TransferState.IN_FLIGHT)
    status = transport.poll(handle)
    transport.release(handle)
    answers: list[bytes] = []

    def answered() -> bool:
        answers.extend(n.payload for n in transport.notifications())
        return bool(answers)

    _until(answered)
    expected = memory.data.copy()
    expected[size:] = 0
    assert answers == [str(zlib.crc32(expected)).encode()]
    return status


def test_a_peer_killed_before_posting_is_lost(transport: NixlTransport, memory: Memory) -> None:
    with peer_process(transport, _PEER, _SIZE) as peer:
        transport.connect(peer.metadata)
        assert _write(transport, memory, peer, 4096).state is TransferState.DONE
        peer.kill()

        def lost(attempt: Callable[[], object]) -> bool:
            try:
                attempt()
            except PeerLost:
                return True
            return False

        sides = {"local": memory.descriptors([0], [64]), "remote": peer.descriptors(64)}
        _until(lambda: lost(lambda: transport.post(Operation.WRITE, _PEER, **sides)))
        _until(lambda: lost(lambda: transport.post(Operation.READ, _PEER, **sides)))
        _until(lambda: lost(lambda: transport.notify(_PEER, b"x")))


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)  # elsewhere a write may end at once
@pytest.mark.parametrize("end", ["killed", "released"])
def test_a_peer_that_stops_with_a_write_in_flight(
    transport: NixlTransport, memory: Memory, end: str
) -> None:
    with peer_process(transport, _PEER, _SIZE) as peer:
        transport.connect(peer.metadata)
        assert _write(transport, memory, peer, 4096).state is TransferState.DONE
        peer.process.send_signal(signal.SIGSTOP)
        handle = transport.post(
            Operation.WRITE,
            _PEER,
            local=memory.descriptors([0], [_SIZE]),
            remote=peer.descriptors(_SIZE),
            notice=b"never",
        )
        for _ in range(10_000):
            assert transport.poll(handle).state is TransferState.IN_FLIGHT
        if end == "released":  # nobody can wait for it, but nothing may hang
            transport.release(handle)
            transport.disconnect(_PEER)
            transport.close()
            return
        peer.kill()
        _until(lambda: transport.poll(handle).state is not TransferState.IN_FLIGHT)
        status = transport.poll(handle)
        assert status.state is TransferState.FAILED and status.peer_lost and status.reason
        transport.release(handle)


def test_a_restarted_peer_takes_its_name_again(transport: NixlTransport, memory: Memory) -> None:
    for size in (1 << 20, 1 << 21):
        with peer_process(transport, _PEER, _SIZE) as peer:
            assert transport.connect(peer.metadata) == _PEER
            assert _write(transport, memory, peer, size).state is TransferState.DONE
            peer.kill()
        transport.disconnect(_PEER)
