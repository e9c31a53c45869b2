"""Messages as they come in, from sockets and over the data path.

Decides whether one is well-formed, has come by its way and from whom it says. Refuses to know what
follows from it.
"""

import logging

from kvcourier.config import Limits
from kvcourier.core.messages import (
    ON_DATA_PATH,
    AnyMessage,
    Beat,
    Cancel,
    Computed,
    Landed,
    Parcel,
    decode,
)
from kvcourier.errors import RemoteProtocolError
from kvcourier.runtime.contacts import Contacts
from kvcourier.runtime.metrics import CourierObserver
from kvcourier.runtime.side_channel import Channel
from kvcourier.transport.interface import Notification

_log = logging.getLogger(__name__)

_BY_NOTIFICATION = (*ON_DATA_PATH, Cancel, Beat)
_UNKNOWN_WRITER = (Landed, Computed, Parcel)
"""Notices that only a connected peer's agent may send."""


class Incoming:
    """Lets through what is good; the rest is counted, logged and dropped."""

    def __init__(
        self, contacts: Contacts, channel: Channel, observer: CourierObserver, limits: Limits
    ) -> None:
        self._contacts = contacts
        self._channel = channel
        self._observer = observer
        self._limits = limits

    def from_socket(self, identity: bytes, payload: bytes) -> AnyMessage | None:
        """A message of the side channel; `identity` is the socket's, empty for an answer on ours.

        None if it is to be dropped.
        """
        message = self._decoded(payload)
        if message is None:
            return None
        is_theirs = self._channel.is_from(identity, message.sender.peer())
        return self._checked(message, is_theirs and not isinstance(message, ON_DATA_PATH))

    def from_data_path(self, notification: Notification) -> AnyMessage | None:
        """A message that came as a notification; None if it is to be dropped.

        A registration may be a peer's first sign of life; it is checked when its sender shakes
        hands.
        """
        message = self._decoded(notification.payload)
        if message is None:
            return None
        agent = self._contacts.agent_name(message.sender.peer())
        known_as_another = agent not in (None, notification.sender)
        unknown_writer = agent is None and isinstance(message, _UNKNOWN_WRITER)
        is_theirs = not known_as_another and not unknown_writer
        return self._checked(message, is_theirs and isinstance(message, _BY_NOTIFICATION))

    def _decoded(self, payload: bytes) -> AnyMessage | None:
        try:
            return decode(payload, self._limits)
        except RemoteProtocolError as error:
            self._observer.dropped("malformed")
            _log.warning("message dropped: %s", error)
            return None

    def _checked(self, message: AnyMessage, is_good: bool) -> AnyMessage | None:
        """None if it did not come by its way, or from whom it says."""
        if is_good:
            return message
        self._observer.dropped("wrong_sender")
        _log.warning("message dropped: %s did not send this: %.300s", message.sender, message)
        return None
