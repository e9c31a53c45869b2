"""How the next token is picked from logits.

Decides greedy and random picks. Refuses to know models and scheduling. A pick depends on the
request's seed, on how many came before it and on the logits alone: not on the batch, nor on which
instance made those before.
"""

import hashlib
import secrets
from collections.abc import Sequence

import torch

from kvcourier.engine.api import SamplingParams


class TokenSampler:
    """Picks the tokens of one request, one after the other."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        self._params = params
        self.stop_token_ids = params.stop_token_ids
        if not params.ignore_eos:
            self.stop_token_ids |= eos_token_ids
        self.num_sampled = 0
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._generator = torch.Generator() if params.temperature > 0 else None

    @property
    def is_greedy(self) -> bool:
        return self._generator is None

    @property
    def forbidden_token_ids(self) -> frozenset[int]:
        """Tokens that may not come next: those that would end the answer before `min_tokens`."""
        is_early = self.num_sampled < self._params.min_tokens
        return self.stop_token_ids if is_early else frozenset()

    @property
    def first_pick(self) -> tuple[object, ...]:
        """All that the first pick depends on, besides the logits; what has no say is left out."""
        params = self._params
        forbidden = sorted(self.stop_token_ids) if params.min_tokens > 0 else []
        if self.is_greedy:
            return (forbidden,)
        return forbidden, params.temperature, params.top_p, params.top_k, params.seed

    def pick(self, logits: torch.Tensor) -> int:
        """Draw one token from the logits of one position, shape [vocab_size], on any device."""
        assert self._generator is not None, "greedy rows are picked together"
        self._generator.manual_seed(_seed_of_pick(self._seed, self.num_sampled))
        logits = logits.to(device="cpu", dtype=torch.float32) / self._params.temperature
        # Stable, so that equal logits keep their order on every machine.
        logits, order = torch.sort(logits, descending=True, stable=True)
        if self._params.top_k > 0:
            logits, order = logits[: self._params.top_k], order[: self._params.top_k]
        probabilities = torch.softmax(logits, dim=-1)
        if self._params.top_p < 1:
            # Kept: the fewest tokens that together reach top_p, never none.
            before = probabilities.cumsum(0) - probabilities
            probabilities = torch.where(before < self._params.top_p, probabilities, 0.0)
        choice = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(order[choice])


def _seed_of_pick(seed: int, number: int) -> int:
    # Mixed, as the generator uses 32 bits of what it is given.
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@torch.inference_mode()
def sample(logits: torch.Tensor, samplers: Sequence[TokenSampler]) -> list[int]:
    """Pick the next token of each row of `logits`, shape [rows, vocab_size]."""
    for row, sampler in enumerate(samplers):
        forbidden = sampler.forbidden_token_ids
        if forbidden:
            logits[row, sorted(forbidden)] = -torch.inf
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, sampler in enumerate(samplers):
        if not sampler.is_greedy:
            tokens[row] = sampler.pick(logits[row])
        sampler.num_sampled += 1
    return tokens
