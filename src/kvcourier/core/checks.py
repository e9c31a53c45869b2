"""Whether what has arrived is what its holders have: the wanting side's (D) part.

Decides what is asked of whom, and the verdict. Refuses to know when a check is due and what follows
from it; `receipts` does.
"""

import hashlib
from dataclasses import dataclass

from kvcourier.config import Integrity
from kvcourier.core.asks import name_of
from kvcourier.core.digests import Digests
from kvcourier.core.events import OperationId
from kvcourier.core.messages import Digest, Digested, ShareItem
from kvcourier.core.wants import Check, Link, Want
from kvcourier.core.workspace import Counted, Owner, Workspace
from kvcourier.layout.digests import Share

CHECK = "check"
"""First part of the owner of its digests."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a check that is over: the ranks whose KV differs, if any."""

    differing: tuple[Link, ...]

    @property
    def reason(self) -> str:
        """One sentence."""
        ranks = ", ".join(str(link.peer.rank) for link in self.differing)
        return f"integrity: the KV that came differs from what the prefill instance holds ({ranks})"


class Checks:
    """All checks of one rank."""

    def __init__(self, space: Workspace, integrity: Integrity) -> None:
        self._space = space
        self._integrity = integrity
        self._digests = Digests(space)

    @property
    def enabled(self) -> bool:
        """Whether anything is checked at all."""
        return self._integrity is not Integrity.OFF

    def ask(self, want: Want, link: Link) -> None:
        """Have a source rank sum up what it holds, for a check to come, or once more."""
        if link.check is None:
            link.check = Check(self._seed(want, link))
        self._space.send(
            link.peer,
            Digest(
                self._space.sender,
                name_of(want, link),
                want.request_id,
                _items(want, link),
                self._integrity is Integrity.ALL,
                link.check.seed,
            ),
        )

    def ask_again(self, want: Want) -> None:
        """Whoever has not answered."""
        for link in want.sources:
            if link.check is None or link.check.theirs is None:
                self.ask(want, link)

    def begin(self, want: Want) -> None:
        """Everything has come: sum up what we have now."""
        for link in want.sources:
            if link.check is None:
                self.ask(want, link)
            assert link.check is not None
            if link.check.ours is None:
                self._digests.take(
                    _owner(want, link),
                    want.block_ids,
                    want.span,
                    [
                        (route.target_group, share)
                        for route, share in zip(link.routes, _shares(want, link), strict=True)
                    ],
                    self._integrity,
                    link.check.seed,
                )

    def answered(self, link: Link, message: Digested) -> bool:
        """A source rank has answered; False if it was not asked that."""
        check = link.check
        if check is None or check.seed != message.seed or check.theirs is not None:
            return False
        check.theirs = message.digests
        return True

    def took(self, want: Want, owner: Owner, operation_id: OperationId, digest: int) -> None:
        """One of our own digests is there."""
        digests = self._digests.took(owner, operation_id, digest)
        link = want.links[owner[2].rank]
        if digests is not None and link.check is not None:
            link.check.ours = digests

    def verdict(self, want: Want) -> Verdict | None:
        """None while something is missing."""
        checks = [(link, link.check) for link in want.sources]
        if not all(check is not None and check.is_over for _, check in checks):
            return None
        differing = tuple(link for link, check in checks if check is None or not check.agrees)
        self._space.counts[Counted.INTEGRITY_CHECKS] += 1
        self._space.counts[Counted.INTEGRITY_FAILURES] += bool(differing)
        self._space.note(
            want.request_id,
            "checked",
            integrity=self._integrity.value,
            differing=[str(link.peer.rank) for link in differing],
        )
        return Verdict(differing)

    def drop(self, want: Want) -> None:
        """The want is over, or begins anew."""
        for link in want.links.values():
            self._digests.drop(_owner(want, link))

    def _seed(self, want: Want, link: Link) -> int:
        """Another for every try, so that none passes by the luck of the one before."""
        name = f"{self._space.me}/{want.request_id}/{link.peer}/{want.num_repairs}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 4


def _owner(want: Want, link: Link) -> Owner:
    return CHECK, want.request_id, link.peer


def _shares(want: Want, link: Link) -> list[Share]:
    """What each route has brought."""
    return [
        Share(each.layers, each.head_start, each.head_stop, each.needed(want.span))
        for each in link.routes
    ]


def _items(want: Want, link: Link) -> list[ShareItem]:
    return [
        ShareItem(
            route.source_group,
            list(share.layers),
            share.head_start,
            share.head_stop,
            share.span.start,
            len(share.span),
        )
        for route, share in zip(link.routes, _shares(want, link), strict=True)
    ]
