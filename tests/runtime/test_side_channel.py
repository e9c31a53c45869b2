"""The side channel over real ZMQ on loopback: what arrives, what is dropped, what survives."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest
import zmq

from kvcourier.errors import ConfigError, RemoteProtocolError
from kvcourier.ids import EngineId, Incarnation, InstanceAddress, PeerRank, Rank
from kvcourier.runtime import side_channel
from kvcourier.runtime.greeting import Listener
from kvcourier.runtime.handshake_server import HandshakeServer
from kvcourier.runtime.side_channel import SideChannel, sender_matches
from ports import free_port

HOST = "127.0.0.1"
MAX_BYTES = 1000
WAIT_S = 20.0


def peer(name: str, tp_rank: int = 0) -> PeerRank:
    return PeerRank(EngineId(name), Incarnation(f"life-of-{name}"), Rank(0, tp_rank))


P, D = peer("p"), peer("d")
D_IDENTITY = b"life-of-d/pp0tp0"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_channel(stack) -> Callable[[PeerRank], SideChannel]:
    def make(me: PeerRank) -> SideChannel:
        channel = SideChannel(me, HOST, MAX_BYTES)
        stack.callback(channel.close)
        return channel

    return make


@pytest.fixture
def serve(stack) -> Callable[..., InstanceAddress]:
    def make(answer: Callable[[bytes], bytes]) -> InstanceAddress:
        server = HandshakeServer(HOST, 0, answer, MAX_BYTES)
        stack.callback(server.close)
        server.start()
        return InstanceAddress(EngineId("p"), HOST, server.port)

    return make


@pytest.fixture
def connect(stack) -> Callable[[int, InstanceAddress], "zmq.Socket[bytes]"]:
    """A socket of somebody who does not look first whom it talks to."""
    context = stack.enter_context(zmq.Context())

    def make(kind: int, address: InstanceAddress) -> "zmq.Socket[bytes]":
        client = stack.enter_context(context.socket(kind))
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        client.connect(f"tcp://{address.host}:{address.port}")
        return client

    return make


def take(channel: SideChannel, number: int = 1, nudge: Callable[[], object] = lambda: None) -> list:
    """The next messages; `nudge` is done before every look."""
    return _until(channel, channel.messages, number, nudge)


def take_answers(channel: SideChannel, number: int = 1) -> list:
    return _until(channel, channel.answers, number, lambda: None)


def _until(channel, look, number, nudge) -> list:
    taken: list = []
    deadline = time.monotonic() + WAIT_S
    while len(taken) < number:
        assert time.monotonic() < deadline, f"only {taken} came"
        nudge()
        channel.wait(0.05)
        taken += look()
    return taken


# The handshake server.


def test_a_handshake_is_answered(serve, open_channel):
    address = serve(lambda payload: payload.upper())
    channel = open_channel(D)
    channel.ask(address, b"hello")
    assert take_answers(channel) == [(address, b"HELLO")]
    assert channel.answers() == [], "an answer ends its request"


def test_two_instances_are_asked_at_once(serve, open_channel):
    one, two = serve(lambda payload: b"one"), serve(lambda payload: b"two")
    channel = open_channel(D)
    channel.ask(one, b"?")
    channel.ask(two, b"?")
    assert set(take_answers(channel, 2)) == {(one, b"one"), (two, b"two")}


def test_asking_again_replaces_the_first_request(serve, open_channel):
    address = serve(lambda payload: payload)
    channel = open_channel(D)
    channel.ask(address, b"first")
    channel.ask(address, b"second")
    assert take_answers(channel) == [(address, b"second")]


def test_an_address_where_nobody_listens_is_told_once(open_channel):
    channel, address = open_channel(D), InstanceAddress(EngineId("p"), HOST, free_port())
    channel.ask(address, b"hello")
    assert _until(channel, channel.refusals, 1, lambda: None) == [
        (address, f"nobody listens at {address}")
    ]
    assert channel.refusals() == channel.answers() == []


def test_a_refusal_of_an_earlier_request_means_nothing(serve, open_channel):
    """The instance has come up between the two."""
    channel, port = open_channel(D), free_port()
    address = InstanceAddress(EngineId("p"), HOST, port)
    channel.ask(address, b"hello")
    with socket.create_server((HOST, port)):
        channel.ask(address, b"hello again")
        channel.wait(0.05)
        assert channel.refusals() == []


def test_a_handshake_that_was_given_up_is_not_answered(serve, open_channel):
    one, two = serve(lambda payload: b"one"), serve(lambda payload: b"two")
    channel = open_channel(D)
    channel.ask(one, b"?")
    channel.drop(one)
    channel.drop(one)
    channel.ask(two, b"?")
    assert take_answers(channel) == [(two, b"two")]


def test_a_malformed_request_is_dropped_and_the_next_answered(serve, open_channel, connect):
    seen: list[bytes] = []

    def answer(payload: bytes) -> bytes:
        seen.append(payload)
        if payload != b"good":
            raise RemoteProtocolError("not good")
        return b"fine"

    address = serve(answer)
    rude = connect(zmq.DEALER, address)
    for payload in (b"bad", b"", b"good"):
        rude.send(payload)
    assert rude.recv() == b"fine"
    channel = open_channel(D)
    channel.ask(address, b"good")
    assert take_answers(channel) == [(address, b"fine")]
    assert seen == [b"bad", b"", b"good", b"good"]


def test_a_client_that_goes_before_its_answer_harms_nobody(serve, open_channel, connect):
    asked, gone = threading.Event(), threading.Event()

    def answer(payload: bytes) -> bytes:
        if payload == b"impatient":
            asked.set()
            assert gone.wait(WAIT_S)
        return payload

    address = serve(answer)
    impatient = connect(zmq.DEALER, address)
    impatient.send(b"impatient")
    assert asked.wait(WAIT_S)
    impatient.close(linger=0)
    gone.set()
    channel = open_channel(D)
    channel.ask(address, b"patient")
    assert take_answers(channel) == [(address, b"patient")]


def test_a_request_that_is_too_long_harms_nobody(serve, open_channel, connect):
    seen: list[int] = []

    def answer(payload: bytes) -> bytes:
        seen.append(len(payload))
        return b"fine"

    address = serve(answer)
    channel = open_channel(D)
    connect(zmq.DEALER, address).send(b"x" * (MAX_BYTES + 1))
    channel.ask(address, b"x" * MAX_BYTES)
    assert take_answers(channel) == [(address, b"fine")]
    assert seen == [MAX_BYTES]


def test_a_port_that_is_taken_is_a_setting_to_change(serve):
    address = serve(lambda payload: payload)
    with pytest.raises(ConfigError) as caught:
        HandshakeServer(HOST, address.port, lambda payload: payload, MAX_BYTES)
    text = str(caught.value)
    assert f"{HOST}:{address.port} cannot be opened: Address already in use" in text
    assert "--side-channel-port" in text


@pytest.mark.parametrize("host", ["not a host", "198.51.100.7"])
def test_a_host_that_is_not_ours_is_a_setting_to_change(host):
    with pytest.raises(ConfigError, match="--side-channel-host"):
        HandshakeServer(host, 0, lambda payload: payload, MAX_BYTES)


def test_a_closed_server_frees_its_port_and_may_be_closed_again():
    first = HandshakeServer(HOST, 0, lambda payload: payload, MAX_BYTES)
    first.start()
    first.close()
    first.close()
    second = HandshakeServer(HOST, first.port, lambda payload: payload, MAX_BYTES)
    assert second.port == first.port
    second.close()


def test_ipv6():
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    HandshakeServer("::1", 0, lambda payload: payload, MAX_BYTES).close()


def test_an_answer_that_cannot_be_sent_harms_nobody(serve, open_channel, connect, monkeypatch):
    """ZMQ may refuse one, e.g. when the asker does not read: the asker asks again."""
    address = serve(lambda payload: payload)
    refused = threading.Event()
    sent = zmq.Socket.send_multipart

    def send_multipart(self, frames, *flags, **options):
        if frames[-1] == b"first" and self.type == zmq.ROUTER:
            refused.set()
            raise zmq.Again()
        return sent(self, frames, *flags, **options)

    monkeypatch.setattr(zmq.Socket, "send_multipart", send_multipart)
    channel = open_channel(D)
    connect(zmq.DEALER, address).send(b"first")
    assert refused.wait(WAIT_S)
    channel.ask(address, b"second")
    assert take_answers(channel) == [(address, b"second")]


def test_nothing_is_sent_to_a_listener_of_somebody_else(open_channel, stack):
    """A thread like that of vLLM's own connectors ends by an exception at what it does not know."""
    listener = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.ROUTER))
    address = InstanceAddress(EngineId("p"), HOST, listener.bind_to_random_port(f"tcp://{HOST}"))
    channel = open_channel(D)
    channel.ask(address, b"hello")
    ((refused, why),) = _until(channel, channel.refusals, 1, lambda: None)
    assert refused == address
    assert f"whoever listens at {address} is no instance of kvcourier" in why
    assert channel.refusals() == channel.answers() == []
    channel.close()
    assert not listener.poll(50)


def test_an_instance_that_is_stopped_is_asked_when_it_goes_on(serve, open_channel, monkeypatch):
    found = [Listener.SILENT, Listener.SILENT, Listener.OURS]
    monkeypatch.setattr(side_channel, "meet", lambda *_: found.pop(0))
    address = serve(bytes.upper)
    channel = open_channel(D)
    channel.ask(address, b"hello")
    assert take_answers(channel) == [(address, b"HELLO")]
    assert not found


def test_who_asks_as_vllms_own_connectors_do_hears_at_once_that_it_is_wrong(serve, connect):
    def answer(payload: bytes) -> bytes:
        raise RemoteProtocolError("no handshake of ours")

    theirs = connect(zmq.REQ, serve(answer))
    theirs.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
    assert theirs.recv_multipart() == [b"this is an instance of kvcourier"]


# Messages.


def test_messages_go_both_ways(open_channel):
    prefill, decode = open_channel(P), open_channel(D)
    decode.connect(P, HOST, prefill.port)
    prefill.connect(D, HOST, decode.port)
    assert decode.send(P, b"to p")
    assert prefill.send(D, b"to d")
    assert take(prefill) == [(D_IDENTITY, b"to p")]
    assert take(decode) == [(b"life-of-p/pp0tp0", b"to d")]


def test_who_has_no_socket_to_a_peer_answers_the_way_it_came(open_channel):
    prefill, decode = open_channel(P), open_channel(D)
    decode.connect(P, HOST, prefill.port)
    decode.send(P, b"question")
    assert take(prefill) == [(D_IDENTITY, b"question")]
    assert prefill.send(D, b"answer")
    assert take(decode) == [(b"", b"answer")]


def test_messages_to_one_peer_stay_in_order(open_channel):
    prefill, decode = open_channel(P), open_channel(D)
    decode.connect(P, HOST, prefill.port)
    for index in range(200):
        assert decode.send(P, str(index).encode())
    assert [payload for _, payload in take(prefill, 200)] == [b"%d" % i for i in range(200)]


def test_a_peer_may_be_connected_before_it_is_there(open_channel):
    decode = open_channel(D)
    port = free_port()
    decode.connect(P, HOST, port)
    assert decode.send(P, b"early")
    server = HandshakeServer(HOST, port, seen_by := _Recorder(), MAX_BYTES)
    server.start()
    assert seen_by.event.wait(WAIT_S)
    server.close()
    assert seen_by.payloads == [b"early"]


class _Recorder:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.payloads: list[bytes] = []

    def __call__(self, payload: bytes) -> bytes:
        self.payloads.append(payload)
        self.event.set()
        return b""


def test_nobody_to_send_to(open_channel):
    assert not open_channel(P).send(D, b"?")


def test_a_full_queue_is_told_not_waited_for(open_channel):
    decode = open_channel(D)
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        decode.connect(P, HOST, silent.getsockname()[1])
        sent = 0
        while decode.send(P, b"x"):
            sent += 1
            assert sent < 1_000_000
        assert sent > 0
        decode.disconnect(P)


def test_connecting_and_disconnecting_again_is_fine(open_channel):
    prefill, decode = open_channel(P), open_channel(D)
    decode.connect(P, HOST, prefill.port)
    decode.connect(P, HOST, 1)
    assert decode.send(P, b"once")
    assert take(prefill) == [(D_IDENTITY, b"once")]
    decode.disconnect(P)
    decode.disconnect(P)
    decode.disconnect(peer("nobody"))
    assert not decode.send(P, b"gone")
    decode.connect(P, HOST, prefill.port)
    assert decode.send(P, b"twice")
    assert take(prefill) == [(D_IDENTITY, b"twice")]


def test_a_peer_whose_socket_broke_is_not_locked_out_by_its_ghost(open_channel):
    prefill, ghost, decode = open_channel(P), open_channel(D), open_channel(D)
    ghost.connect(P, HOST, prefill.port)
    ghost.send(P, b"old")
    take(prefill)
    decode.connect(P, HOST, prefill.port)
    decode.send(P, b"new")
    assert take(prefill) == [(D_IDENTITY, b"new")]
    assert prefill.send(D, b"answer")
    assert take(decode) == [(b"", b"answer")]


def test_a_connection_that_breaks_is_told_once(open_channel):
    prefill, decode = open_channel(P), open_channel(D)
    decode.connect(P, HOST, prefill.port)
    decode.send(P, b"hello")
    take(prefill)
    assert decode.resets() == []
    prefill.close()
    assert _until(decode, decode.resets, 1, lambda: None) == [P]
    assert decode.resets() == []


def test_a_connection_that_we_close_is_not_told_of(open_channel):
    prefill, decode = open_channel(P), open_channel(D)
    decode.connect(P, HOST, prefill.port)
    decode.send(P, b"hello")
    take(prefill)
    decode.disconnect(P)
    decode.wait(0.05)
    assert decode.resets() == []


def test_many_peers_can_be_watched(open_channel):
    """More than ZMQ's default number of sockets: a rank may know a thousand peers."""
    prefill, decode = open_channel(P), open_channel(D)
    # The others where nobody listens: one inbox lets a name have one connection at a time.
    nobody = free_port()
    for index in range(399):
        decode.connect(peer("q", index), HOST, nobody)
    decode.connect(P, HOST, prefill.port)
    assert decode.send(P, b"hello")
    assert take(prefill) == [(D_IDENTITY, b"hello")]


def test_a_message_that_is_too_long_is_dropped_without_harm(open_channel):
    prefill, decode, other = open_channel(P), open_channel(D), open_channel(peer("e"))
    decode.connect(P, HOST, prefill.port)
    other.connect(P, HOST, prefill.port)
    assert decode.send(P, b"x" * (MAX_BYTES + 1))
    other.send(P, b"fine")
    assert take(prefill) == [(b"life-of-e/pp0tp0", b"fine")]
    # ZMQ connects again by itself; what was under way on the old connection may be lost with it.
    arrived = take(prefill, nudge=lambda: decode.send(P, b"small"))
    assert set(arrived) == {(D_IDENTITY, b"small")}


def test_a_flood_is_taken_in_portions(open_channel, monkeypatch):
    prefill, decode = open_channel(P), open_channel(D)
    decode.connect(P, HOST, prefill.port)
    for index in range(9):
        decode.send(P, b"%d" % index)
    monkeypatch.setattr("kvcourier.runtime.side_channel._MAX_QUEUED", 4)
    portions = []
    taken = _until(prefill, lambda: portions.append(prefill.messages()) or portions[-1], 9, int)
    assert len(taken) == 9
    assert max(map(len, portions)) <= 4


def test_a_message_without_content_is_no_message(open_channel):
    prefill = open_channel(P)
    context = zmq.Context()
    try:
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.ROUTING_ID, b"raw")
        raw.connect(f"tcp://{HOST}:{prefill.port}")
        raw.send_multipart([b"", b"two", b"frames"])
        raw.send(b"")
        assert take(prefill, 2) == [(b"raw", b"frames"), (b"raw", b"")]
    finally:
        context.destroy(linger=0)


# Senders.


def test_only_the_owner_of_a_socket_speaks_for_itself(open_channel):
    prefill, decode = open_channel(P), open_channel(D)
    decode.connect(P, HOST, prefill.port)
    decode.send(P, b"I am e")
    ((identity, _),) = take(prefill)
    assert sender_matches(identity, D)
    assert not sender_matches(identity, peer("e"))
    assert not sender_matches(identity, peer("d", tp_rank=1))
    assert not sender_matches(identity, D._replace(incarnation=Incarnation("next life")))


def test_the_way_of_an_answer_says_nothing_about_the_sender():
    assert sender_matches(b"", D)


# Waiting.


def test_a_wake_ends_a_wait_in_another_thread(open_channel):
    channel = open_channel(P)
    waiter = threading.Thread(target=lambda: channel.wait(None), daemon=True)
    waiter.start()
    channel.wake()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()


def test_a_wake_before_the_wait_counts_and_counts_once(open_channel):
    channel = open_channel(P)
    channel.wake()
    channel.wake()
    channel.wait(None)
    woken = threading.Event()
    waiter = threading.Thread(target=lambda: (channel.wait(None), woken.set()), daemon=True)
    waiter.start()
    assert not woken.is_set()
    channel.wake()
    assert woken.wait(WAIT_S)
    waiter.join(WAIT_S)


def test_a_message_ends_a_wait(open_channel):
    prefill, decode = open_channel(P), open_channel(D)
    decode.connect(P, HOST, prefill.port)
    decode.send(P, b"wake up")
    prefill.wait(None)
    # ZMQ may wake us for the connection itself; the message follows.
    assert take(prefill) == [(D_IDENTITY, b"wake up")]


@pytest.mark.parametrize("timeout_s", [0.0, 0.0002, 0.002])
def test_a_wait_ends_by_itself(open_channel, timeout_s):
    open_channel(P).wait(timeout_s)
