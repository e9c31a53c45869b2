"""What couriers stand on besides their transport: time, sockets and threads.

Decides the seams at which a simulator takes the place of the machine, so that it runs the very
couriers and endpoints that instances run. Refuses to know the simulator.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvcourier.config import ChannelKeys
from kvcourier.ids import Incarnation, PeerRank
from kvcourier.runtime.courier import Courier
from kvcourier.runtime.handshake_server import HandshakeServer
from kvcourier.runtime.side_channel import Channel, SideChannel


class Server(Protocol):
    """Answers handshakes at `port` from `start` to `close`; see `HandshakeServer`."""

    port: int

    def start(self) -> None:
        """Answer from now on."""

    def close(self) -> None:
        """Answer no more; idempotent."""


def _new_incarnation() -> Incarnation:
    return Incarnation(uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Time, sockets and threads; by default those of this machine.

    Attributes:
        clock: seconds that never go back; the instance's own.
        new_incarnation: names a life, like no other one.
        open_channel: (who we are, host, longest message, keys) -> a rank's sockets.
        open_server: (host, port, answer, longest message, keys) -> the instance's handshake server.
        run: has a courier take its steps from now on.
    """

    clock: Callable[[], float] = time.monotonic
    new_incarnation: Callable[[], Incarnation] = _new_incarnation
    open_channel: Callable[[PeerRank, str, int, ChannelKeys | None], Channel] = SideChannel
    open_server: Callable[[str, int, Callable[[bytes], bytes], int, ChannelKeys | None], Server] = (
        HandshakeServer
    )
    run: Callable[[Courier], None] = Courier.start


MACHINE = Surroundings()
