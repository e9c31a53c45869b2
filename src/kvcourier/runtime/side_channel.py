"""Small messages between instances, beside the data path (ZMQ).

Decides sockets and framing: one inbox a rank, one outgoing socket a known peer rank, and one for
each handshake that is asked for. Refuses to know what the messages mean; a handshake's bytes are
the core's.

A courier owns its `SideChannel` and calls it from its own thread only, except `wake`.
"""

import contextlib
import logging
import math
import os
import threading
import time
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
from kvcourier.runtime.greeting import Listener, meet
from kvcourier.runtime.looks import Looks
from kvcourier.runtime.vital_signs import look
from kvcourier.runtime.zmq_sockets import bind, connect, destroy, readable

_log = logging.getLogger(__name__)
_MAX_QUEUED = 4096
_MAX_SOCKETS = 1 << 16
"""Three for each rank of a peer, one to talk and two to watch it. ZMQ's own limit is 1023."""
_MEETING_S = 1.0
_KEY = b" key "
"""Between identity and key; the key is the rest, and of one length, so nobody can forge it."""

_NOT_TO_BE_ASKED = {
    Listener.GONE: "nobody listens at {}",
    Listener.FOREIGN: (
        "whoever listens at {} is no instance of kvcourier; both instances of a pair need it (in "
        "vLLM, CourierConnector), so switch that one as well, or send it no such requests"
    ),
}


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
            self.port = bind(self._inbox, host, 0)
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
        while len(taken) < _MAX_QUEUED and readable(self._inbox):
            identity, *frames = self._inbox.recv_multipart(copy=False)
            if frames:
                key = b"" if self._keys is None else _KEY + key_of(frames[-1])
                taken.append((identity.bytes + key, frames[-1].bytes))
        for peer, socket in self._outgoing.items():
            known_as = b"" if self._keys is None else self._known_as(peer)
            while len(taken) < _MAX_QUEUED and readable(socket):
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
            connect(socket, host, port)
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
            if readable(monitor):
                broken.append(peer)
                while readable(monitor):
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
        connect(socket, address.host, address.port)
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
            if readable(asked.socket):
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
        destroy(self._context, self._key_check, linger=200)

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


def identity_of(peer: PeerRank) -> bytes:
    """What a rank's sockets say who they are."""
    return f"{peer.incarnation}/{peer.rank}".encode()
