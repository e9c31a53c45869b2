"""What all calls of a router share.

Decides which tasks outlive the call that made them, and that all clients are told when the router
stops. Refuses to know what any of it is used for.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcourier.config import Limits
from kvcourier.router.config import RouterConfig
from kvcourier.router.conversations import Conversations
from kvcourier.router.events import LegName
from kvcourier.router.metrics import RouterMetrics
from kvcourier.router.sides import Side
from kvcourier.router.state_questions import StateQuestions
from kvcourier.router.upstream import Upstream
from kvcourier.runtime.diary import Diary
from kvcourier.tracing.interface import Tracing


class Running(Protocol):
    """What a client waits for."""

    def stop(self) -> None:
        """End now, and tell the client."""


@dataclass(frozen=True, slots=True)
class Services:
    """What all calls share.

    `background` holds tasks that outlive the call that made them, `running` the attempts that
    clients wait for.
    """

    config: RouterConfig
    upstream: Upstream
    sides: Mapping[LegName, Side]
    metrics: RouterMetrics
    conversations: Conversations
    states: StateQuestions
    background: set[asyncio.Task[None]] = field(default_factory=set)
    running: set[Running] = field(default_factory=set)
    diary: Diary = field(default_factory=lambda: Diary(Limits()))
    tracing: Tracing | None = None

    def begin_stop(self) -> None:
        """End what runs, each client being told; on the event loop."""
        for attempt in self.running:
            attempt.stop()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this, whatever becomes of the call."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
