"""A request that is being served.

Decides what an engine keeps of it beside its sequence. Refuses to know what becomes of it
(`engine`).
"""

from dataclasses import dataclass

from kvcourier.engine.api import GenerationRequest
from kvcourier.engine.sampler import TokenSampler
from kvcourier.engine.scheduler import Phase, Sequence
from kvcourier.ids import RequestId
from kvcourier.runtime.reports import Report


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not had its last event.

    `owed`: names by which the endpoint knows it and is owed a hand-over, a decline or an abort.
    `received`: the endpoint's report that its KV is complete.
    `was_scheduled`: it has been part of a step.
    """

    request: GenerationRequest
    sequence: Sequence
    sampler: TokenSampler
    owed: set[RequestId]
    received: Report | None = None
    was_scheduled: bool = False

    def awaits(self, name: RequestId) -> bool:
        """Whether its blocks are on loan under this name, to be filled."""
        remote = self.sequence.remote
        is_receiving = self.sequence.phase is Phase.RECEIVING
        return is_receiving and remote is not None and remote.name == name
