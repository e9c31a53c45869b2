"""The first token of an answer, on its way from who sampled it to who goes on from it.

Decides the text that stands for it, and when the other side may take it for its own. Refuses to
know how the text travels.

The text has a digest of all that the token depends on: the prompt, and how it was picked. So two
legs of a request that differ (a router leaves `min_tokens` out of one, say) cost a step and not a
wrong token. The picks after it need nothing but their number, see `sampler`.
"""

import hashlib
import re
from array import array
from collections.abc import Sequence

from kvcourier.engine.sampler import TokenSampler

_TEXT = re.compile(r"([0-9]{1,9}):([0-9a-f]{32})")


def pack_first_token(token: int, prompt: Sequence[int], sampler: TokenSampler) -> str:
    """What the next instance is told of the token that was picked first after this prompt."""
    return f"{token}:{_digest(prompt, sampler)}"


def unpack_first_token(
    text: str, prompt: Sequence[int], sampler: TokenSampler, vocab_size: int
) -> int | None:
    """The token, if it is what would be picked here; None if one has to be picked here."""
    match = _TEXT.fullmatch(text)
    if match is None or match[2] != _digest(prompt, sampler):
        return None
    token = int(match[1])
    return token if token < vocab_size else None


def _digest(prompt: Sequence[int], sampler: TokenSampler) -> str:
    digest = hashlib.blake2b(repr(sampler.first_pick).encode(), digest_size=16)
    digest.update(array("q", prompt).tobytes())
    return digest.hexdigest()
