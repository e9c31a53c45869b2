"""What a process itself saw of each request, beside what its couriers keep.

Decides the clock of the entries: it runs evenly, also where somebody sets the machine's time, and
it can be read from outside. Refuses to know what the entries mean. Thread-safe.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from kvcourier.config import Limits
from kvcourier.core.stories import StoryBook

CLOCK_HEADER = "X-KV-Unix-S"
"""On every answer to a question for a story: what the story's clock said then, in unix seconds."""


class Diary:
    """Stories of a server's requests, in the form that endpoints tell theirs in."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._book = StoryBook(limits)
        self._clock = clock
        self._unix_offset_s = time.time() - clock()
        self._lock = threading.Lock()

    def now_unix_s(self) -> float:
        """What this clock says."""
        return self._clock() + self._unix_offset_s

    def clock_header(self) -> dict[str, str]:
        """The header by which whoever asks can tell this clock from its own."""
        return {CLOCK_HEADER: f"{self.now_unix_s():.6f}"}

    def note(self, name: str, what: str, **details: Any) -> None:
        """Add to a request's story; from any thread."""
        thread = threading.current_thread().name
        with self._lock:
            self._book.note(name, self.now_unix_s(), what, thread=thread, **details)

    def alias(self, alias: str, name: str) -> None:
        """Let a story be found under another name too, such as the transfer id."""
        with self._lock:
            self._book.alias(alias, name)

    def story(self, key: str) -> list[dict[str, Any]]:
        """A story by its name or alias, in order; empty if unknown or forgotten."""
        with self._lock:
            entries = self._book.story(key) or []
        return [{"at_unix_s": each.at, "what": each.what, **each.details} for each in entries]
