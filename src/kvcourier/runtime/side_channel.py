"""Small messages between instances, beside the data path (ZMQ).

Decides sockets, addresses and framing: one handshake server an instance, one courier socket a
rank, one outgoing socket a known peer rank. Refuses to know what the messages mean; a handshake's
bytes are the core's.

A courier owns its `SideChannel` and calls it from its own thread only, except `wake`.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from kvcourier.config import ChannelKeys
from kvcourier.core.events import PeerProbed, Sign
from kvcourier.errors import ConfigError, RemoteProtocolError
from kvcourier.ids import EngineId, InstanceAddress, PeerRank
from kvcourier.runtime.channel_keys import (
    HandshakeMonitor,
    KeyCheck,
    be_client,
    be_server,
    key_of,
)
from kvcourier.runtime.greeting import NAME, Listener, meet
from kvcourier.runtime.looks import Looks
from kvcourier.runtime.vital_signs import look

_log = logging.getLogger(__name__)
_MAX_QUEUED = 4096
_MAX_SOCKETS = 1 << 16
"""Three for each rank of a peer, one to talk and two to watch it. ZMQ's own limit is 1023."""
_MEETING_S = 1.0
_KEY = b" key "
"""Between identity and key; the key is the rest, and of one length, so nobody can forge it."""


_NOT_YOURS = b"this is an instance of kvcourier"
_NOT_TO_BE_ASKED = {
    Listener.GONE: "nobody listens at {}",
    Listener.FOREIGN: (
        "whoever listens at {} is no instance of kvcourier; both instances of a pair need it (in "
        "vLLM, CourierConnector), so switch that one as well, or send it no such requests"
    ),
}


class HandshakeServer:
    """Answers handshakes at the instance's well-known address, in a thread of its own.

    Args:
        host: interface or name to bind.
        port: port to bind; 0 takes a free one.
        answer: bytes of a request to bytes of the answer; RemoteProtocolError drops the request.
        max_message_bytes: longer requests are dropped by ZMQ, with their connection.
        keys: whom to answer; None: everybody.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[bytes], bytes],
        max_message_bytes: int,
        keys: ChannelKeys | None = None,
    ) -> None:
        self._answer = answer
        self._context = zmq.Context()
        self._key_check = None if keys is None else KeyCheck(self._context, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTING_ID, NAME)
        be_server(self._socket, keys)
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-handshake", daemon=True)
        try:
            self.port = _bind(self._socket, host, port)
        except ConfigError:
            self.close()
            raise

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port; blocks for a moment; idempotent."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._stop_fd)
        _destroy(self._context, self._key_check, linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_fd, zmq.POLLIN)
        while self._stop_fd not in dict(poller.poll()):
            identity, *frames = self._socket.recv_multipart()
            *envelope, payload = frames or [b""]
            try:
                reply = self._answer(payload)
            except RemoteProtocolError as error:
                _log.warning("handshake request dropped: %s", error)
                if envelope != [b""]:
                    continue
                # A REQ socket, as vLLM's own connectors have. It cannot read this, so it fails its
                # request at once, and not after the seconds that it waits for an answer.
                reply = _NOT_YOURS
            try:
                self._socket.send_multipart([identity, *envelope, reply], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                # The asker has gone, or does not read: its loss, and it asks again.
                _log.warning("handshake answer dropped: %s", error)


class Channel(Protocol):
    """One rank's way to its peers, as a courier uses it; see `SideChannel`, the real one."""

    port: int
    """Where peers reach this rank."""

    def wake(self) -> None:
        """Make a running or the next `wait` return at once; from any thread."""

    def wait(self, timeout_s: float | None) -> None:
        """Until a message, a wake-up or the time-out."""

    def messages(self) -> list[tuple[bytes, bytes]]:
        """Take what has come: (identity of the sender's socket or b"" for an answer, payload)."""

    def is_from(self, identity: bytes, peer: PeerRank) -> bool:
        """Whether that is a socket of this peer, as its message says."""

    def connect(self, peer: PeerRank, host: str, port: int) -> None:
        """Open a way to a peer rank. Raises RemoteProtocolError for a host that is none."""

    def disconnect(self, peer: PeerRank) -> None:
        """Close that way; unknown peers are fine."""

    def send(self, peer: PeerRank, payload: bytes) -> bool:
        """Send; False if there is no way. True promises nothing."""

    def reply(self, identity: bytes, payload: bytes) -> None:
        """Send back to a socket that a message came from; it may be gone, or not read."""

    def ask(self, address: InstanceAddress, payload: bytes) -> None:
        """Send a handshake request. Raises RemoteProtocolError for a host that is none."""

    def answers(self) -> list[tuple[InstanceAddress, bytes]]:
        """Take the handshake answers that have come; each ends its request."""

    def refusals(self) -> list[tuple[InstanceAddress, str]]:
        """Take the addresses that were asked and cannot answer, and why; each ends its request."""

    def drop(self, address: InstanceAddress) -> None:
        """Give a handshake up; unknown ones are fine."""

    def resets(self) -> list[PeerRank]:
        """Peers whose connection has broken since the last time."""

    def look_at(self, peer: PeerRank, timeout_s: float) -> None:
        """Look whether the peer's process is there and runs; the answer comes out of `signs`."""

    def signs(self) -> list[PeerProbed]:
        """Take what the looks have found."""

    def close(self) -> None:
        """Close everything; idempotent."""


class SideChannel:
    """One rank's sockets: an inbox peers send to, and outgoing sockets to known peers."""

    def __init__(
        self, me: PeerRank, host: str, max_message_bytes: int, keys: ChannelKeys | None = None
    ) -> None:
        self._identity = identity_of(me)
        self._max_message_bytes = max_message_bytes
        self._keys = keys
        self._context = zmq.Context()
        self._key_check = None if keys is None else KeyCheck(self._context, keys)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._poller = zmq.Poller()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._closed = False
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._inbox = self._socket(zmq.ROUTER)
        # A peer that connects again after its socket broke must not be locked out by its ghost.
        self._inbox.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._inbox.setsockopt(zmq.ROUTER_MANDATORY, 1)
        be_server(self._inbox, keys)
        try:
            self.port = _bind(self._inbox, host, 0)
        except ConfigError:
            self.close()
            raise
        self._outgoing: dict[PeerRank, zmq.Socket[bytes]] = {}
        self._monitors: dict[PeerRank, zmq.Socket[bytes]] = {}
        self._places: dict[PeerRank, tuple[str, int]] = {}
        self._vital_signs: Looks[PeerRank, Sign] = Looks(look, self.wake)
        self._meetings: Looks[tuple[InstanceAddress, int], Listener] = Looks(meet, self.wake)
        self._num_asked = 0
        self._handshakes: dict[InstanceAddress, _Asked] = {}
        self._refused: list[tuple[InstanceAddress, str]] = []

    def wake(self) -> None:
        """Make a running or the next `wait` return at once; from any thread, also after `close`."""
        # Under the lock, since the number of a closed descriptor may be somebody else's by now.
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout_s: float | None) -> None:
        """Until a message, a wake-up or the time-out. ZMQ counts in whole milliseconds."""
        if timeout_s is not None and 0 < timeout_s < 0.001:
            time.sleep(timeout_s)
            timeout_s = 0.0
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)

    def messages(self) -> list[tuple[bytes, bytes]]:
        """Take what has come: (identity of the sender's socket or b"" for an answer, payload).

        With keys, an identity has the sender's key as well, also an answer's.
        """
        taken: list[tuple[bytes, bytes]] = []
        while len(taken) < _MAX_QUEUED and _readable(self._inbox):
            identity, *frames = self._inbox.recv_multipart(copy=False)
            if frames:
                key = b"" if self._keys is None else _KEY + key_of(frames[-1])
                taken.append((identity.bytes + key, frames[-1].bytes))
        for peer, socket in self._outgoing.items():
            known_as = b"" if self._keys is None else self._known_as(peer)
            while len(taken) < _MAX_QUEUED and _readable(socket):
                taken.append((known_as, socket.recv_multipart()[-1]))
        return taken

    def is_from(self, identity: bytes, peer: PeerRank) -> bool:
        """Whether that is a socket of this peer; with keys, of an owner of its instance's."""
        if self._keys is None:
            return sender_matches(identity, peer)
        return identity == self._known_as(peer)

    def _known_as(self, peer: PeerRank) -> bytes:
        assert self._keys is not None
        return identity_of(peer) + _KEY + self._keys.peers.get(peer.engine_id, b"")

    def connect(self, peer: PeerRank, host: str, port: int) -> None:
        """Open an outgoing socket to a peer rank's inbox; does not wait for it to answer.

        Raises:
            RemoteProtocolError: the peer's host is not an address, or its key is not known.
        """
        if peer not in self._outgoing:
            socket = self._client(peer.engine_id)
            socket.setsockopt(zmq.ROUTING_ID, self._identity)
            _connect(socket, host, port)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            for each in (socket, monitor):
                self._poller.register(each, zmq.POLLIN)
            self._outgoing[peer], self._monitors[peer] = socket, monitor
            self._places[peer] = (host, port)

    def disconnect(self, peer: PeerRank) -> None:
        """Close the outgoing socket; unknown peers are fine."""
        socket = self._outgoing.pop(peer, None)
        if socket is not None:
            for each in (socket, self._monitors.pop(peer)):
                self._poller.unregister(each)
            socket.disable_monitor()
            socket.close()
            del self._places[peer]

    def resets(self) -> list[PeerRank]:
        """Peers whose connection has broken since the last time; ZMQ tries to connect again."""
        broken = []
        for peer, monitor in self._monitors.items():
            if _readable(monitor):
                broken.append(peer)
                while _readable(monitor):
                    monitor.recv_multipart()
        return broken

    def look_at(self, peer: PeerRank, timeout_s: float) -> None:
        """Look whether the peer's process is there and runs; the answer comes out of `signs`. One
        that we have no socket to is silent."""
        if peer in self._places:
            self._vital_signs.begin(peer, *self._places[peer], timeout_s)
        else:
            self._vital_signs.say(peer, Sign.SILENT)

    def signs(self) -> list[PeerProbed]:
        """Take what the looks have found."""
        return [PeerProbed(peer, sign) for peer, sign in self._vital_signs.take()]

    def send(self, peer: PeerRank, payload: bytes) -> bool:
        """Send by the outgoing socket, else back the way the peer reached us.

        False if there is no way, or its queue is full; the sender's deadline takes care.
        """
        socket = self._outgoing.get(peer)
        try:
            if socket is not None:
                socket.send(payload, zmq.DONTWAIT)
            else:
                self._inbox.send_multipart([identity_of(peer), payload], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def reply(self, identity: bytes, payload: bytes) -> None:
        """Send back to a socket that a message came from; it may be gone, or not read."""
        if self._keys is not None:
            identity = identity[: identity.rindex(_KEY)]
        with contextlib.suppress(zmq.ZMQError):
            self._inbox.send_multipart([identity, payload], zmq.DONTWAIT)

    def ask(self, address: InstanceAddress, payload: bytes) -> None:
        """Send a handshake request, once it is known that an instance of kvcourier listens there.

        Its answer comes out of `answers`. Where nobody listens, or somebody else, or one of the two
        does not let the other in, the address comes out of `refusals`.

        Raises:
            RemoteProtocolError: the peer's host is not an address, or its key is not known.
        """
        self.drop(address)
        socket = self._client(address.engine_id)
        monitor = HandshakeMonitor(socket)
        _connect(socket, address.host, address.port)
        for each in (socket, monitor.socket):
            self._poller.register(each, zmq.POLLIN)
        self._num_asked += 1
        self._handshakes[address] = _Asked(self._num_asked, payload, socket, monitor)
        self._begin_meeting(address)

    def _begin_meeting(self, address: InstanceAddress) -> None:
        number = self._handshakes[address].number
        self._meetings.begin((address, number), address.host, address.port, _MEETING_S)

    def answers(self) -> list[tuple[InstanceAddress, bytes]]:
        """Take the handshake answers that have come; each ends its request."""
        self._send_requests()
        taken = []
        for address, asked in list(self._handshakes.items()):
            if _readable(asked.socket):
                taken.append((address, asked.socket.recv_multipart()[-1]))
                self.drop(address)
        return taken

    def _send_requests(self) -> None:
        """To those of whom it is known by now who they are."""
        for (address, number), listener in self._meetings.take():
            asked = self._handshakes.get(address)
            if asked is None or asked.number != number:
                continue
            if listener in _NOT_TO_BE_ASKED:
                self._refused.append((address, _NOT_TO_BE_ASKED[listener].format(address)))
            elif listener is Listener.SILENT:
                self._begin_meeting(address)
            else:
                # One that has not let our key in meanwhile takes nothing: `refusals` tells of it.
                with contextlib.suppress(zmq.Again):
                    asked.socket.send(asked.payload, zmq.DONTWAIT)

    def refusals(self) -> list[tuple[InstanceAddress, str]]:
        """Addresses that were asked and cannot answer, and why; each ends its request."""
        self._send_requests()
        refused, self._refused = self._refused, []
        for address, asked in self._handshakes.items():
            problem = asked.monitor.problem(address, self._keys is not None)
            if problem:
                refused.append((address, problem))
        for address, _ in refused:
            self.drop(address)
        return refused

    def drop(self, address: InstanceAddress) -> None:
        """Give a handshake up; unknown ones are fine."""
        asked = self._handshakes.pop(address, None)
        if asked is not None:
            for each in (asked.socket, asked.monitor.socket):
                self._poller.unregister(each)
            asked.monitor.close()
            asked.socket.close()

    def close(self) -> None:
        """Close everything; unsent messages get a moment to leave."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_fd)
        _destroy(self._context, self._key_check, linger=200)

    def _client(self, engine_id: EngineId) -> "zmq.Socket[bytes]":
        socket = self._socket(zmq.DEALER)
        try:
            be_client(socket, self._keys, engine_id)
        except RemoteProtocolError:
            socket.close()
            raise
        return socket

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        if kind == zmq.ROUTER:
            self._poller.register(socket, zmq.POLLIN)
        return socket


@dataclass(frozen=True, slots=True)
class _Asked:
    """A handshake that was asked for."""

    number: int
    payload: bytes
    socket: "zmq.Socket[bytes]"
    monitor: HandshakeMonitor


def sender_matches(identity: bytes, peer: PeerRank) -> bool:
    """Whether a message's claimed sender owns the socket it came from."""
    return identity in (b"", identity_of(peer))


def _readable(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _destroy(
    context: "zmq.Context[zmq.Socket[bytes]]", key_check: KeyCheck | None, linger: int
) -> None:
    if key_check is not None and not context.closed:
        key_check.close()
    context.destroy(linger=linger)


def identity_of(peer: PeerRank) -> bytes:
    """What a rank's sockets say who they are."""
    return f"{peer.incarnation}/{peer.rank}".encode()


def _connect(socket: "zmq.Socket[bytes]", host: str, port: int) -> None:
    socket.setsockopt(zmq.IPV6, ":" in host)
    try:
        socket.connect(f"tcp://{_bracketed(host)}:{port}")
    except (zmq.ZMQError, UnicodeError) as error:
        socket.close()
        raise RemoteProtocolError(f"host {host!r} cannot be connected: {error}") from None


def _bind(socket: "zmq.Socket[bytes]", host: str, port: int) -> int:
    socket.setsockopt(zmq.IPV6, ":" in host)
    endpoint = f"tcp://{_bracketed(host)}:{port if port else '*'}"
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"side channel {host}:{port} cannot be opened: {error.strerror}; "
            "choose another --side-channel-host or --side-channel-port"
        ) from None
    last = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(last.rsplit(":", 1)[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
