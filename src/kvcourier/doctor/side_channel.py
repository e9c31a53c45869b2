"""Asking an instance's side channel about itself.

Decides how long is waited and how a failure is put into words. Who does not run our courier is not
asked: the side channel sees to that (`runtime/greeting.py`).
"""

import socket
import time
import uuid

from kvcourier.config import ChannelKeys, Limits
from kvcourier.core import inquiry
from kvcourier.core.inquiry import Told
from kvcourier.doctor.facts import Place
from kvcourier.errors import ConfigError, HandshakeRejected, RemoteProtocolError
from kvcourier.ids import EngineId, Incarnation, InstanceAddress, PeerRank, Rank
from kvcourier.runtime.side_channel import SideChannel


def takes_connections(place: Place, timeout_s: float) -> str:
    """Why a TCP connection to a place fails; empty if it stands. Nothing is sent."""
    try:
        with socket.create_connection((place.host, place.port), timeout_s):
            return ""
    except (OSError, UnicodeError) as error:
        return str(error)


def ask(
    place: Place,
    timeout_s: float,
    keys: ChannelKeys | None,
    own_id: EngineId,
) -> tuple[Told | None, str]:
    """What whoever listens there tells, or None and why there is nothing; blocks.

    Args:
        place: where the side channel of an instance with our courier is said to be.
        timeout_s: for all of it.
        keys: of the side channel, if the instance has some.
        own_id: who asks.
    """
    limits = Limits()
    me = PeerRank(own_id, Incarnation(uuid.uuid4().hex), Rank(0, 0))
    address = InstanceAddress(EngineId(place.engine_id), place.host, place.port)
    channel = SideChannel(me, "localhost", limits.max_message_bytes, keys)
    try:
        channel.ask(address, inquiry.inquire())
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            for _, payload in channel.answers():
                return inquiry.read_told(payload, limits.max_message_bytes), ""
            for _, why in channel.refusals():
                return None, why
            channel.wait(min(left_s, 0.1))
        return None, f"no answer within {timeout_s:g} s"
    except (HandshakeRejected, RemoteProtocolError, ConfigError) as error:
        return None, str(error)
    finally:
        channel.close()
