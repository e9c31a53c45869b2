"""Keeping what we want alive at its holders, and what their answers prove.

Decides when to renew, and which question an answer belongs to. Refuses to know what a want does
with a proof; `wanter` does that.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcourier.core.commands import SendMessage
from kvcourier.core.messages import UNASKED, Renew, Renewed, RenewItem
from kvcourier.core.wanter import Wanter
from kvcourier.core.workspace import Counted, TimerKind, Workspace
from kvcourier.ids import InstanceAddress, PeerRank, RequestId

_MAX_OPEN = 4096


class Heartbeats:
    """The `Renew` messages of one rank, and when each was asked."""

    def __init__(self, space: Workspace, wanter: Wanter, own_address: InstanceAddress) -> None:
        self._space = space
        self._own_address = own_address
        self._wanter = wanter
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
        for request_id in message.finished:
            self._wanter.on_finished(peer, RequestId(request_id), unasked=unasked)
        if unasked:
            return
        asked_at = self._asked_at.pop((peer, message.serial), None)
        if asked_at is None:
            self._space.counts[Counted.MESSAGES_IGNORED] += 1
            return
        for request_id in message.known:
            self._wanter.on_lease_answer(peer, RequestId(request_id), asked_at, message.granted_s)
        for request_id in message.served:
            self._wanter.on_served(peer, RequestId(request_id))
        for request_id in message.refused:
            self._wanter.on_reference_refused(peer, RequestId(request_id))
        for request_id in message.unknown:
            self._wanter.on_lease_refused(peer, RequestId(request_id), asked_at)

    def _on_due(self, address: InstanceAddress) -> None:
        if self._renew(self._wanter.beat_items(address)):
            self._space.set_timer(TimerKind.HEARTBEAT, address, self._space.timing.heartbeat_s)

    def _on_ask_due(self, request_id: RequestId) -> None:
        """Renew one request now; it joins its peer's heartbeat."""
        address = self._wanter.address_of(request_id)
        self._renew(self._wanter.ask_items(request_id))
        if address is not None and (TimerKind.HEARTBEAT, address) not in self._space.timers:
            self._space.set_timer(TimerKind.HEARTBEAT, address, self._space.timing.heartbeat_s)

    def _renew(self, items: Mapping[PeerRank, list[RenewItem]]) -> bool:
        for peer, renewals in items.items():
            self._serial = self._serial % ((1 << 31) - 1) + 1
            self._asked_at[peer, self._serial] = self._space.now
            _, host, port = self._own_address
            message = Renew(self._space.sender, self._serial, renewals, host, port)
            self._space.emit(SendMessage(peer, message))
        while len(self._asked_at) > _MAX_OPEN:
            del self._asked_at[next(iter(self._asked_at))]
        return bool(items)
