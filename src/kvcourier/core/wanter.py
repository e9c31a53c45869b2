"""The side that wants the KV (D): registers its blocks and is written to (push), or READs (pull).

Decides which wants an event is about, and what becomes of one that has waited too long. Refuses to
know how a holder decides, how bytes move, and each step on a want's way: `words` (whether it may
have blocks), `connections` (whether it has a peer), `receipts` (getting the KV), `recalls` (blocks
that go back on the way), `want_endings` (where all of them go back). What holders say is told to
its `answers` and `heartbeats`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcourier.config import Integrity
from kvcourier.core.answers import Answers
from kvcourier.core.asks import Asks
from kvcourier.core.checks import Checks
from kvcourier.core.connections import Connections
from kvcourier.core.events import BlocksReserved, OperationId, WantBegun
from kvcourier.core.heartbeats import Heartbeats
from kvcourier.core.lifecycle import WantEvent, WantState
from kvcourier.core.params import PullIntent
from kvcourier.core.peers import Peer
from kvcourier.core.recalls import Recalls
from kvcourier.core.receipts import Receipts, WritePreference
from kvcourier.core.want_endings import WantEndings
from kvcourier.core.want_table import WantTable
from kvcourier.core.wants import Want
from kvcourier.core.words import Words
from kvcourier.core.workspace import Owner, TimerKind, Workspace
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import InstanceAddress, PeerRank, RequestId

_AWAITING_PEER = frozenset(
    {
        WantState.REGISTERING,
        WantState.REGISTERED,
        WantState.RECALLING,
        WantState.READING,
        WantState.PROVING,
        WantState.CHECKING,
    }
)
_TIMEOUT_REASONS = {
    WantState.QUEUED: "the other instance did not say in time that it has, or will have, this KV",
    WantState.CONNECTING: "the other instance did not answer the handshake in time",
    WantState.REGISTERING: "the other instance did not acknowledge the registration in time",
    WantState.REGISTERED: "the other instance did not deliver in time",
    WantState.RECALLING: "the other instance neither delivered nor gave the blocks back in time",
    WantState.READING: "the READ did not end in time",
    WantState.PROVING: "the other instance did not confirm in time that it still held the KV",
    WantState.CHECKING: "integrity: what has come could not be compared in time",
}


class Wanter:
    """All wants of one rank.

    Attributes:
        wants: every want that is not released.
        answers: told what holders say by themselves.
        heartbeats: told what they answer to ours.
    """

    def __init__(
        self,
        space: Workspace,
        own_address: InstanceAddress,
        prefers_write: WritePreference,
        integrity: Integrity,
    ) -> None:
        self._space = space
        self.wants = WantTable()
        checks = Checks(space, integrity)
        asks = Asks(space, own_address, checks=checks.enabled)
        self._words = words = Words(space)
        self._recalls = recalls = Recalls(space, asks, words)
        self._endings = endings = WantEndings(space, self.wants, asks, checks)
        self._receipts = receipts = Receipts(space, asks, checks, endings, prefers_write)
        self._connections = Connections(space, words, checks, receipts, endings)
        self.answers = Answers(space, self.wants, words, checks, recalls, receipts, endings)
        self.heartbeats = Heartbeats(space, own_address, self.wants, asks, self.answers)
        self.on_timer: Mapping[TimerKind, Callable[[Any], None]] = {
            TimerKind.WANT: self._on_overdue,
            TimerKind.RESEND: self._on_resend,
            **self.heartbeats.on_timer,
        }
        self._ask_again: Mapping[WantState, Callable[[Want], None]] = {
            WantState.REGISTERING: receipts.register_again,
            WantState.REGISTERED: receipts.register_again,
            WantState.RECALLING: recalls.ask_again,
            WantState.PROVING: receipts.ask_for_proof,
            WantState.CHECKING: checks.ask_again,
            WantState.QUARANTINED: endings.ask_again,
        }

    # From the engine.

    def begin(self, event: WantBegun) -> None:
        """A request was accepted and may wait for blocks; connect and keep its lease alive.

        Raises:
            LocalProtocolError: the request is wanted already.
        """
        if self.wants.get(event.request_id) is not None:
            raise LocalProtocolError(f"{event.request_id} is wanted already")
        want = Want(event.request_id, event.intent)
        if isinstance(event.intent, PullIntent):
            want.continuation = event.intent.continuation
            want.is_finished = True
        self.wants.add(want)
        if event.intent.transfer_id is not None:
            self._space.stories.alias(event.intent.transfer_id, event.request_id)
        self._space.note(event.request_id, "want_begun", mode=want.mode.value)
        self._words.expect(want)
        self._connections.begin(want)

    def reserve(self, event: BlocksReserved) -> None:
        """The engine gave blocks: register them, or READ into them, as soon as connected.

        Raises:
            LocalProtocolError: no such want, or it has blocks already.
        """
        want = self.wants.get(event.request_id)
        if want is None:
            raise LocalProtocolError(f"{event.request_id} is not wanted")
        want.advance(WantEvent.BLOCKS_RESERVED)
        want.block_ids, want.span = event.block_ids, event.span
        self._space.note(
            event.request_id, "blocks_reserved", start=event.span.start, stop=event.span.stop
        )
        self._connections.require(want)

    def recall(self, request_id: RequestId) -> None:
        """The engine wants the blocks back for another request; unknown ones are fine."""
        want = self.wants.get(request_id)
        if want is not None:
            self._recalls.begin(want)

    def decline(self, request_id: RequestId) -> None:
        """Nothing is needed after all; unknown requests are fine."""
        want = self.wants.get(request_id)
        if want is not None and want.state is WantState.QUEUED:
            self._connections.part(want)

    def abort(self, request_id: RequestId) -> bool:
        """The engine ended the request; False if it is none of ours."""
        want = self.wants.get(request_id)
        if want is None:
            return False
        want.gave_up = True
        if want.state is WantState.QUEUED:
            self._connections.part(want)
        elif want.state not in (WantState.PARTING, WantState.QUARANTINED):
            self._endings.give_up(want, "aborted")
        return True

    def close(self) -> None:
        """Our process ends: let go of everything that is kept for us."""
        for want in self.wants:
            self.abort(want.request_id)

    # From the world.

    def on_peer_connected(self, peer: Peer) -> None:
        """Everything that waited for this peer can go on."""
        for want in self.wants.at(peer.address):
            self._connections.on_connected(want, peer)

    def on_peer_failed(self, address: InstanceAddress, reason: str) -> None:
        """A peer could not be connected."""
        for want in self.wants.at(address):
            self._connections.on_failed(want, reason)

    def on_peer_lost(self, address: InstanceAddress, reason: str) -> None:
        """That life is over."""
        for want in self.wants.at(address):
            self._connections.on_lost(want, reason)

    def on_peer_silent(self, address: InstanceAddress, reason: str) -> None:
        """Nobody waits for it any longer. What it may still write to stays quarantined."""
        for want in self.wants.at(address):
            if want.state in _AWAITING_PEER:
                self._endings.fail(want, reason)

    def needed_at(self, address: InstanceAddress) -> set[PeerRank]:
        """The ranks there that must write, answer, or keep what is READ."""
        return {
            link.peer
            for want in self.wants.at(address)
            if want.state in _AWAITING_PEER
            for link in want.sources
        }

    def on_operation_ended(self, owner: Owner, reason: str | None) -> None:
        """A READ is terminal; `reason` says why it failed, None that it did not."""
        self._receipts.on_operation_ended(self.wants[owner[1]], reason)

    def on_digest_taken(self, owner: Owner, operation_id: OperationId, digest: int) -> None:
        """One of the digests of what we have is there."""
        self._receipts.on_digest_taken(self.wants[owner[1]], owner, operation_id, digest)

    def on_digest_refused(self, owner: Owner, reason: str) -> None:
        """One of them cannot be taken."""
        self._endings.fail(self.wants[owner[1]], f"integrity: {reason}")

    # Time.

    def _on_overdue(self, request_id: RequestId) -> None:
        want = self.wants[request_id]
        if want.state is WantState.PARTING:
            self._endings.drop(want)
        elif want.state is WantState.QUEUED:
            self._words.stop_waiting(want, _TIMEOUT_REASONS[want.state])
        elif want.state is WantState.QUARANTINED:
            self._endings.abandon(want)
        else:
            self._endings.fail(want, _TIMEOUT_REASONS[want.state])

    def _on_resend(self, request_id: RequestId) -> None:
        """Something was asked, and not all have answered."""
        want = self.wants[request_id]
        ask_again = self._ask_again.get(want.state)
        if want.reads and want.state is WantState.QUARANTINED:
            # Nobody writes into its blocks but we.
            return
        if ask_again is not None:
            ask_again(want)
            self._space.set_timer(TimerKind.RESEND, request_id, self._space.timing.resend_s)
