"""The waits of one dispatch: until D is worth binding, and until another D may be better.

Decides when that is, from what the instances say of themselves. Refuses to know what follows
(`dispatch`) and how long a prompt takes (`pace`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvcourier.ids import TransferId
from kvcourier.router.config import Timeouts
from kvcourier.router.events import DecodeStalled, Event, LegName, PrefillNear
from kvcourier.router.pace import bind_after_s, look_again_s
from kvcourier.router.pairing import Pairing
from kvcourier.router.prompts import Prompt


class Watches:
    """The waits of one dispatch, which `post` what they find, until they are stopped."""

    def __init__(
        self,
        pairing: Pairing,
        transfer_id: TransferId,
        prompt: Prompt,
        timeouts: Timeouts,
        post: Callable[[Event], None],
    ) -> None:
        self._pairing = pairing
        self._transfer_id = transfer_id
        self._prompt = prompt
        self._timeouts = timeouts
        self._post = post
        self._tasks: list[asyncio.Task[None]] = []

    def await_near(self) -> None:
        """Post `PrefillNear` when P is nearly done."""
        self._start(self._near())

    def watch_decode(self) -> None:
        """Post `DecodeStalled` if others are less busy than D in a while."""
        self._start(self._stalled())

    def stop(self) -> None:
        """Wait for nothing any more."""
        for task in self._tasks:
            task.cancel()

    def _start(self, wait: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(wait))

    async def _near(self) -> None:
        """Wait out the estimate, then ask P, if it tells, until it is nearly done."""
        prefill, lead_s = self._pairing.chosen[LegName.PREFILL], self._timeouts.near_lead_s
        work = prefill.work
        # Our own leg has begun by the time this runs, and is part of what is ahead.
        await asyncio.sleep(bind_after_s(work.pace.expected_s(work.backlog), lead_s))
        while (progress := await prefill.progress(self._transfer_id)) is not None:
            left_s = work.pace.expected_s(progress.left * self._prompt.num_parts)
            wait_s = look_again_s(left_s, lead_s)
            if wait_s is None:
                break
            await asyncio.sleep(wait_s)
        self._post(PrefillNear())

    async def _stalled(self) -> None:
        """D has all it needs: if it does not begin, somebody else might, sooner."""
        await asyncio.sleep(self._timeouts.stall_s)
        if self._pairing.has_less_busy_decode():
            self._post(DecodeStalled())
