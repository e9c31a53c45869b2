"""What the holding side (P) says when a wanter asks what its KV should sum up to.

Decides which questions are answered, and remembers the answer for a question that is asked again.
Refuses to know how holds are found, and what becomes of a transfer whose digests differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcourier.config import Integrity
from kvcourier.core.digests import Digests, GroupShare
from kvcourier.core.events import OperationId
from kvcourier.core.holds import Hold, wanter_of
from kvcourier.core.messages import Digest, Digested, ShareItem
from kvcourier.core.workspace import Counted, Owner, Workspace
from kvcourier.ids import RequestId
from kvcourier.layout.digests import Share
from kvcourier.layout.geometry import TokenSpan

WITNESS = "witness"
"""First part of the owner of its digests."""


@dataclass(slots=True)
class _Question:
    """The latest one of a wanter's rank about a hold."""

    message: Digest
    answer: Digested | None = None


class Witness:
    """All questions about the holds of one rank."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._digests = Digests(space)
        self._questions: dict[Owner, _Question] = {}

    def ask(self, hold: Hold, message: Digest) -> None:
        """Answer, once it is summed up. The same question twice is answered, or worked at, once."""
        peer = message.sender.peer()
        owner: Owner = (WITNESS, hold.request_id, peer)
        known = self._questions.get(owner)
        if known is not None and known.message.seed == message.seed:
            if known.answer is not None:
                self._space.send(peer, known.answer)
            return
        problem = self._problem(hold, message)
        if problem:
            self.refuse(message, problem)
            return
        self._questions[owner] = _Question(message)
        hold.asked_by.add(peer)
        self._space.note(hold.request_id, "digest_asked", by=str(peer), whole=message.whole)
        self._digests.take(
            owner,
            hold.block_ids,
            TokenSpan(0, hold.num_tokens),
            [_share(item) for item in message.shares],
            Integrity.ALL if message.whole else Integrity.SAMPLE,
            message.seed,
        )

    def refuse(self, message: Digest, reason: str) -> None:
        """There is no answer, and will be none."""
        self._space.send(message.sender.peer(), self._answer(message, [], reason))

    def on_taken(self, owner: Owner, operation_id: OperationId, digest: int) -> None:
        """One of the digests is there."""
        digests = self._digests.took(owner, operation_id, digest)
        if digests is not None:
            question = self._questions[owner]
            question.answer = self._answer(question.message, digests)
            self._space.send(owner[2], question.answer)

    def on_refused(self, owner: Owner, reason: str) -> None:
        """One cannot be taken."""
        self._digests.drop(owner)
        self.refuse(self._questions.pop(owner).message, reason)

    def end(self, hold: Hold, reason: str) -> None:
        """The hold is over: whoever waits for an answer gets none."""
        for peer in sorted(hold.asked_by):
            question = self._questions.pop((WITNESS, hold.request_id, peer), None)
            self._digests.drop((WITNESS, hold.request_id, peer))
            if question is not None and question.answer is None and peer.rank not in hold.served:
                self.refuse(question.message, reason)
        hold.asked_by.clear()

    def _problem(self, hold: Hold, message: Digest) -> str:
        peer = message.sender.peer()
        if hold.bound not in (None, wanter_of(peer, RequestId(message.request_id))):
            self._space.counts[Counted.STALE_REFUSED] += 1
            return "this prompt's KV is promised to another request"
        if len(hold.asked_by | {peer}) > self._space.limits.max_ranks:
            return "too many ranks ask for digests of this prompt"
        # Whatever else is wrong with them is found where the blocks are looked up.
        held = hold.num_tokens * sum(
            len(group.layers) * group.num_heads
            for group in self._space.geometries[self._space.me.rank]
        )
        asked = sum(
            len(share.layers) * (share.head_stop - share.head_start) * share.num_tokens
            for share in message.shares
        )
        if not message.shares or asked > held:
            return f"shares: expected 1 to {held} cells, found {asked}"
        return ""

    def _answer(self, message: Digest, digests: Sequence[int], reason: str = "") -> Digested:
        return Digested(
            self._space.sender, message.request_id, message.seed, list(digests), reason[:1024]
        )


def _share(item: ShareItem) -> GroupShare:
    span = TokenSpan(item.first_token, item.first_token + item.num_tokens)
    return item.group, Share(tuple(item.layers), item.head_start, item.head_stop, span)
