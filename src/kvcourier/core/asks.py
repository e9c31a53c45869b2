"""What a want asks of the ranks that hold its KV.

Decides the contents of each registration, READ, heartbeat, cancel and good-bye. Refuses to know
when they are due; `receipts`, `heartbeats`, `recalls` and `want_endings` do.
"""

from kvcourier.config import TransferMode
from kvcourier.core.commands import PostRead, SendNotification
from kvcourier.core.events import NOT_POSTED, OperationId
from kvcourier.core.messages import (
    Cancel,
    Collected,
    HoldName,
    Register,
    RenewItem,
    hold_name,
)
from kvcourier.core.references import block_digest
from kvcourier.core.wants import Link, Want
from kvcourier.core.workspace import Workspace
from kvcourier.ids import InstanceAddress
from kvcourier.layout.routes import Route


class Asks:
    """Turns wants into messages and operations."""

    def __init__(self, space: Workspace, own_address: InstanceAddress, *, checks: bool) -> None:
        """`checks`: what is written to us will be compared, so holders must keep it."""
        self._space = space
        self._checks = checks
        self._own_address = own_address
        self._tp_size = 1 + max(rank.tp_rank for rank in space.geometries)
        self._pp_size = len(space.geometries) // self._tp_size

    def register(self, want: Want, link: Link) -> None:
        """Offer our blocks to be written."""
        self._space.emit(
            SendNotification(
                link.peer,
                want.address,
                Register(
                    sender=self._space.sender,
                    name=name_of(want, link),
                    request_id=want.request_id,
                    decode_host=self._own_address.host,
                    decode_port=self._own_address.port,
                    decode_tp_size=self._tp_size,
                    decode_pp_size=self._pp_size,
                    local_block_ids=[list(group) for group in want.block_ids],
                    first_token=want.span.start,
                    num_tokens=len(want.span),
                    consumers=_pairs(link),
                    epoch=link.asked_epoch,
                    reads=want.reads,
                    checks=self._checks and not want.reads,
                ),
            )
        )

    def read(self, want: Want, link: Link) -> None:
        """READ everything we take from this rank."""
        for route in link.routes:
            operation_id = self._space.flights.launch(want.owner(link))
            self._space.emit(self.read_command(want, link, route, operation_id))

    def read_command(
        self, want: Want, link: Link, route: Route, operation_id: OperationId = NOT_POSTED
    ) -> PostRead:
        """The READ of one route; without an operation's id only to be looked at."""
        assert link.offer is not None, "it is not known what is held"
        return PostRead(
            operation_id=operation_id,
            peer=link.peer,
            address=want.address,
            route=route,
            own_block_ids=want.block_ids,
            peer_block_ids=link.offer.block_ids,
            num_held=link.offer.num_tokens or want.span.stop,
            span=want.span,
        )

    def renewal(self, want: Want, link: Link) -> RenewItem:
        """Keep the hold alive, and say what we READ of it, as soon as that is known."""
        name, reads, offer = name_of(want, link), want.mode is TransferMode.PULL, link.offer
        num_tokens = (offer.num_tokens or want.span.stop) if offer is not None else 0
        if offer is None or not num_tokens or not want.reads:
            return RenewItem(name, want.request_id, reads)
        link.blocks = link.blocks or block_digest(offer.block_ids)
        link.shown_at = min(link.shown_at, self._space.now)
        return RenewItem(name, want.request_id, reads, link.blocks, num_tokens)

    def cancel(self, want: Want, link: Link, *, for_now: bool = False) -> None:
        """Write no more, and say when nothing is in flight; `for_now`: we will register again.

        Over the side channel, which outlives a broken data path; and over the data path, where a
        peer that is dead is known at once.
        """
        message = Cancel(
            self._space.sender,
            name_of(want, link),
            want.request_id,
            _pairs(link),
            link.asked_epoch,
            for_now,
        )
        self._space.send(link.peer, message)
        self._space.emit(SendNotification(link.peer, want.address, message))

    def let_go(self, want: Want, link: Link, *, read: bool) -> None:
        """We need nothing more: the KV was READ, or was not needed."""
        self._space.send(
            link.peer,
            Collected(self._space.sender, name_of(want, link), want.request_id, read, _pairs(link)),
        )


def name_of(want: Want, link: Link) -> HoldName:
    """How a source rank is told which hold is meant."""
    intent = want.intent
    return hold_name(
        transfer_id=intent.transfer_id,
        part=intent.part,
        request_id=intent.holder_request_id,
        hold_id=link.offer.hold_id if link.offer is not None else None,
    )


def _pairs(link: Link) -> list[tuple[int, int]]:
    return [(rank.pp_rank, rank.tp_rank) for rank in link.consumers]
