"""Which blocks a wanter is about to READ, in few bytes.

Decides what of a reference its holder compares with the hold itself: block ids reach a wanter by
way of clients and routers, and nothing but the holder knows whose they are. Refuses to know
messages and when they are sent.
"""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def block_digest(block_ids: Sequence[Sequence[int]]) -> bytes:
    """A digest of the ids of every cache group, in order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for group in block_ids:
        digest.update(len(group).to_bytes(8, "little"))
        digest.update(array("q", group).tobytes())
    return digest.digest()
