"""Keeping what we want alive at its holders, and what their answers prove.

Decides what to renew and when, and which question an answer belongs to. Refuses to know what a want
does with a proof; `answers` does that.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvcourier.core.answers import Answers
from kvcourier.core.asks import Asks
from kvcourier.core.commands import SendMessage
from kvcourier.core.lifecycle import WantState
from kvcourier.core.messages import UNASKED, Renew, Renewed, RenewItem
from kvcourier.core.want_table import WantTable
from kvcourier.core.wants import Link, Want
from kvcourier.core.workspace import Counted, TimerKind, Workspace
from kvcourier.ids import InstanceAddress, PeerRank, RequestId

_MAX_OPEN = 4096
_NOT_RENEWED = frozenset({WantState.PARTING, WantState.QUARANTINED})


class Heartbeats:
    """The `Renew` messages of one rank, and when each was asked."""

    def __init__(
        self,
        space: Workspace,
        own_address: InstanceAddress,
        wants: WantTable,
        asks: Asks,
        answers: Answers,
    ) -> None:
        self._space = space
        self._own_address = own_address
        self._wants = wants
        self._asks = asks
        self._answers = answers
        self._serial = 0
        self._asked_at: dict[tuple[PeerRank, int], float] = {}
        self.on_timer: Mapping[TimerKind, Callable[[Any], None]] = {
            TimerKind.HEARTBEAT: self._on_due,
            TimerKind.ASK: self._on_ask_due,
        }

    def on_renewed(self, message: Renewed) -> None:
        """A holder's answer."""
        peer = message.sender.peer()
        unasked = message.serial == UNASKED
        for want, link in self._matching(peer, message.finished):
            self._answers.on_finished(want, link, unasked=unasked)
        if unasked:
            return
        asked_at = self._asked_at.pop((peer, message.serial), None)
        if asked_at is None:
            self._space.counts[Counted.MESSAGES_IGNORED] += 1
            return
        for want, link in self._matching(peer, message.known):
            self._answers.on_known(want, link, asked_at, message.granted_s)
        for want, link in self._matching(peer, message.served):
            self._answers.on_served(want, link)
        for want, link in self._matching(peer, message.refused):
            self._answers.on_refused(want, link)
        for want, link in self._matching(peer, message.unknown):
            self._answers.on_unknown(want, link, asked_at)

    def _matching(self, peer: PeerRank, request_ids: Iterable[str]) -> Iterator[tuple[Want, Link]]:
        """Those that are wanted still; each is looked up when its turn comes, for the one before
        may have ended it."""
        for request_id in request_ids:
            found = self._wants.match(peer, request_id)
            if found is not None:
                yield found

    def _on_due(self, address: InstanceAddress) -> None:
        if self._renew(self._wants.at(address)):
            self._space.set_timer(TimerKind.HEARTBEAT, address, self._space.timing.heartbeat_s)

    def _on_ask_due(self, request_id: RequestId) -> None:
        """Renew one request now; it joins its peer's heartbeat."""
        want = self._wants.get(request_id)
        if want is None:
            return
        self._renew([want])
        if (TimerKind.HEARTBEAT, want.address) not in self._space.timers:
            self._space.set_timer(TimerKind.HEARTBEAT, want.address, self._space.timing.heartbeat_s)

    def _renew(self, wants: Iterable[Want]) -> bool:
        """Ask each rank about all of these that it holds; False if there are none."""
        items: dict[PeerRank, list[RenewItem]] = {}
        for want in wants:
            if want.state not in _NOT_RENEWED:
                for link in want.links.values():
                    items.setdefault(link.peer, []).append(self._asks.renewal(want, link))
        for peer, renewals in items.items():
            self._serial = self._serial % ((1 << 31) - 1) + 1
            self._asked_at[peer, self._serial] = self._space.now
            _, host, port = self._own_address
            message = Renew(self._space.sender, self._serial, renewals, host, port)
            self._space.emit(SendMessage(peer, message))
        while len(self._asked_at) > _MAX_OPEN:
            del self._asked_at[next(iter(self._asked_at))]
        return bool(items)
