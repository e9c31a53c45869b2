"""Which of several instances serves the next request.

Decides by a table of policies, each a pure function of the candidates and of what is to be served.
Refuses to know requests, HTTP and the clock.
"""

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcourier.router.load import FULL


@dataclass(frozen=True, slots=True)
class Candidate:
    """One instance as a policy sees it.

    Attributes:
        name: the same for as long as it is configured.
        usable: it may be chosen at all (fits the mode, not drained, not just tried).
        reachable: it answered when last asked; the others are a last resort.
        trusted: it has not failed several times in a row just now; likewise.
        num_requests: what it has to do, as far as is known: it said so, or we sent it.
        kv_used: part of its KV cache in use when it was last asked.
        backlog: parts of prompts that it was sent, and has not answered yet.
        num_known: parts of the prompt in question that it was sent before.
    """

    name: str = ""
    usable: bool = True
    reachable: bool = True
    trusted: bool = True
    num_requests: int = 0
    kv_used: float = 0.0
    backlog: int = 0
    num_known: int = 0

    @property
    def is_full(self) -> bool:
        """Whether one more request would probably wait for blocks."""
        return self.kv_used >= FULL


@dataclass(frozen=True, slots=True)
class Need:
    """What is to be served.

    Attributes:
        turn: counts up by one with every request.
        num_parts: of its prompt.
        conversation: which one it belongs to, if it says so.
    """

    turn: int = 0
    num_parts: int = 0
    conversation: str = ""


Choose = Callable[[Sequence[Candidate], Sequence[int], Need], int]
"""(all candidates, indices to choose from: not empty, what is to be served) -> chosen index."""


@dataclass(frozen=True, slots=True)
class Policy:
    """An entry of the table.

    Attributes:
        needs_load: instances have to be asked for their metrics.
        needs_prompt: prompts have to be looked at.
    """

    choose: Choose
    needs_load: bool = False
    needs_prompt: bool = False


def round_robin(candidates: Sequence[Candidate], choices: Sequence[int], need: Need) -> int:
    """The first choice at or after the turn's own place, so that a gap moves nobody else's turn."""
    return min(choices, key=lambda index: _place(candidates, index, need))


def least_loaded(candidates: Sequence[Candidate], choices: Sequence[int], need: Need) -> int:
    """The choice with the fewest requests, of those the one with most of its cache free; ties go
    round. One whose cache is full comes last."""
    return min(choices, key=lambda index: _by_load(candidates, index, need))


def prefix_aware(candidates: Sequence[Candidate], choices: Sequence[int], need: Need) -> int:
    """The choice that should have computed the prompt first: what it has still to compute, and what
    it was not sent of this prompt before, are least."""

    def to_compute(index: int) -> tuple[object, ...]:
        one = candidates[index]
        missing = max(0, need.num_parts - one.num_known)
        return one.is_full, one.backlog + missing, *_by_load(candidates, index, need)

    return min(choices, key=to_compute)


def conversation(candidates: Sequence[Candidate], choices: Sequence[int], need: Need) -> int:
    """The same choice for all turns of a conversation, unless it is full; by load where there is
    none. Several routers agree without a word, and if an instance comes or goes, only those
    conversations move that it takes or had."""
    if not need.conversation:
        return least_loaded(candidates, choices, need)
    return max(choices, key=lambda index: _affinity(candidates[index], need.conversation))


POLICIES: Mapping[str, Policy] = {
    "round_robin": Policy(round_robin),
    "least_in_flight": Policy(least_loaded),
    "least_loaded": Policy(least_loaded, needs_load=True),
    "prefix_aware": Policy(prefix_aware, needs_load=True, needs_prompt=True),
    "conversation": Policy(conversation, needs_load=True),
}
"""By name. `least_in_flight` goes by the router's own legs only, as nothing else is asked for."""


def choose(policy: str, candidates: Sequence[Candidate], need: Need) -> int | None:
    """Index of the instance to use, or None if none is usable.

    Those that are reachable and trusted come first; if none is, the others are tried rather than
    giving up.
    """
    usable = [index for index, candidate in enumerate(candidates) if candidate.usable]
    reachable = [index for index in usable if candidates[index].reachable]
    trusted = [index for index in reachable if candidates[index].trusted]
    choices = trusted or reachable or usable
    return POLICIES[policy].choose(candidates, choices, need) if choices else None


class Skipped(enum.StrEnum):
    """Why a request needs no prefill instance."""

    SHORT = "short"
    CACHED = "cached"


def why_alone(num_tokens: int, num_known_tokens: int, below_tokens: int) -> Skipped | None:
    """Whether a decode instance should compute a prompt itself, of which it was sent so much
    before: where less than `below_tokens` is left, moving KV takes longer than computing it."""
    if num_tokens < below_tokens:
        return Skipped.SHORT
    return Skipped.CACHED if num_tokens - num_known_tokens < below_tokens else None


def most_known(candidates: Sequence[Candidate]) -> int | None:
    """The candidate that was sent most of the prompt before, if one was and could serve it now."""
    able = [
        index
        for index, one in enumerate(candidates)
        if one.usable and one.reachable and one.trusted and not one.is_full and one.num_known
    ]
    return max(
        able,
        key=lambda index: (candidates[index].num_known, -candidates[index].num_requests),
        default=None,
    )


def _place(candidates: Sequence[Candidate], index: int, need: Need) -> int:
    return (index - need.turn) % len(candidates)


def _by_load(candidates: Sequence[Candidate], index: int, need: Need) -> tuple[object, ...]:
    one = candidates[index]
    return one.is_full, one.num_requests, one.kv_used, _place(candidates, index, need)


def _affinity(candidate: Candidate, name: str) -> tuple[bool, bytes]:
    """Rendezvous hashing: each pair of a conversation and an instance has a number of its own."""
    text = f"{name}\n{candidate.name}".encode("utf-8", "surrogatepass")
    return not candidate.is_full, hashlib.blake2b(text, digest_size=8).digest()
