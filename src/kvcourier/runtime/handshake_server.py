"""Answers to whoever comes to an instance's well-known address (ZMQ), in a thread of its own.

Decides framing, and what becomes of who does not ask as kvcourier does. Refuses to know what is
asked: a handshake's bytes, and an inquiry's, are the core's.
"""

import logging
import os
import threading
from collections.abc import Callable

import zmq

from kvcourier.config import ChannelKeys
from kvcourier.errors import ConfigError, RemoteProtocolError
from kvcourier.runtime.channel_keys import KeyCheck, be_server
from kvcourier.runtime.greeting import NAME
from kvcourier.runtime.zmq_sockets import bind, destroy

_log = logging.getLogger(__name__)
_NOT_YOURS = b"this is an instance of kvcourier"


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
            self.port = bind(self._socket, host, port)
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
        destroy(self._context, self._key_check, linger=0)

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
