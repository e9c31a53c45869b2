"""Handshakes that our core asks for, with peers that become connected.

Decides what is asked, and which event an answer is. Refuses to know who answers ours (`endpoint`)
and when a handshake is due.
"""

import logging

from kvcourier.config import Limits, TransferMode
from kvcourier.core.events import ConnectFailed, PeerConnected
from kvcourier.core.handshake import Facts, read_answer, request
from kvcourier.errors import HandshakeRejected, RemoteProtocolError
from kvcourier.ids import InstanceAddress
from kvcourier.runtime.contacts import Contacts
from kvcourier.runtime.side_channel import Channel

_log = logging.getLogger(__name__)


class Handshakes:
    """Those of one courier.

    Args:
        facts: ours, which are asked for theirs.
    """

    def __init__(self, contacts: Contacts, channel: Channel, facts: Facts, limits: Limits) -> None:
        self._contacts = contacts
        self._channel = channel
        self._facts = facts
        self._limits = limits

    def ask(self, address: InstanceAddress, mode: TransferMode) -> ConnectFailed | None:
        """Ask a peer; None: its answer, or its refusal, comes through the channel."""
        try:
            self._channel.ask(address, request(address.engine_id, mode, self._facts))
        except RemoteProtocolError as error:
            return ConnectFailed(address, str(error))
        return None

    def answered(self, address: InstanceAddress, payload: bytes) -> PeerConnected | ConnectFailed:
        """Read an answer; a peer that fits is a contact from now on."""
        try:
            instance = read_answer(payload, address.engine_id, self._facts, self._limits)
            self._contacts.add(address, instance)
        except (HandshakeRejected, RemoteProtocolError) as error:
            _log.warning("handshake with %s failed: %s", address, error)
            return ConnectFailed(address, f"handshake with {address} failed: {error}")
        _log.info("connected to %s, incarnation %s", address, instance.incarnation)
        return PeerConnected(
            address,
            instance.incarnation,
            instance.modes,
            instance.geometries,
            instance.digests,
        )
