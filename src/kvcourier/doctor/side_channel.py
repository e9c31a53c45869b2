"""Asking an instance's side channel about itself.

Decides what of it the doctor is told. Refuses to know how it is asked (`runtime/asking.py`).
"""

import socket

from kvcourier.config import ChannelKeys
from kvcourier.core.inquiry import Told
from kvcourier.doctor.facts import Place
from kvcourier.errors import ConfigError
from kvcourier.ids import EngineId, InstanceAddress
from kvcourier.runtime.asking import Asker, NoAnswer


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
    address = InstanceAddress(EngineId(place.engine_id), place.host, place.port)
    try:
        with Asker(own_id, keys, timeout_s) as asker:
            return asker.about(address), ""
    except (NoAnswer, ConfigError) as error:
        return None, str(error)
