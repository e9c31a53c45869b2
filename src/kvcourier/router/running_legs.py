"""The legs of one dispatch that are under way.

Decides what an instance is counted to have to do, from the first byte that it is sent until D needs
nothing of it any more. Refuses to know what a leg says (`legs`) and how it is sent (`upstream`).
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kvcourier.router.client_call import ClientCall
from kvcourier.router.events import LegName
from kvcourier.router.instances import Instance
from kvcourier.router.metrics import RouterMetrics

Send = Callable[[], Coroutine[Any, Any, None]]


class RunningLegs:
    """One task for each leg; a leg in the place of another follows when that has ended."""

    def __init__(self, call: ClientCall, metrics: RouterMetrics) -> None:
        self._call = call
        self._metrics = metrics
        self._tasks: dict[LegName, asyncio.Task[None]] = {}
        self._keeper: Instance | None = None
        self.prefill_took = 0, 0.0
        """How many parts of prompts P computed, those ahead of ours included, in how many
        seconds."""

    def get(self, name: LegName) -> asyncio.Task[None] | None:
        """The task of a leg, if that was ever started."""
        return self._tasks.get(name)

    def start(self, name: LegName, instance: Instance, send: Send) -> None:
        """Run a leg; `send` makes the coroutine."""
        if name is LegName.PREFILL:
            instance.work.num_kept += 1
            self._keeper = instance
        # Not yet the coroutine itself: a leg that is cancelled before its task begins, as when the
        # client leaves in that moment, would leave it behind, never awaited.
        self._tasks[name] = asyncio.create_task(self._run(name, instance, send))

    async def cancel(self, *names: LegName) -> None:
        """End these, if they run."""
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        # Only when a task has ended is its connection closed, and nothing more relayed by it.
        await asyncio.gather(*tasks, return_exceptions=True)

    def release_prefill(self) -> None:
        """D needs nothing of P any more: until then P is not done, though its leg may be."""
        if self._keeper is not None:
            self._keeper.work.num_kept -= 1
            self._keeper = None

    async def _run(self, name: LegName, instance: Instance, send: Send) -> None:
        missing = instance.begin(self._call.prompt)
        ahead = instance.work.backlog
        began_s = time.monotonic()
        try:
            await send()
        finally:
            instance.end(missing)
            seconds = time.monotonic() - began_s
            if name is LegName.PREFILL:
                self.prefill_took = ahead, seconds
            self._metrics.leg_seconds.labels(name, self._call.mode).observe(seconds)
