"""One forward pass of the model over scheduled work.

Decides how scheduled tokens become tensors and which logits are computed. Refuses to know requests
and sampling.
"""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcourier.engine.attention import BATCH_ARGUMENT, Chunk, build_batch
from kvcourier.engine.kv_cache import KVCache
from kvcourier.engine.models import LoadedModel
from kvcourier.engine.scheduler import Work

# Not cuDNN: it builds a plan for every new shape, and a decode step's shape is always new.
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class ModelRunner:
    """Runs a model over a paged cache."""

    def __init__(self, model: LoadedModel, cache: KVCache) -> None:
        self._module = model.module
        self._cache = cache
        parameters = inspect.signature(model.module.forward).parameters
        # Without it, a model computes the logits of every prompt token.
        self._can_select = "logits_to_keep" in parameters

    @torch.inference_mode()
    def run(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Compute a batch and store its KV.

        Args:
            on_layer: called with each layer's index once the layer's K and V are stored, or on
                CUDA are to be stored by what was launched so far.

        Returns:
            Float32 logits for the items that complete, in their order: [completing, vocab_size].
        """
        chunks = [
            Chunk(
                token_ids=work.sequence.tokens[work.start : work.start + work.count],
                start=work.start,
                block_ids=work.sequence.blocks,
            )
            for work in batch
        ]
        paged = build_batch(chunks, self._cache, on_layer)
        rows = paged.last_rows[[index for index, work in enumerate(batch) if work.completes]]
        selection = {"logits_to_keep": rows} if self._can_select else {}
        with sdpa_kernel(ATTENTION_BACKENDS):
            output = self._module(
                input_ids=paged.token_ids,
                position_ids=paged.positions,
                use_cache=False,
                **{BATCH_ARGUMENT: paged},
                **selection,
            )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._can_select else logits[rows]).float()
