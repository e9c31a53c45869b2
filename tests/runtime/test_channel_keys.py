"""Keys on the side channel: who is let in, who is believed, and which files can be used."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.auth

from endpoint_rig import Rig
from kvcourier.config import ChannelKeys, Limits
from kvcourier.core.events import Sign
from kvcourier.core.messages import Fenced, encode, sender_fields
from kvcourier.errors import ConfigError, RemoteProtocolError
from kvcourier.ids import EngineId, Incarnation, InstanceAddress, PeerRank, Rank, RequestId
from kvcourier.runtime.channel_keys import read_keys
from kvcourier.runtime.engine_link import Abort, EngineLink, new_token
from kvcourier.runtime.greeting import Listener
from kvcourier.runtime.handshake_server import HandshakeServer
from kvcourier.runtime.side_channel import SideChannel
from kvcourier.runtime.vital_signs import look
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate
from runtime.courier_world import (
    TARGET,
    describe,
    dropped,
    failure,
    outcomes,
    quarantined,
    transfer,
)
from side_channel_keys import make_keys

HOST, WAIT_S = "127.0.0.1", 20.0
MODES = pytest.mark.parametrize("mode", ["push", "pull"])
Keys = Callable[..., ChannelKeys]


@pytest.fixture
def secrets(tmp_path) -> Path:
    """Where the certificates are made; each test hands the public ones out."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    return folder


@pytest.fixture
def keys(tmp_path, secrets) -> Keys:
    """The keys of an instance that knows some others; each has one pair in a test."""

    def make(name: str, *knows: str, pair: str | None = None) -> ChannelKeys:
        folder = tmp_path / f"known to {name} with {pair}"
        return make_keys(secrets, folder, name, *knows, pair=pair)

    return make


def address_of(rig: Rig) -> str:
    info = rig.endpoint.instance_info()
    return f"{info['engine_id']} at {HOST}:{info['side_channel_port']}"


# Between real instances.


@MODES
def test_instances_that_know_each_other_exchange_kv(world, keys, mode):
    prefill = world.rig("p", keys=keys("p", "d"))
    decode = world.rig("d", keys=keys("d", "p"))
    transfer(prefill, decode, mode, "x")
    world.still_works(prefill, decode)
    for rig in (prefill, decode):
        assert dropped(rig, "wrong_sender") == dropped(rig, "no_way_to_peer") == 0


@MODES
def test_without_keys_an_instance_with_keys_is_out_of_reach(world, keys, mode):
    prefill, decode = world.rig("p", keys=keys("p", "d")), world.rig("d")
    transfer(prefill, decode, mode, "x")
    reason = failure(decode, "d-x")
    # The latter where it hangs up, time and again, before we have read why.
    assert re.fullmatch(
        f"{address_of(prefill)} (uses|hangs up: it may use) side-channel keys, "
        "and this instance has none",
        reason,
    )


def test_an_instance_without_keys_is_no_peer_of_one_with_keys(world, keys):
    prefill, decode = world.rig("p"), world.rig("d", keys=keys("d", "p"))
    transfer(prefill, decode, "push", "x")
    reason = failure(decode, "d-x")
    assert re.fullmatch(
        f"{address_of(prefill)} (uses no side-channel keys, and this instance does"
        "|hangs up: it has another key than the one that is kept here for it, or none)",
        reason,
    )


def test_a_key_that_is_not_known_is_not_let_in(world, keys):
    prefill, decode = world.rig("p", keys=keys("p")), world.rig("d", keys=keys("d", "p"))
    transfer(prefill, decode, "push", "x")
    expected = "does not let our key in: it is not among the keys of its peers"
    assert failure(decode, "d-x") == f"{address_of(prefill)} {expected}"


def test_who_does_not_have_the_secret_of_an_instance_cannot_stand_in_for_it(world, keys):
    impostor = world.rig("p", keys=keys("p", "d", pair="x"))
    decode = world.rig("d", keys=keys("d", "p"))
    transfer(impostor, decode, "push", "x")
    expected = "hangs up: it has another key than the one that is kept here for it, or none"
    assert failure(decode, "d-x") == f"{address_of(impostor)} {expected}"


def test_an_instance_without_a_known_key_is_not_connected_to(world, keys):
    prefill, decode = world.rig("p", keys=keys("p", "d")), world.rig("d", keys=keys("d"))
    transfer(prefill, decode, "push", "x")
    expected = "the public key of 'p' is not among the keys of this instance's peers"
    assert failure(decode, "d-x") == expected


def test_a_peer_with_a_key_cannot_speak_for_another(world, keys):
    """With its own key but D's peer's name on the socket and in the message."""
    prefill = world.rig("p", keys=keys("p", "d", "e"))
    decode = world.rig("d", keys=keys("d", "p", "e"))
    world.plan(Operation.WRITE, Fate.HOLD)
    transfer(prefill, decode, "push", "x")
    write = world.held(prefill, Operation.WRITE)
    decode.endpoint.abort(RequestId("d-x"))
    decode.wait_until(lambda: quarantined(decode) == len(TARGET))
    forged = PeerRank(EngineId("p"), prefill.endpoint.incarnation, Rank(0, 0))
    liar = SideChannel(forged, HOST, Limits().max_message_bytes, keys("e", "d"))
    try:
        address, instance = describe(decode, liar)
        at = PeerRank(instance.engine_id, instance.incarnation, Rank(0, 0))
        liar.connect(at, address.host, instance.ranks[Rank(0, 0)].side_channel_port)
        assert liar.send(at, encode(Fenced(sender_fields(forged), "d-x")))
        decode.wait_until(lambda: dropped(decode, "wrong_sender") == 1)
    finally:
        liar.close()
    assert outcomes(decode, "d-x") == []
    assert quarantined(decode) == len(TARGET)
    world.network.deliver(write)


def test_hostile_clients_disturb_nobody(world, keys):
    """Junk, a greeting of ZMQ and then junk, and a client without a key that sends at once."""
    prefill = world.rig("p", keys=keys("p", "d"))
    decode = world.rig("d", keys=keys("d", "p"))
    port = prefill.endpoint.instance_info()["side_channel_port"]
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(22, b"\0") + bytes(32)
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, greeting + b"\xff" * 300):
        with socket.create_connection((HOST, port)) as client:
            client.sendall(junk)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://{HOST}:{port}")
        for _ in range(100):
            client.send(b"hello", zmq.DONTWAIT)
        world.still_works(prefill, decode)
        assert not client.poll(0), "nothing is answered"


# Sockets.


def test_an_instance_with_keys_shows_that_it_lives(keys):
    """The greeting that a closer look waits for comes before the keys."""
    me = PeerRank(EngineId("p"), Incarnation("life"), Rank(0, 0))
    channel = SideChannel(me, HOST, 1000, keys("p"))
    try:
        assert look(HOST, channel.port, WAIT_S) is Sign.RUNS
    finally:
        channel.close()
    assert look(HOST, channel.port, WAIT_S) is Sign.GONE


def test_a_scheduler_reaches_its_own_couriers(keys):
    own, token = keys("d"), new_token()
    channel = SideChannel(PeerRank(EngineId("d"), Incarnation("l"), Rank(0, 0)), HOST, 1000, own)
    link = EngineLink(EngineId("d"), own)
    try:
        link.connect(HOST, channel.port, token)
        link.send(Abort("x"))
        channel.wait(WAIT_S)
        ((_, payload),) = channel.messages()
        assert payload.startswith(token)
    finally:
        link.close()
        channel.close()


def test_sockets_with_keys_close_twice_and_free_their_ports(keys):
    own = keys("p", "d")
    server = HandshakeServer(HOST, 0, lambda payload: payload, 1000, own)
    with pytest.raises(ConfigError, match="cannot be opened"):
        HandshakeServer(HOST, server.port, lambda payload: payload, 1000, own)
    server.start()
    server.close()
    server.close()
    again = HandshakeServer(HOST, server.port, lambda payload: payload, 1000, own)
    again.close()


def test_a_key_may_be_refused_before_it_is_known_who_listens(keys):
    """The look at the listener is not done yet when the socket is good for nothing already."""
    me = PeerRank(EngineId("d"), Incarnation("life"), Rank(0, 0))
    channel = SideChannel(me, HOST, 1000, keys("d", "p"))
    server = HandshakeServer(HOST, 0, lambda payload: payload, 1000, keys("p"))
    server.start()
    try:
        address = InstanceAddress(EngineId("p"), HOST, server.port)
        channel._begin_meeting = lambda address: None  # type: ignore[method-assign]
        channel.ask(address, b"?")
        asked = channel._handshakes[address]
        assert asked.monitor.socket.poll(WAIT_S * 1000)
        assert any(not asked.socket.poll(0, zmq.POLLOUT) for _ in range(1_000_000))
        channel._meetings.say((address, asked.number), Listener.LOCKED)
        assert channel.answers() == []
        ((refused, reason),) = channel.refusals()
        assert refused == address and "does not let our key in" in reason
    finally:
        channel.close()
        server.close()


def test_nothing_is_asked_of_one_whose_key_is_not_known(keys):
    me = PeerRank(EngineId("d"), Incarnation("life"), Rank(0, 0))
    channel = SideChannel(me, HOST, 1000, keys("d"))
    try:
        with pytest.raises(RemoteProtocolError, match=r"public key of '../../p' is not among"):
            channel.ask(InstanceAddress(EngineId("../../p"), HOST, 1), b"?")
        assert channel.answers() == channel.refusals() == []
    finally:
        channel.close()


# Files.


def test_a_secret_is_never_shown(keys):
    own = keys("p")
    assert own.secret.decode() not in repr(own)


def test_without_settings_there_are_no_keys(tmp_path):
    assert read_keys(None, None, EngineId("p")) is None
    for given in ((tmp_path, None), (None, tmp_path)):
        with pytest.raises(ConfigError, match="expected both or neither, found only"):
            read_keys(*given, EngineId("p"))


def test_a_zmq_without_curve_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ConfigError, match="has no CURVE; install a pyzmq"):
        read_keys(tmp_path / "p.key_secret", tmp_path, EngineId("p"))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b'public-key = ""', b'public-key = "short"'),
        b'public-key = "' + b"#" * 40 + b'"',
        b'public-key = "' + b"~" * 40 + b'"',
        b'public-key = "' + b"a" * 45 + b'"',
    ],
)
@pytest.mark.parametrize("which", ["p.key_secret", "d.key"])
def test_a_file_that_is_no_certificate_is_refused_by_name(secrets, which, content):
    zmq.auth.create_certificates(secrets, "p")
    (secrets / which).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{which}: expected a certificate"):
        read_keys(secrets / "p.key_secret", secrets, EngineId("p"))


def test_a_secret_that_is_none_or_missing_is_refused_by_name(secrets):
    zmq.auth.create_certificates(secrets, "p")
    for name in ("p.key", "q.key_secret"):
        with pytest.raises(ConfigError, match=rf"{name}: expected a certificate"):
            read_keys(secrets / name, secrets, EngineId("p"))
    with pytest.raises(ConfigError, match="expected a folder with public keys"):
        read_keys(secrets / "p.key_secret", secrets / "p.key", EngineId("p"))


def test_another_ones_secret_is_refused(secrets):
    for name in ("p", "d"):
        zmq.auth.create_certificates(secrets, name)
    with pytest.raises(ConfigError, match=r"p\.key: expected the public key of .*d\.key_secret"):
        read_keys(secrets / "d.key_secret", secrets, EngineId("p"))
