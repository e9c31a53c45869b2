"""States of turns that D's answer did not carry: they are asked for on D's side channel.

Decides whom it is worth asking, how often and how long, and counts what came of it. Refuses to know
what is in a state, and what is done with one (`conversations`).

vLLM gives a state out with answers that are not streamed, and with no other. Its scheduler has it
by the time that the last chunk leaves, so that one question is enough.
"""

import asyncio
import enum
import logging
import time
from collections.abc import Callable

from kvcourier.config import ChannelKeys
from kvcourier.errors import KVCourierError
from kvcourier.ids import EngineId, InstanceAddress, TransferId
from kvcourier.router.config import Coordinates
from kvcourier.router.conversations import Conversations, read_state
from kvcourier.router.instances import Instance
from kvcourier.runtime.asking import Asker

_log = logging.getLogger(__name__)
MAX_AT_ONCE = 4
"""Each takes a thread for about 2 ms, or, where nobody answers, for as long as that is waited."""
MAX_WAITING = 256
PAUSE_S = 30.0
"""Until somebody who gave no answer is asked again: an older release logs each question."""

AskForState = Callable[[InstanceAddress, TransferId], str | None]
"""Asks and waits, for a second or so: JSON, or None if nothing is kept. Raises KVCourierError."""


def ask_for_state(
    own_id: EngineId,
    keys: ChannelKeys | None,
    timeout_s: float,
    address: InstanceAddress,
    transfer_id: TransferId,
) -> str | None:
    """An `AskForState` by a socket of its own, once the first three are given."""
    with Asker(own_id, keys, timeout_s) as asker:
        return asker.history(address, transfer_id)


class Asked(enum.StrEnum):
    """What came of a turn whose state had to be asked for."""

    TOLD = "told"
    NONE = "none"
    """D keeps nothing of it, or no more."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """D has just failed to answer, or too many wait."""


class StateQuestions:
    """All questions of one router; used on the event loop.

    Args:
        ask: called in a thread.
        count: told what came of each turn.
    """

    def __init__(
        self,
        ask: AskForState,
        conversations: Conversations,
        count: Callable[[Asked], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._conversations = conversations
        self._count = count
        self._clock = clock
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_waiting = 0
        self._not_before: dict[Coordinates, float] = {}

    async def learn(self, conversation: str, transfer_id: TransferId, decode: Instance) -> None:
        """The stream of a turn has ended, and D did not say in it what it keeps."""
        where = decode.spec.coordinates
        # One that tells of itself is ours, and would have said so on its last chunk.
        if where is None or decode.info is not None or not self._conversations.are_kept:
            return
        asked = await self._asked(where, conversation, transfer_id, decode.name)
        self._count(asked)

    async def _asked(
        self, where: Coordinates, conversation: str, transfer_id: TransferId, decode: str
    ) -> Asked:
        if self._num_waiting >= MAX_WAITING:
            return Asked.SKIPPED
        self._num_waiting += 1
        try:
            async with self._turn:
                if self._not_before.get(where, 0.0) > self._clock():
                    return Asked.SKIPPED
                address = InstanceAddress(where.engine_id, where.host, where.port)
                try:
                    told = await asyncio.to_thread(self._ask, address, transfer_id)
                except KVCourierError as error:
                    self._pause(where, decode, str(error))
                    return Asked.FAILED
        finally:
            self._num_waiting -= 1
        if told is None:
            return Asked.NONE
        is_kept = self._conversations.put(conversation, read_state(told), decode)
        return Asked.TOLD if is_kept else Asked.FAILED

    def _pause(self, where: Coordinates, decode: str, why: str) -> None:
        now = self._clock()
        self._not_before = {each: at for each, at in self._not_before.items() if at > now}
        self._not_before[where] = now + PAUSE_S
        _log.warning(
            "%s does not say what it keeps of streamed turns, which will be computed again: %s; "
            "it is asked again in %g s",
            decode,
            why,
            PAUSE_S,
        )
