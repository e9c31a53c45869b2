"""Which requests an engine can serve at all.

Decides the limits on one request, before anything is kept for it. Refuses to know what is running.
"""

import math
from dataclasses import dataclass

from kvcourier.core.params import Intent, PullIntent
from kvcourier.engine.api import GenerationRequest, ModelInfo, RequestRejected, SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What every request is measured against."""

    info: ModelInfo
    num_blocks: int
    block_size: int
    has_endpoint: bool

    @property
    def max_tokens(self) -> int:
        """Longest prompt and answer; the very last token needs no place in the cache."""
        return min(self.info.max_model_len, self.num_blocks * self.block_size + 1)

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that could never be served.

        Raises:
            RequestRejected: the message names the item, what was allowed and what was found.
        """
        self._check_prompt(request.prompt_token_ids)
        _check_sampling(request.sampling)
        if request.intent is not None:
            self._check_intent(request.intent, len(request.prompt_token_ids))

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise RequestRejected("prompt: expected at least 1 token, found none")
        vocab_size = self.info.vocab_size
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestRejected(
                f"prompt: expected token ids from 0 to {vocab_size - 1}, found {wrong}"
            )
        if len(prompt) + 1 > self.info.max_model_len:
            raise RequestRejected(
                f"prompt: {len(prompt)} tokens and at least 1 of answer exceed the context of "
                f"{self.info.max_model_len} tokens; shorten the prompt"
            )
        needed = -(-len(prompt) // self.block_size)
        if needed > self.num_blocks:
            raise RequestRejected(
                f"prompt: {len(prompt)} tokens need {needed} blocks, but the whole KV cache has "
                f"{self.num_blocks} blocks of {self.block_size} tokens; shorten the prompt, or "
                "start the engine with a larger cache"
            )

    def _check_intent(self, intent: Intent, num_tokens: int) -> None:
        if not self.has_endpoint:
            raise RequestRejected(
                "kv_transfer_params: this instance was started without KV transfer; send the "
                "request without them, or to an instance that has it"
            )
        if not isinstance(intent, PullIntent):
            return
        if len(intent.block_ids) != 1:
            raise RequestRejected(
                "kv_transfer_params.remote_block_ids: expected 1 list, as the model has 1 cache "
                f"group; found {len(intent.block_ids)}"
            )
        if not intent.block_ids[0]:
            raise RequestRejected(
                "kv_transfer_params.remote_block_ids: expected at least 1 block, found none"
            )
        if intent.num_tokens is not None and intent.num_tokens < num_tokens:
            raise RequestRejected(
                f"kv_transfer_params.remote_num_tokens: expected at least the prompt's "
                f"{num_tokens} tokens, found {intent.num_tokens}; both legs need the same prompt"
            )


def _check_sampling(params: SamplingParams) -> None:
    seed_is_fine = params.seed is None or -(2**63) <= params.seed < 2**64
    rules = (
        ("max_tokens", params.max_tokens, "at least 1", params.max_tokens >= 1),
        (
            "min_tokens",
            params.min_tokens,
            f"0 to max_tokens ({params.max_tokens})",
            0 <= params.min_tokens <= params.max_tokens,
        ),
        (
            "temperature",
            params.temperature,
            "a finite number of at least 0",
            math.isfinite(params.temperature) and params.temperature >= 0,
        ),
        ("top_p", params.top_p, "a number above 0, at most 1", 0 < params.top_p <= 1),
        ("top_k", params.top_k, "-1 or 0 (all tokens), or more", params.top_k >= -1),
        ("seed", params.seed, "a whole number of 64 bits", seed_is_fine),
    )
    for name, found, expected, is_fine in rules:
        if not is_fine:
            raise RequestRejected(f"{name}: expected {expected}, found {found!r}")
