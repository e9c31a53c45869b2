"""Telling the endpoint how far the prompts are that it holds, so that it can send them meanwhile.

Decides when that is said: not at all, after each chunk, or within the last chunk after some layers.
Refuses to know what is sent. Used on the engine's thread only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from kvcourier.engine.scheduler import Sequence as EngineSequence
from kvcourier.engine.scheduler import Work
from kvcourier.ids import BlockId, RequestId
from kvcourier.layout import CacheGeometry, MemoryKind
from kvcourier.runtime.interface import Endpoint
from kvcourier.runtime.layer_pace import LEAST_BYTES, LayerPace
from kvcourier.runtime.step_clock import step_clock

GRANULARITIES = ("request", "chunk", "layer")
"""What is sent at once: the whole request, a chunk, or a layer of the last chunk."""

OnLayer = Callable[[int], None]


@dataclass(slots=True)
class _Prompt:
    """`num_told` of its `num_tokens` tokens were told of, so their blocks may be read."""

    num_tokens: int
    num_told: int = 0


class PromptStreams:
    """All prompts that this instance computes for others.

    Args:
        granularity: one of `GRANULARITIES`.
        geometries: of the caches of one tensor-parallel rank of each stage, so of all layers.
        device: that computes; on CUDA something is written once its kernels have run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        granularity: str,
        geometries: Sequence[CacheGeometry],
        device: torch.device,
    ) -> None:
        self._endpoint = endpoint
        self._granularity = granularity
        self._block_size = geometries[0].block_size
        memory = MemoryKind.VRAM if device.type == "cuda" else MemoryKind.DRAM
        self._clock = step_clock(memory)
        self._pace = LayerPace(geometries, LEAST_BYTES[memory])
        self._prompts: dict[RequestId, _Prompt] = {}

    def begin(self, request_id: RequestId, num_tokens: int) -> None:
        """Somebody wants this prompt."""
        self._prompts[request_id] = _Prompt(num_tokens)

    def end(self, request_id: RequestId) -> bool:
        """It is over; returns whether its blocks may be read still."""
        prompt = self._prompts.pop(request_id, None)
        return prompt is not None and prompt.num_told > 0

    def roll_back(self, preempted: Iterable[EngineSequence]) -> None:
        """These have lost their blocks, which hold what they did until the next step."""
        for sequence in preempted:
            prompt = self._prompts.get(sequence.request_id)
            if prompt is not None and prompt.num_told:
                prompt.num_told = 0
                self._endpoint.roll_back(sequence.request_id)

    def before(self, batch: Sequence[Work]) -> OnLayer | None:
        """Tell what was found in the prefix cache; returns what is to be called in each layer of
        the coming step, once its KV is written, if anything."""
        last_chunks = []
        for work in batch:
            prompt = self._prompts.get(work.sequence.request_id)
            if prompt is None or self._granularity == "request":
                continue
            self._tell(work.sequence, prompt, work.start)
            if prompt.num_told < prompt.num_tokens <= work.start + work.count:
                last_chunks.append(work.sequence)
        if not last_chunks or self._granularity != "layer":
            return None
        self._pace.begin()
        return lambda layer: self._on_layer(last_chunks, layer)

    def after(self, batch: Sequence[Work]) -> None:
        """Tell what the step has computed. Of a prompt that is over now, the hand-over tells."""
        for work in batch:
            prompt = self._prompts.get(work.sequence.request_id)
            if prompt is not None and self._granularity != "request":
                self._tell(work.sequence, prompt, work.start + work.count)

    def _tell(self, sequence: EngineSequence, prompt: _Prompt, num_computed: int) -> None:
        num_tokens = min(num_computed, prompt.num_tokens)
        if num_tokens > prompt.num_told:
            prompt.num_told = num_tokens
            blocks = self._blocks(sequence, num_tokens)
            self._endpoint.advance_prefill(
                sequence.request_id, [blocks], num_tokens, ready=self._clock.mark()
            )

    def _on_layer(self, sequences: Sequence[EngineSequence], layer: int) -> None:
        """All layers so far are named each time, for those who have registered since the last."""
        tokens = [self._prompts[each.request_id].num_tokens for each in sequences]
        if not self._pace.after(layer, tokens):
            return
        awaited = [each for each in sequences if self._endpoint.is_awaited(each.request_id)]
        if not awaited:
            return
        ready = self._clock.mark()
        for sequence in awaited:
            prompt = self._prompts[sequence.request_id]
            prompt.num_told = max(prompt.num_told, 1)
            self._endpoint.advance_prefill(
                sequence.request_id,
                [self._blocks(sequence, prompt.num_tokens)],
                prompt.num_tokens,
                range(layer + 1),
                ready=ready,
            )

    def _blocks(self, sequence: EngineSequence, num_tokens: int) -> list[BlockId]:
        return sequence.blocks[: -(-num_tokens // self._block_size)]
