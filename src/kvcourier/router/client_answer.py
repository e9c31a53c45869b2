"""What the client gets of one dispatch.

Decides that it is one answer, without what is not for the client, and when its first byte counts.
Refuses to know why it is this one (`dispatch`) and what it looks like on the wire (`answers`).
"""

import asyncio
import time
from collections.abc import Callable

from kvcourier.router.answers import EventStream, Headers, send_answer
from kvcourier.router.client_call import ClientCall
from kvcourier.router.conversations import StateFilter
from kvcourier.router.events import Answer
from kvcourier.router.metrics import RouterMetrics


class ClientAnswer:
    """One answer: whole, or a stream that is relayed from `relay` on.

    Args:
        headers: asked for when it begins.
        keep_state: takes what D tells of the KV that it keeps; None where nobody asked for it.
    """

    def __init__(
        self,
        call: ClientCall,
        metrics: RouterMetrics,
        headers: Callable[[], Headers],
        keep_state: Callable[[object], None] | None,
    ) -> None:
        self._call = call
        self._metrics = metrics
        self._headers = headers
        self._filter = None if keep_state is None else StateFilter(keep_state)
        self.stream = EventStream(call.send, headers, self._filter)
        self.may_relay = asyncio.Event()

    async def whole(self, answer: Answer) -> None:
        """An instance's answer as it is."""
        if answer.ok:
            self._observe_first_byte()
        content = answer.content if self._filter is None else self._filter.whole(answer.content)
        await send_answer(
            self._call.send, answer.status, content, self._headers(), answer.content_type
        )

    @property
    def lacks_state(self) -> bool:
        """Whether it is a stream that should have told of the KV that D keeps, and did not."""
        return self.stream.started and self._filter is not None and not self._filter.has_found

    def relay(self) -> None:
        """D's stream may be passed on, from its first byte."""
        self._observe_first_byte()
        self.may_relay.set()

    def _observe_first_byte(self) -> None:
        seconds = time.monotonic() - self._call.started_s
        self._metrics.first_byte_seconds.labels(self._call.mode).observe(seconds)
