"""What proves that two token sequences begin alike, without either of them being sent.

Decides the digests, how many tokens each stands for, and their text. Refuses to know what the
tokens are and what hangs on the proof.

Digest i is of tokens [0, (i + 1) * step), each computed from the one before, so the longest equal
beginning is found to within `step` tokens. They are cryptographic and long: whoever found two
sequences with equal digests could have one of them answered with the other's KV.
"""

import base64
import binascii
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_BYTES = 16
LEAST_STEP = 16
MAX_DIGESTS = 512
"""So a proof stays below 11 KB, whatever it is of: longer sequences have longer steps."""


@dataclass(frozen=True, slots=True)
class TokenProof:
    """Digests of one token sequence, one for every `step` tokens, as one text."""

    step: int
    text: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence that the proof covers."""
        return self.step * len(_decode(self.text)) // DIGEST_BYTES

    def num_proven(self, tokens: Sequence[int], salt: str = "") -> int:
        """Tokens at the beginning of these that are certainly those of the proven sequence."""
        digests = _decode(self.text)
        num_equal = 0
        for start in range(0, len(digests), DIGEST_BYTES):
            before = digests[start - DIGEST_BYTES : start] if start else salt.encode()
            part = tokens[num_equal : num_equal + self.step]
            expected = digests[start : start + DIGEST_BYTES]
            if len(part) < self.step or _digest(before, part) != expected:
                break
            num_equal += self.step
        return num_equal


def prove(tokens: Sequence[int], salt: str = "") -> TokenProof:
    """The proof of a sequence; `salt` is what else its KV depends on, equal on both sides."""
    step = LEAST_STEP
    while len(tokens) // step > MAX_DIGESTS:
        step *= 2
    digests, before = bytearray(), salt.encode()
    for start in range(0, len(tokens) - step + 1, step):
        before = _digest(before, tokens[start : start + step])
        digests += before
    return TokenProof(step, base64.b64encode(digests).decode())


def is_proof_text(text: str) -> bool:
    """Whether this is the text of some proof."""
    try:
        digests = _decode(text)
    except (binascii.Error, ValueError):
        return False
    return len(digests) % DIGEST_BYTES == 0 and len(digests) <= MAX_DIGESTS * DIGEST_BYTES


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    digest = hashlib.blake2b(before, digest_size=DIGEST_BYTES)
    digest.update(b"|")
    digest.update(array("q", tokens).tobytes())
    return digest.digest()
