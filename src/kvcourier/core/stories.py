"""What happened to each transfer, in order, within bounds.

Decides how much is kept: the first and the latest entries of a story, and the latest stories.
Refuses to interpret them. A failed transfer is explained by its story alone.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kvcourier.config import Limits


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One thing that happened: when (core's clock), what, and named details."""

    at: float
    what: str
    details: dict[str, Any]


class StoryBook:
    """Stories by request id, also found by an alias such as the transfer id."""

    def __init__(self, limits: Limits) -> None:
        self._max_entries = limits.max_story_entries
        self._max_stories = limits.max_stories
        self._stories: OrderedDict[str, list[StoryEntry]] = OrderedDict()
        self._aliases: OrderedDict[str, str] = OrderedDict()

    def note(self, name: str, now: float, what: str, **details: Any) -> None:
        """Add an entry; the middle of an overlong story and the oldest stories are dropped."""
        story = self._stories.setdefault(name, [])
        if len(story) >= self._max_entries:
            del story[self._max_entries // 2]
        story.append(StoryEntry(now, what, details))
        self._stories.move_to_end(name)
        while len(self._stories) > self._max_stories:
            self._stories.popitem(last=False)

    def alias(self, alias: str, name: str) -> None:
        """Let a story be found under another name too."""
        self._aliases[alias] = name
        self._aliases.move_to_end(alias)
        while len(self._aliases) > self._max_stories:
            self._aliases.popitem(last=False)

    def story(self, name: str) -> list[StoryEntry] | None:
        """A story by its name or alias; None if unknown or dropped."""
        story = self._stories.get(self._aliases.get(name, name))
        return None if story is None else list(story)
