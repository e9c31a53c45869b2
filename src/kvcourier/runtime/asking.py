"""Asking side channels as an operator or a router, who are nobody's peers.

Decides how long is waited and how a failure is put into words. Who does not run our courier is not
asked: the side channel sees to that (`greeting`).
"""

import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from kvcourier.config import ChannelKeys, Limits
from kvcourier.core import inquiry
from kvcourier.core.inquiry import StoryTold, Told
from kvcourier.errors import HandshakeRejected, KVCourierError, RemoteProtocolError
from kvcourier.ids import EngineId, Incarnation, InstanceAddress, PeerRank, Rank, TransferId
from kvcourier.runtime.side_channel import SideChannel

T = TypeVar("T")
_LONGEST_WAIT_S = 0.1


class NoAnswer(KVCourierError):
    """Nothing usable came; says why in a sentence."""


class Asker:
    """A side channel that only asks; all calls block. Close it, or use it as a context.

    Args:
        own_id: who asks.
        keys: of the side channel, if instances want some.
        timeout_s: for all questions together.

    Raises:
        ConfigError: there is no socket for it.
    """

    def __init__(self, own_id: EngineId, keys: ChannelKeys | None, timeout_s: float) -> None:
        me = PeerRank(own_id, Incarnation(uuid.uuid4().hex), Rank(0, 0))
        self._max_bytes = Limits().max_message_bytes
        self._channel = SideChannel(me, "localhost", self._max_bytes, keys)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def __enter__(self) -> "Asker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the sockets back."""
        self._channel.close()

    def about(self, address: InstanceAddress) -> Told:
        """What whoever listens there tells of itself.

        Raises:
            NoAnswer: nobody does, or lets us in, or understands.
        """
        return self._ask(address, inquiry.inquire(), inquiry.read_told)

    def history(
        self, address: InstanceAddress, transfer_id: TransferId, part: int = 0
    ) -> str | None:
        """The state of the turn that was this dispatch, as JSON; None if it is not kept.

        Raises:
            NoAnswer: likewise.
        """
        return self._ask(address, inquiry.ask_for_history(transfer_id, part), inquiry.read_history)

    def _ask(self, address: InstanceAddress, question: bytes, read: Callable[[bytes, int], T]) -> T:
        try:
            self._channel.ask(address, question)
            while True:
                for _, payload in self._channel.answers():
                    return read(payload, self._max_bytes)
                for _, why in self._channel.refusals():
                    raise NoAnswer(why)
                self._wait()
        except (HandshakeRejected, RemoteProtocolError) as error:
            raise NoAnswer(str(error)) from None

    def meet(self, peer: PeerRank, host: str, port: int) -> None:
        """Be ready to ask a rank, which an instance has told of; the one before is left.

        Raises:
            NoAnswer: its host is no address, or its key is not known.
        """
        try:
            self._channel.connect(peer, host, port)
        except RemoteProtocolError as error:
            raise NoAnswer(str(error)) from None

    def leave(self, peer: PeerRank) -> None:
        """It is asked nothing more."""
        self._channel.disconnect(peer)

    def story(self, peer: PeerRank, key: str) -> StoryTold:
        """What a rank that we have met, and no other, tells of a transfer.

        Raises:
            NoAnswer: nothing came, or nothing that can be read.
        """
        try:
            self._channel.send(peer, inquiry.ask_for_story(key))
            while True:
                for identity, payload in self._channel.messages():
                    if self._channel.is_from(identity, peer):
                        return inquiry.read_story(payload, self._max_bytes)
                self._wait()
        except RemoteProtocolError as error:
            raise NoAnswer(str(error)) from None

    def _wait(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise NoAnswer(f"no answer within {self._timeout_s:g} s")
        self._channel.wait(min(left_s, _LONGEST_WAIT_S))
