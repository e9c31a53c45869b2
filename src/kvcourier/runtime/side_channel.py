"""Small messages between instances, beside the data path (ZMQ).

Decides sockets, addresses and framing: one handshake server an instance, one courier socket a
rank, one outgoing socket a known peer rank. Refuses to know what the messages mean; a handshake's
bytes are the core's.

A courier owns its `SideChannel` and calls it from its own thread only, except `wake`.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import zmq

from kvcourier.core.events import PeerProbed, Sign
from kvcourier.errors import ConfigError, RemoteProtocolError
from kvcourier.ids import InstanceAddress, PeerRank
from kvcourier.runtime.vital_signs import VitalSigns

_log = logging.getLogger(__name__)
_MAX_QUEUED = 4096
_MAX_SOCKETS = 1 << 16
"""Three for each rank of a peer, one to talk and two to watch it. ZMQ's own limit is 1023."""
_STOP_POLL_MS = 100
_REFUSAL_TIMEOUT_S = 1.0


class HandshakeServer:
    """Answers handshakes at the instance's well-known address, in a thread of its own.

    Args:
        host: interface or name to bind.
        port: port to bind; 0 takes a free one.
        answer: bytes of a request to bytes of the answer; RemoteProtocolError drops the request.
        max_message_bytes: longer requests are dropped by ZMQ, with their connection.
    """

    def __init__(
        self, host: str, port: int, answer: Callable[[bytes], bytes], max_message_bytes: int
    ) -> None:
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._stopping = threading.Event()
        try:
            self.port = _bind(self._socket, host, port)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-handshake", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port; blocks for a moment; idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._socket.poll(_STOP_POLL_MS):
                continue
            identity, *frames = self._socket.recv_multipart()
            try:
                reply = self._answer(frames[-1] if frames else b"")
            except RemoteProtocolError as error:
                _log.warning("handshake request dropped: %s", error)
                continue
            try:
                self._socket.send_multipart([identity, reply], zmq.DONTWAIT)
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

    def connect(self, peer: PeerRank, host: str, port: int) -> None:
        """Open a way to a peer rank. Raises RemoteProtocolError for a host that is none."""

    def disconnect(self, peer: PeerRank) -> None:
        """Close that way; unknown peers are fine."""

    def send(self, peer: PeerRank, payload: bytes) -> bool:
        """Send; False if there is no way. True promises nothing."""

    def ask(self, address: InstanceAddress, payload: bytes) -> None:
        """Send a handshake request. Raises RemoteProtocolError for a host that is none."""

    def answers(self) -> list[tuple[InstanceAddress, bytes]]:
        """Take the handshake answers that have come; each ends its request."""

    def refusals(self) -> list[InstanceAddress]:
        """Take the addresses that were asked where nobody listens; each ends its request."""

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

    def __init__(self, me: PeerRank, host: str, max_message_bytes: int) -> None:
        self._identity = identity_of(me)
        self._max_message_bytes = max_message_bytes
        self._context = zmq.Context()
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
        self.port = _bind(self._inbox, host, 0)
        self._outgoing: dict[PeerRank, zmq.Socket[bytes]] = {}
        self._monitors: dict[PeerRank, zmq.Socket[bytes]] = {}
        self._places: dict[PeerRank, tuple[str, int]] = {}
        self._vital_signs: VitalSigns[PeerRank] = VitalSigns(self.wake)
        self._asked: VitalSigns[tuple[InstanceAddress, int]] = VitalSigns(self.wake)
        self._num_asked = 0
        self._handshakes: dict[InstanceAddress, tuple[int, zmq.Socket[bytes]]] = {}

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
        """Take what has come: (identity of the sender's socket or b"" for an answer, payload)."""
        taken: list[tuple[bytes, bytes]] = []
        while len(taken) < _MAX_QUEUED and _readable(self._inbox):
            identity, *frames = self._inbox.recv_multipart()
            if frames:
                taken.append((identity, frames[-1]))
        for socket in self._outgoing.values():
            while len(taken) < _MAX_QUEUED and _readable(socket):
                taken.append((b"", socket.recv_multipart()[-1]))
        return taken

    def connect(self, peer: PeerRank, host: str, port: int) -> None:
        """Open an outgoing socket to a peer rank's inbox; does not wait for it to answer.

        Raises:
            RemoteProtocolError: the peer's host is not an address.
        """
        if peer not in self._outgoing:
            socket = self._socket(zmq.DEALER)
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
            self._vital_signs.look_at(peer, *self._places[peer], timeout_s)
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

    def ask(self, address: InstanceAddress, payload: bytes) -> None:
        """Send a handshake request; its answer comes out of `answers`. Where nobody listens, the
        address comes out of `refusals`.

        Raises:
            RemoteProtocolError: the peer's host is not an address.
        """
        self.drop(address)
        socket = self._socket(zmq.DEALER)
        _connect(socket, address.host, address.port)
        socket.send(payload, zmq.DONTWAIT)
        self._poller.register(socket, zmq.POLLIN)
        self._num_asked += 1
        self._handshakes[address] = (self._num_asked, socket)
        # ZMQ would try for ever and say nothing.
        self._asked.look_at(
            (address, self._num_asked), address.host, address.port, _REFUSAL_TIMEOUT_S
        )

    def answers(self) -> list[tuple[InstanceAddress, bytes]]:
        """Take the handshake answers that have come; each ends its request."""
        taken = []
        for address, (_, socket) in list(self._handshakes.items()):
            if _readable(socket):
                taken.append((address, socket.recv_multipart()[-1]))
                self.drop(address)
        return taken

    def refusals(self) -> list[InstanceAddress]:
        """Addresses that were asked where nobody listens; each ends its request."""
        refused = []
        for (address, number), sign in self._asked.take():
            if sign is Sign.GONE and self._handshakes.get(address, (0, None))[0] == number:
                refused.append(address)
                self.drop(address)
        return refused

    def drop(self, address: InstanceAddress) -> None:
        """Give a handshake up; unknown ones are fine."""
        _, socket = self._handshakes.pop(address, (0, None))
        if socket is not None:
            self._poller.unregister(socket)
            socket.close()

    def close(self) -> None:
        """Close everything; unsent messages get a moment to leave."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_fd)
        self._context.destroy(linger=200)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        if kind == zmq.ROUTER:
            self._poller.register(socket, zmq.POLLIN)
        return socket


def sender_matches(identity: bytes, peer: PeerRank) -> bool:
    """Whether a message's claimed sender owns the socket it came from."""
    return identity in (b"", identity_of(peer))


def _readable(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


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
