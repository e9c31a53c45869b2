"""Keys of the side channel: CurveZMQ, so that both ends of a connection prove who they are.

Decides which files hold them, what sockets are told, and which client is let in. Refuses to know
what is said over a connection.

A client has to know the key of whom it connects to, so public keys are kept by engine id. A server
asks `KeyCheck` about each client's key (ZMQ's ZAP), in whose answer the key becomes a property of
every message of that connection.
"""

import logging
import struct
import threading
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvcourier.config import ChannelKeys
from kvcourier.errors import ConfigError, RemoteProtocolError
from kvcourier.ids import EngineId, InstanceAddress

_log = logging.getLogger(__name__)
_ZAP = "inproc://zeromq.zap.01"
_STOP = b"stop"
_MOST_TORN = 8
"""About a second, as ZMQ tries again after some 0.15 s."""
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def read_keys(
    secret_file: Path | None, peers: Path | None, engine_id: EngineId
) -> ChannelKeys | None:
    """Read our own key pair, and the public keys of all that we may have to do with.

    Args:
        secret_file: certificate of `zmq.auth.create_certificates` with our secret key.
        peers: folder with a certificate ENGINE_ID.key, without the secret, for each instance.
        engine_id: ours.

    Returns:
        None where neither is given.

    Raises:
        ConfigError: one is missing, a file cannot be used, or there is no CURVE in this ZMQ.
    """
    if secret_file is None and peers is None:
        return None
    if secret_file is None or peers is None:
        raise ConfigError(
            "side-channel key and side-channel peer keys: expected both or neither, found only "
            f"{secret_file or peers}"
        )
    if not zmq.has("curve"):
        raise ConfigError(
            f"{secret_file}: the libzmq {zmq.zmq_version()} of this environment has no CURVE; "
            "install a pyzmq that is built with libsodium, or do without keys"
        )
    public, secret = _certificate(secret_file)
    if secret is None or zmq.curve_public(secret) != public:
        raise ConfigError(
            f"{secret_file}: expected a certificate with a secret key and its public key, as "
            "zmq.auth.create_certificates writes it to NAME.key_secret"
        )
    if not peers.is_dir():
        raise ConfigError(f"{peers}: expected a folder with public keys, ENGINE_ID.key")
    known = {EngineId(each.stem): _certificate(each)[0] for each in sorted(peers.glob("*.key"))}
    if known.setdefault(engine_id, public) != public:
        raise ConfigError(
            f"{peers / f'{engine_id}.key'}: expected the public key of {secret_file}, which is "
            "ours, found another one"
        )
    return ChannelKeys(public, secret, known)


def be_server(socket: "zmq.Socket[bytes]", keys: ChannelKeys | None) -> None:
    """Have a socket, before it is bound, take only clients that `KeyCheck` lets in."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvcourier")


def be_client(socket: "zmq.Socket[bytes]", keys: ChannelKeys | None, engine_id: EngineId) -> None:
    """Have a socket, before it connects, prove our key, and talk only to that instance.

    Raises:
        RemoteProtocolError: its key is not known.
    """
    if keys is None:
        return
    if engine_id not in keys.peers:
        raise RemoteProtocolError(
            f"the public key of {engine_id!r} is not among the keys of this instance's peers"
        )
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.peers[engine_id])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def key_of(frame: zmq.Frame) -> bytes:
    """The key that was proven on the connection by which a message came."""
    key: str = frame.get("User-Id")  # type: ignore[assignment]
    return key.encode()


class KeyCheck:
    """Answers, in a thread of its own, whether a client may connect to a context's servers.

    To be made before any of them is bound: ZMQ lets everybody in whom nobody checks.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: ChannelKeys) -> None:
        self._context = context
        self._allowed = frozenset(keys.peers.values())
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._thread = threading.Thread(target=self._run, name="kv-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more; before the context is destroyed."""
        with self._context.socket(zmq.REQ) as stop:
            # Were the thread gone, the word to it would keep the context from ending.
            stop.setsockopt(zmq.LINGER, 0)
            stop.connect(_ZAP)
            stop.send(_STOP)
            self._thread.join()

    def _run(self) -> None:
        with self._socket:
            while True:
                frames = self._socket.recv_multipart()
                if frames == [_STOP]:
                    return
                self._socket.send_multipart(self._answer(frames))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, serial, _, place, _, mechanism, *credentials = frames
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if key in self._allowed:
            return [version, serial, b"200", b"OK", key, b""]
        _log.warning("side channel: a client at %s has no key that we know", place.decode())
        return [version, serial, b"400", b"unknown key", b"", b""]


class HandshakeMonitor:
    """Watches a client socket for signs that no connection will come about."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._watched = socket
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(HANDSHAKE_FAILURES)
        self._num_torn = 0

    def problem(self, address: InstanceAddress, has_keys: bool) -> str:
        """Why no connection will come about; empty if it still may."""
        while self.socket.poll(0):
            found = parse_monitor_message(self.socket.recv_multipart())
            event, value = int(found["event"]), int(found["value"])
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return f"{address} does not let our key in: it is not among the keys of its peers"
            if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return (
                    f"{address} uses no side-channel keys, and this instance does"
                    if has_keys
                    else f"{address} uses side-channel keys, and this instance has none"
                )
            # A server that cannot open what was meant for another key only hangs up. So does one
            # that is about to end, and, if it is quicker than our reading, one without keys.
            self._num_torn += 1
        if self._num_torn < _MOST_TORN:
            return ""
        return (
            f"{address} hangs up: it has another key than the one that is kept here for it, or none"
            if has_keys
            else f"{address} hangs up: it may use side-channel keys, and this instance has none"
        )

    def close(self) -> None:
        """Stop watching, before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close()


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    """(public, secret or None) of a file."""
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret):
            if key is not None and len(z85.decode(key)) != 32:
                raise ValueError("a key has 40 characters")
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigError(f"{path}: expected a certificate of ZMQ: {error}") from None
    return public, secret
