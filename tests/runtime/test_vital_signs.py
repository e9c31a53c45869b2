"""A closer look at real sockets: a process that runs, one that does not answer, and nobody."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvcourier.config import Limits
from kvcourier.core.events import Sign
from kvcourier.ids import EngineId, Incarnation, PeerRank, Rank
from kvcourier.runtime.side_channel import SideChannel
from kvcourier.runtime.vital_signs import look

HOST = "127.0.0.1"
SHORT_S, LONG_S = 0.05, 20.0
PEER = PeerRank(EngineId("p"), Incarnation("life-of-p"), Rank(0, 0))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that the kernel accepts connections for."""
    with socket.create_server((HOST, 0)) as server:
        yield server


def test_a_side_channel_runs_while_nobody_reads_it():
    """Its greeting is sent by a thread of ZMQ's own: the courier may be kept waiting."""
    channel = SideChannel(PEER, HOST, Limits().max_message_bytes)
    try:
        assert look(HOST, channel.port, LONG_S) is Sign.RUNS
    finally:
        channel.close()
    assert look(HOST, channel.port, LONG_S) is Sign.GONE


def test_one_that_accepts_and_says_nothing_is_silent(listener):
    """As a stopped process is: its kernel still accepts."""
    assert look(HOST, listener.getsockname()[1], SHORT_S) is Sign.SILENT


def test_one_that_hangs_up_is_looked_at_again(listener):
    """It may be about to end: its listener is closed a moment after its connections."""

    def hang_up_and_go() -> None:
        for _ in range(2):
            listener.accept()[0].close()
        listener.close()

    ending = threading.Thread(target=hang_up_and_go)
    ending.start()
    assert look(HOST, listener.getsockname()[1], LONG_S) is Sign.GONE
    ending.join()


@pytest.mark.parametrize("host", ["not a host", "a" * 300, "ü" * 100])
def test_a_host_that_is_none_is_silent(host):
    """Whose peer has shaken hands before, so it says nothing about that."""
    assert look(host, 1, SHORT_S) is Sign.SILENT
