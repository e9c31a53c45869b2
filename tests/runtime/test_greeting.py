"""Who listens somewhere: a handshake server of ours, another ZMQ socket, or no ZMQ at all."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import zmq

from kvcourier.config import ChannelKeys
from kvcourier.ids import EngineId
from kvcourier.runtime.greeting import Listener, meet
from kvcourier.runtime.handshake_server import HandshakeServer
from ports import free_port

HOST = "127.0.0.1"
SHORT_S, LONG_S = 0.05, 20.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, keys: ChannelKeys | None = None) -> int:
    server = HandshakeServer(HOST, 0, lambda payload: payload, 1000, keys)
    stack.callback(server.close)
    server.start()
    return server.port


def test_a_handshake_server_is_ours(stack):
    assert meet(HOST, serve(stack), LONG_S) is Listener.OURS


@pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq has no CURVE")
def test_one_with_keys_is_left_to_zmq(stack):
    public, secret = zmq.curve_keypair()
    port = serve(stack, ChannelKeys(public, secret, {EngineId("p"): public}))
    assert meet(HOST, port, LONG_S) is Listener.LOCKED


@pytest.mark.parametrize("identity", [b"", b"kvcourie", b"kvcourier2", b"x" * 200])
@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.REP, zmq.DEALER])
def test_any_other_zmq_socket_is_foreign(stack, kind, identity):
    """Among them the ROUTER of vLLM's own connectors."""
    listener = stack.enter_context(stack.enter_context(zmq.Context()).socket(kind))
    if identity:
        listener.setsockopt(zmq.ROUTING_ID, identity)
    port = listener.bind_to_random_port(f"tcp://{HOST}")
    assert meet(HOST, port, LONG_S) is Listener.FOREIGN


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 64,
        # ZMTP 1, or a greeting and a frame that is no command.
        b"\xff" + bytes(8) + b"\x7f" + b"\x01" + bytes(64),
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0") + b"\x00\x05hello",
        # A command of more bytes than anybody's READY has.
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0") + b"\x06" + b"\x7f" * 8,
    ],
)
def test_what_is_no_zmq_is_foreign(said):
    with socket.create_server((HOST, 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(said)
                # Until the other side has read it and hung up, maybe with something of ours unread.
                with suppress(ConnectionResetError):
                    while connection.recv(4096):
                        pass

        speaking = threading.Thread(target=answer)
        speaking.start()
        assert meet(HOST, server.getsockname()[1], LONG_S) is Listener.FOREIGN
        speaking.join()


def test_nobody():
    assert meet(HOST, free_port(), LONG_S) is Listener.GONE


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65])
def test_one_that_stops_in_its_greeting_is_silent(num_bytes):
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0") + b"\x04\x20"
    ended = threading.Event()
    with socket.create_server((HOST, 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(greeting[:num_bytes])
                assert ended.wait(LONG_S)

        speaking = threading.Thread(target=answer)
        speaking.start()
        assert meet(HOST, server.getsockname()[1], SHORT_S) is Listener.SILENT
        ended.set()
        speaking.join()
