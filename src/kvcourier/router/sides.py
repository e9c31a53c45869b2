"""All prefill, or all decode instances: who is there, whose turn it is, who looks after them.

Decides who is a candidate, and that whoever is added is asked about itself until it is removed.
Refuses to know how an instance is chosen (`policy`) and who adds and removes (`membership`).
"""

import asyncio
import itertools
from collections.abc import Collection, Iterable

from kvcourier.config import TransferMode
from kvcourier.router.instances import Instance
from kvcourier.router.policy import POLICIES, Need, choose, most_known
from kvcourier.router.prompts import PART_TOKENS, Prompt

NO_PROMPT = Prompt()


class Side:
    """The instances of one side, in the order in which they came."""

    def __init__(self, instances: Iterable[Instance], policy: str, asks_load: bool = False) -> None:
        """`asks_load`: their metrics are asked for even if the policy does not need them."""
        self.policy = policy
        self._instances: dict[str, Instance] = {each.name: each for each in instances}
        self._asks_load = asks_load or POLICIES[policy].needs_load
        self._turns = itertools.count()
        self._watches: dict[str, list[asyncio.Task[None]]] = {}
        self._is_watching = False

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Who is there now."""
        return tuple(self._instances.values())

    def get(self, name: str) -> Instance | None:
        """The instance of this name, if it is there."""
        return self._instances.get(name)

    def pick(
        self,
        mode: TransferMode | None,
        tried: Collection[Instance] = (),
        prompt: Prompt = NO_PROMPT,
        conversation: str = "",
        preferred: str = "",
    ) -> Instance | None:
        """The next instance for `mode` that was not tried yet, or None if there is none.

        No mode means that no KV is to be moved. The one named `preferred` comes first, if nothing
        speaks against it.
        """
        instances = self.instances
        candidates = [each.candidate(mode, prompt, each not in tried) for each in instances]
        for instance, each in zip(instances, candidates, strict=True):
            if each.name == preferred and each.usable and each.reachable and each.trusted:
                return instance
        need = Need(next(self._turns), prompt.num_parts, conversation)
        index = choose(self.policy, candidates, need)
        return None if index is None else instances[index]

    def most_known(self, prompt: Prompt) -> tuple[Instance, int] | None:
        """Who was sent most of this prompt before, and how many of its tokens; None: nobody."""
        instances = self.instances
        candidates = [each.candidate(None, prompt, True) for each in instances]
        index = most_known(candidates)
        if index is None:
            return None
        return instances[index], candidates[index].num_known * PART_TOKENS

    def can_serve(self, mode: TransferMode | None, tried: Collection[Instance] = ()) -> bool:
        """Whether anybody may be chosen for `mode`."""
        return any(
            each.candidate(mode, NO_PROMPT, each not in tried).usable for each in self.instances
        )

    # Coming and going.

    def start(self) -> None:
        """Begin to ask the instances about themselves; on the event loop."""
        self._is_watching = True
        for instance in self.instances:
            self._watch(instance)

    def add(self, instance: Instance) -> None:
        """One more; it may be chosen at once."""
        self._instances[instance.name] = instance
        if self._is_watching:
            self._watch(instance)

    def remove(self, name: str) -> None:
        """It is not chosen any more; its legs run on. Unknown ones are fine."""
        if self._instances.pop(name, None) is not None:
            for task in self._watches.pop(name, ()):
                task.cancel()

    async def stop(self) -> None:
        """Ask nobody any more."""
        tasks = [task for tasks in self._watches.values() for task in tasks]
        self._watches.clear()
        self._is_watching = False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self, instance: Instance) -> None:
        watches = [instance.watch(), *([instance.watch_load()] if self._asks_load else [])]
        self._watches[instance.name] = [asyncio.create_task(each) for each in watches]
