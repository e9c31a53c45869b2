"""How far each held prompt is, from vLLM's scheduler to the courier, step by step.

Decides what a step says of the prompts that P computes for somebody: which tokens are written when
it ends, in which blocks, and which prompts were preempted. Refuses to know what becomes of it.

The news travels with vLLM's step and not by the engine link: what is written follows from the
kernels of a step, so it must reach the courier in their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcourier.core.events import BlockGroups
from kvcourier.ids import BlockId, RequestId
from kvcourier.layout import TokenSpan
from kvcourier.vllm_connector.block_tables import BlockTable


@dataclass(frozen=True, slots=True)
class Progress:
    """The KV of positions [0, num_tokens) is written when the step has ended.

    Attributes:
        block_ids: ours, per cache group, as `PrefillFinished` has them.
        is_last: whether that is the whole prompt.
    """

    request_id: RequestId
    block_ids: BlockGroups
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepNews:
    """What one step means for held prompts."""

    progress: tuple[Progress, ...] = ()
    rolled_back: tuple[RequestId, ...] = ()


@dataclass(slots=True)
class _Prompt:
    num_tokens: int
    block_ids: list[list[int]] = field(default_factory=list)


class ProgressTracker:
    """Follows held prompts through vLLM's scheduler outputs."""

    def __init__(self) -> None:
        self._prompts: dict[RequestId, _Prompt] = {}

    def follow(self, request_id: RequestId, num_tokens: int) -> None:
        """A prompt of so many tokens was accepted."""
        self._prompts[request_id] = _Prompt(num_tokens)

    def forget(self, request_id: RequestId) -> None:
        """It is over; unknown ones are fine."""
        self._prompts.pop(request_id, None)

    def take(self, output: Any, tables: Sequence[BlockTable]) -> StepNews:
        """What a scheduler output (`vllm.v1.core.sched.output.SchedulerOutput`) says."""
        if not self._prompts:
            return StepNews()
        scheduled = output.num_scheduled_tokens
        progress = []
        for new in output.scheduled_new_reqs:
            prompt = self._prompts.get(RequestId(new.req_id))
            if prompt is not None:
                prompt.block_ids = [list(group) for group in new.block_ids]
                stop = new.num_computed_tokens + scheduled[new.req_id]
                progress.append(_progress(RequestId(new.req_id), prompt, stop, tables))
        cached = output.scheduled_cached_reqs
        for name, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            prompt = self._prompts.get(RequestId(name))
            if prompt is None:
                continue
            if name in cached.resumed_req_ids:
                prompt.block_ids = [list(group) for group in added]
            elif added is not None:
                for group, more in zip(prompt.block_ids, added, strict=True):
                    group.extend(more)
            progress.append(_progress(RequestId(name), prompt, computed + scheduled[name], tables))
        preempted = {RequestId(name) for name in output.preempted_req_ids or ()}
        return StepNews(tuple(progress), tuple(sorted(preempted & self._prompts.keys())))


def _progress(
    request_id: RequestId, prompt: _Prompt, stop: int, tables: Sequence[BlockTable]
) -> Progress:
    span = TokenSpan(0, min(stop, prompt.num_tokens))
    block_ids = tuple(tuple(map(BlockId, table.ids(prompt.block_ids, span))) for table in tables)
    return Progress(request_id, block_ids, span.stop, stop >= prompt.num_tokens)
