"""The side that wants the KV (D): registers its blocks and is written to (push), or READs (pull).

Decides when to connect, register, READ, give up and cancel; when everything is received; and when
the blocks go back. Refuses to know how a holder decides and how bytes move.

"Received" needs every tile from the matched life of the matched instance before our deadline.
Blocks go back in exactly one place, `_release`, and only when neither our operations nor a peer
can touch them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcourier.config import Integrity, TransferMode
from kvcourier.core.asks import Asks
from kvcourier.core.bindings import first_epoch
from kvcourier.core.checks import Checks
from kvcourier.core.commands import Abandon, PostRead
from kvcourier.core.coverage import Coverage
from kvcourier.core.events import BlocksReserved, OperationId, WantBegun, groups_of
from kvcourier.core.lifecycle import WantEvent, WantState
from kvcourier.core.messages import (
    Computed,
    Digested,
    Fail,
    Fenced,
    Held,
    Landed,
    Registered,
    RenewItem,
    span_of,
)
from kvcourier.core.outcomes import NOT_HELD, Cause, Outcome, Side
from kvcourier.core.params import PullIntent
from kvcourier.core.peers import Peer, PeerState
from kvcourier.core.repairs import Repairs
from kvcourier.core.wants import Link, Offer, Want, WriteTarget
from kvcourier.core.workspace import Counted, Owner, TimerKind, Workspace
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import HoldId, InstanceAddress, PeerRank, RequestId

_MAX_CONNECTS = 2
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
_READ_BEGUN = frozenset({WantState.READING, WantState.PROVING, WantState.CHECKING})
_BEFORE_BLOCKS = frozenset({WantState.QUEUED, WantState.PARTING})
_NOT_RENEWED = frozenset({WantState.PARTING, WantState.QUARANTINED})
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


_REFUSED = (
    "the prefill instance does not hold this KV in the blocks, or with the number of tokens, that "
    "the request says"
)


WritePreference = Callable[[PostRead], bool]
"""Whether what this READ would move should rather be written by its holder."""


class Wanter:
    """All wants of one rank."""

    def __init__(
        self,
        space: Workspace,
        own_address: InstanceAddress,
        prefers_write: WritePreference,
        integrity: Integrity,
    ) -> None:
        self._space = space
        self._prefers_write = prefers_write
        self._checks = Checks(space, integrity)
        self._asks = Asks(space, own_address, checks=self._checks.enabled)
        self._repairs = Repairs(space, self._asks, self._read)
        self._wants: dict[RequestId, Want] = {}
        self.on_timer: Mapping[TimerKind, Callable[[Any], None]] = {
            TimerKind.WANT: self._on_overdue,
            TimerKind.RESEND: self._on_resend,
        }

    @property
    def wants(self) -> list[Want]:
        """Every want that is not released."""
        return list(self._wants.values())

    # From the engine.

    def begin(self, event: WantBegun) -> None:
        """A request was accepted and may wait for blocks; connect and keep its lease alive.

        Raises:
            LocalProtocolError: the request is wanted already.
        """
        if event.request_id in self._wants:
            raise LocalProtocolError(f"{event.request_id} is wanted already")
        want = Want(event.request_id, event.intent)
        if isinstance(event.intent, PullIntent):
            want.continuation = event.intent.continuation
            want.is_finished = True
        self._wants[event.request_id] = want
        if event.intent.transfer_id is not None:
            self._space.stories.alias(event.intent.transfer_id, event.request_id)
        self._space.note(event.request_id, "want_begun", mode=want.mode.value)
        self._await_word(want)
        self._connect(want)

    def reserve(self, event: BlocksReserved) -> None:
        """The engine gave blocks: register them, or READ into them, as soon as connected.

        Raises:
            LocalProtocolError: no such want, or it has blocks already.
        """
        want = self._wants.get(event.request_id)
        if want is None:
            raise LocalProtocolError(f"{event.request_id} is not wanted")
        want.advance(WantEvent.BLOCKS_RESERVED)
        want.block_ids, want.span = event.block_ids, event.span
        self._space.note(
            event.request_id, "blocks_reserved", start=event.span.start, stop=event.span.stop
        )
        self._await_connection(want)

    def recall(self, request_id: RequestId) -> None:
        """The engine wants the blocks back for somebody whose KV is there; unknown ones are fine.

        Not those of a prompt that is finished: it comes in a moment, and needs nothing else.
        """
        want = self._wants.get(request_id)
        if want is None or want.is_finished:
            return
        if want.state is WantState.CONNECTING:
            self._give_back(want)
        elif want.registered:
            want.advance(WantEvent.BLOCKS_RECALLED)
            self._space.note(request_id, "recalling")
            for link in want.sources:
                link.fenced = False
                self._asks.cancel(want, link, for_now=True)
            timing = self._space.timing
            self._space.set_timer(TimerKind.WANT, request_id, timing.push_registration_timeout)
            self._space.set_timer(TimerKind.RESEND, request_id, timing.resend_s)

    def decline(self, request_id: RequestId) -> None:
        """Nothing is needed after all; unknown requests are fine."""
        want = self._wants.get(request_id)
        if want is not None and want.state is WantState.QUEUED:
            self._part(want)

    def abort(self, request_id: RequestId) -> bool:
        """The engine ended the request; False if it is none of ours."""
        want = self._wants.get(request_id)
        if want is None:
            return False
        want.gave_up = True
        if want.state is WantState.QUEUED:
            self._part(want)
        elif want.state not in (WantState.PARTING, WantState.QUARANTINED):
            self._end(want, None, "aborted")
        return True

    def close(self) -> None:
        """Our process ends: let go of everything that is kept for us."""
        for want in self.wants:
            self.abort(want.request_id)

    # From holders.

    def on_registered(self, message: Registered) -> None:
        """A source rank has our registration."""
        want, link = self._match(message.sender.peer(), message.request_id)
        if want is None or link is None or not want.registered or link.is_earlier(message.epoch):
            self._ignore()
            return
        link.acknowledged = True
        if not all(source.acknowledged for source in want.sources):
            return
        if want.state is WantState.REGISTERING:
            want.advance(WantEvent.ACKNOWLEDGED)
        want.registered_at = self._space.now
        self._space.cancel_timer(TimerKind.RESEND, want.request_id)
        self._space.note(want.request_id, "registered")

    def on_landed(self, message: Landed) -> None:
        """A tile was written. Anything but an expected tile of a live want is stale."""
        want, link = self._match(message.sender.peer(), message.request_id)
        if want is None or link is None or want.reads or not want.may_be_served:
            self._space.counts[Counted.STALE_REFUSED] += 1
            return
        span = span_of(message)
        coverage = _expected(want, link, message)
        if coverage is None or not coverage.land(span, message.layers):
            self._space.counts[Counted.STALE_REFUSED] += 1
            return
        self._space.note(want.request_id, "landed", by=str(link.peer), tokens=len(span))
        if message.computed:
            self._on_computed(want, link, message.continuation)
        self._receive_if_complete(want, link)

    def on_computed(self, message: Computed) -> None:
        """A source rank has finished prefill and posted everything before."""
        want, link = self._match(message.sender.peer(), message.request_id)
        if want is None or link is None or want.reads or not want.may_be_served:
            self._space.counts[Counted.STALE_REFUSED] += 1
            return
        if not _is_current(want, link, message.epoch):
            self._space.counts[Counted.STALE_REFUSED] += 1
            return
        self._space.note(want.request_id, "computed", by=str(link.peer))
        self._on_computed(want, link, message.continuation)
        self._receive_if_complete(want, link)

    def on_served(self, peer: PeerRank, request_id: RequestId) -> None:
        """A source rank has written all of it, so prefill has finished: a lost notice matters no
        more."""
        want, link = self._match(peer, request_id)
        if want is None or link is None or want.reads or not want.may_be_served:
            return
        if link.routes and link.covered:
            self._on_computed(want, link, None)
            self._receive_if_complete(want, link)

    def _on_computed(self, want: Want, link: Link, continuation: str | None) -> None:
        link.computed = True
        want.continuation = continuation or want.continuation

    def _receive_if_complete(self, want: Want, link: Link) -> None:
        if link.received:
            link.may_write = False
        if all(source.received for source in want.sources):
            self._check_or_receive(want, WantEvent.LANDED)

    def write_target(self, message: Landed) -> WriteTarget | None:
        """Where a tile that is announced goes; None unless all of it is expected now.

        As a tile that has landed does, one of a newer epoch voids the older ones.
        """
        want, link = self._match(message.sender.peer(), message.request_id)
        if want is None or link is None or want.reads or not want.may_be_served:
            return None
        span = span_of(message)
        coverage = _expected(want, link, message)
        if coverage is None or not coverage.expects(span, message.layers):
            return None
        route = link.routes[message.route]
        return WriteTarget(want.request_id, route, want.block_ids, want.span, span)

    def on_held(self, message: Held) -> None:
        """A source rank has finished and tells what we may READ; we do when all have."""
        want, link = self._match(message.sender.peer(), message.request_id)
        if want is None or link is None or not (want.reads and want.may_be_served) or link.offer:
            self._ignore()
            return
        link.acknowledged = True
        self.on_finished(link.peer, want.request_id, unasked=False)
        link.offer = Offer(
            HoldId(message.hold_id), groups_of(message.block_ids), message.num_tokens
        )
        want.continuation = message.continuation or want.continuation
        self._space.note(want.request_id, "offered", by=str(link.peer))
        problem = _unusable(want, link, link.offer)
        if problem:
            self._end(want, Outcome.RECEIVE_FAILED, problem)
        elif all(source.offer for source in want.sources):
            self._space.cancel_timer(TimerKind.RESEND, want.request_id)
            self._read(want)

    def on_digested(self, message: Digested) -> None:
        """A source rank says what it holds."""
        want, link = self._match(message.sender.peer(), message.request_id)
        if (
            want is None
            or link is None
            or want.state not in _READ_BEGUN
            or not self._checks.answered(link, message)
        ):
            self._ignore()
        elif message.reason:
            self._end(want, Outcome.RECEIVE_FAILED, f"integrity: {message.reason}")
        else:
            self._judge(want)

    def on_fail(self, message: Fail) -> None:
        """A source rank will not write."""
        want, link = self._match(message.sender.peer(), message.request_id)
        if want is None or link is None or link.is_earlier(message.epoch):
            self._ignore()
            return
        if message.quiet:
            link.may_write = False
            link.fenced = True
        if want.state is WantState.RECALLING and message.quiet and message.held:
            self._give_back_if_fenced(want)
        elif want.state is WantState.RECALLING:
            self._end(want, Outcome.RECEIVE_FAILED, message.reason)
        elif want.registered:
            if not self._repairs.go_on(want, link, message):
                is_over = message.reason.startswith(NOT_HELD)
                cause = Cause.NOT_HELD if is_over else None
                self._end(want, Outcome.RECEIVE_FAILED, message.reason, cause)
        else:
            self._release_if_quiet(want)

    def on_fenced(self, message: Fenced) -> None:
        """A source rank has nothing in flight and will post nothing."""
        want, link = self._match(message.sender.peer(), message.request_id)
        if want is None or link is None or link.is_earlier(message.epoch):
            self._ignore()
            return
        link.may_write = False
        link.fenced = True
        self._give_back_if_fenced(want)
        self._release_if_quiet(want)

    def on_finished(self, peer: PeerRank, request_id: RequestId, *, unasked: bool) -> None:
        """A source rank has computed all of the prompt, and keeps it for us."""
        want, link = self._match(peer, request_id)
        if want is None or link is None:
            return
        if unasked and want.state is WantState.PROVING and not link.confirmed:
            # We were faster than its engine, so that it could not confirm what we read. Who says so
            # in an answer has said all that it knows: asking again would have no end.
            self._space.set_timer(TimerKind.ASK, request_id, 0.0)
        if not want.is_finished:
            want.is_finished = True
            if want.state is WantState.QUEUED:
                self._space.cancel_timer(TimerKind.WANT, request_id)
            self._space.tell(Side.WANT, request_id, Outcome.HELD)

    def on_lease_answer(
        self, peer: PeerRank, request_id: RequestId, asked_at: float, granted_s: float
    ) -> None:
        """A source rank holds it still: good for `granted_s` from when we asked."""
        want, link = self._match(peer, request_id)
        if want is None or link is None:
            return
        link.proven_until = max(link.proven_until, asked_at + granted_s)
        link.confirmed = link.confirmed or asked_at >= link.shown_at
        self._await_word(want)
        if want.state is WantState.REGISTERED:
            self._space.set_timer(
                TimerKind.WANT, request_id, self._space.timing.push_registration_timeout
            )
        elif want.state is WantState.PROVING:
            self._prove(want)

    def on_lease_refused(self, peer: PeerRank, request_id: RequestId, asked_at: float) -> None:
        """A source rank does not hold it (any more)."""
        want, link = self._match(peer, request_id)
        if want is None or link is None:
            return
        pulling = want.reads and want.state in _READ_BEGUN
        # Before its acknowledgement a registration may have been on its way, so "not known" means
        # nothing; so it does where it was asked before that.
        registered = want.state in (WantState.REGISTERED, WantState.CHECKING)
        forgotten = registered and asked_at > want.registered_at
        if pulling or forgotten:
            self._space.counts[Counted.STALE_REFUSED] += 1
            self._end(want, Outcome.RECEIVE_FAILED, NOT_HELD, Cause.NOT_HELD)

    def on_reference_refused(self, peer: PeerRank, request_id: RequestId) -> None:
        """A source rank holds it, but not in the blocks that we were sent to."""
        want, link = self._match(peer, request_id)
        if want is None or link is None:
            return
        link.refused = True
        if want.reads and want.state in (WantState.READING, WantState.PROVING):
            self._space.counts[Counted.STALE_REFUSED] += 1
            self._end(want, Outcome.RECEIVE_FAILED, _REFUSED)

    # From the world.

    def on_peer_connected(self, peer: Peer) -> None:
        """Everything that waited for this peer can go on."""
        for want in self.wants:
            if want.address == peer.address:
                self._on_connected(want, peer)

    def on_peer_failed(self, address: InstanceAddress, reason: str) -> None:
        """A peer could not be connected: those who need it now fail."""
        for want in self.wants:
            if want.address != address:
                continue
            if want.state is WantState.CONNECTING:
                self._end(want, Outcome.RECEIVE_FAILED, reason)
            elif want.state is WantState.PARTING:
                self._release(want, WantEvent.ENDED_QUIET)
            else:
                self._stop_waiting(want, reason)

    def on_peer_lost(self, address: InstanceAddress, reason: str) -> None:
        """That life is over: it writes no more, and holds nothing."""
        for want in self.wants:
            if want.address != address:
                continue
            for link in want.links.values():
                link.may_write = False
            acknowledged = any(link.acknowledged for link in want.links.values())
            if want.state is WantState.REGISTERING and not acknowledged:
                self._reconnect(want, reason)
            elif want.state is WantState.QUARANTINED:
                self._release_if_quiet(want)
            elif want.state is WantState.PARTING:
                self._release(want, WantEvent.ENDED_QUIET)
            elif want.state in (WantState.QUEUED, WantState.CONNECTING):
                want.links = {}
                self._stop_waiting(want, reason)
            else:
                self._end(want, Outcome.RECEIVE_FAILED, reason, Cause.RESTARTED)

    def on_peer_silent(self, address: InstanceAddress, reason: str) -> None:
        """Nobody waits for it any longer. What it may still write to stays quarantined."""
        for want in self.wants:
            if want.address == address and want.state in _AWAITING_PEER:
                self._end(want, Outcome.RECEIVE_FAILED, reason)

    def needed_at(self, address: InstanceAddress) -> set[PeerRank]:
        """The ranks there that must write, answer, or keep what is READ."""
        return {
            link.peer
            for want in self._wants.values()
            if want.address == address and want.state in _AWAITING_PEER
            for link in want.sources
        }

    def on_operation_ended(self, owner: Owner, reason: str | None) -> None:
        """A READ is terminal; `reason` says why it failed, None that it did not."""
        want = self._wants[owner[1]]
        if want.state is WantState.READING and reason is not None:
            self._end(want, Outcome.RECEIVE_FAILED, reason)
        elif want.state is WantState.READING and self._quiet_locally(want):
            want.advance(WantEvent.READ_COMPLETED)
            want.read_completed_at = self._space.now
            self._space.note(want.request_id, "read")
            self._space.set_timer(
                TimerKind.WANT, want.request_id, self._space.timing.handshake_timeout_s
            )
            self._space.set_timer(TimerKind.RESEND, want.request_id, self._space.timing.resend_s)
            self._prove(want)
        else:
            self._release_if_quiet(want)

    def on_digest_taken(self, owner: Owner, operation_id: OperationId, digest: int) -> None:
        """One of the digests of what we have is there."""
        want = self._wants[owner[1]]
        self._checks.took(want, owner, operation_id, digest)
        self._judge(want)

    def on_digest_refused(self, owner: Owner, reason: str) -> None:
        """One of them cannot be taken."""
        self._end(self._wants[owner[1]], Outcome.RECEIVE_FAILED, f"integrity: {reason}")

    def beat_items(self, address: InstanceAddress) -> dict[PeerRank, list[RenewItem]]:
        """What to renew with each rank of this peer."""
        wants = [want for want in self._wants.values() if want.address == address]
        return self._renewals(wants)

    def ask_items(self, request_id: RequestId) -> dict[PeerRank, list[RenewItem]]:
        """What to renew for one request, ahead of the next heartbeat."""
        want = self._wants.get(request_id)
        return self._renewals([want] if want is not None else [])

    def address_of(self, request_id: RequestId) -> InstanceAddress | None:
        """Where a request's holder listens; None if the request is over."""
        want = self._wants.get(request_id)
        return want.address if want is not None else None

    def _renewals(self, wants: list[Want]) -> dict[PeerRank, list[RenewItem]]:
        items: dict[PeerRank, list[RenewItem]] = {}
        for want in wants:
            if want.state not in _NOT_RENEWED:
                for link in want.links.values():
                    items.setdefault(link.peer, []).append(self._asks.renewal(want, link))
        return items

    # Steps.

    def _connect(self, want: Want) -> None:
        want.num_connects += 1
        peer = self._space.use_peer(want.address, want.request_id, want.mode)
        if peer is not None and peer.state is PeerState.CONNECTED:
            self._on_connected(want, peer)

    def _await_word(self, want: Want) -> None:
        """While it is queued its holder should say now and then that it has, or will have, this."""
        if want.state is WantState.QUEUED and not want.is_finished:
            self._space.set_timer(
                TimerKind.WANT, want.request_id, self._space.timing.push_registration_timeout
            )

    def _stop_waiting(self, want: Want, reason: str) -> None:
        """A queued prompt may never be finished: with blocks it is found out."""
        if want.state is WantState.QUEUED and not want.is_finished:
            self._space.cancel_timer(TimerKind.WANT, want.request_id)
            self._space.tell(Side.WANT, want.request_id, Outcome.HELD, reason)

    def _await_connection(self, want: Want) -> None:
        """CONNECTING: go on at once if connected, else at the latest fail in time."""
        self._space.set_timer(
            TimerKind.WANT, want.request_id, 1.5 * self._space.timing.handshake_timeout_s
        )
        peer = self._space.peers.get(want.address)
        if peer is None:
            # The early connection had failed or was given up: one more try, now that it matters.
            peer = self._space.use_peer(want.address, want.request_id, want.mode)
            if peer is None:
                self._end(want, Outcome.RECEIVE_FAILED, self._space.refuse_peer(want.address))
        elif peer.state is PeerState.CONNECTED:
            self._on_connected(want, peer)

    def _on_connected(self, want: Want, peer: Peer) -> None:
        if not want.links:
            want.links = {
                rank: Link(
                    peer.rank(rank),
                    peer.routes_to_us.get(rank, ()),
                    consumers,
                    want.offer,
                    epoch=first_epoch(want.intent.binding),
                    asked_epoch=first_epoch(want.intent.binding),
                )
                for rank, consumers in peer.consumers.items()
                if self._space.me.rank in consumers
            }
            self._space.set_timer(TimerKind.ASK, want.request_id, 0.0)
        if want.state is WantState.PARTING:
            self._let_go(want, read=False)
            self._release(want, WantEvent.ENDED_QUIET)
        elif want.state is WantState.CONNECTING:
            if _is_outdated(want, peer) and not want.rechecked:
                # Either the reference is older than the connection, or the connection than the
                # reference: ask who lives there now.
                want.rechecked = True
                self._space.shake_again(want.address, want.mode)
                return
            problem = _mismatch(want, peer)
            if self._checks.enabled and not peer.gives_digests:
                problem = (
                    "integrity: the prefill instance gives no digests, so nothing can be compared; "
                    "update it, or turn kv_integrity off here"
                )
            if problem:
                cause = Cause.RESTARTED if _is_outdated(want, peer) else None
                self._end(want, Outcome.RECEIVE_FAILED, problem, cause)
            else:
                want.written_to = self._should_be_written_to(want, peer)
                if want.reads and want.offer is not None:
                    self._read(want)
                else:
                    self._register(want)

    def _should_be_written_to(self, want: Want, peer: Peer) -> bool:
        """Whether a pull goes faster if the holder writes: then it can pack scattered blocks."""
        if want.mode is TransferMode.PUSH:
            return True
        if want.offer is None or TransferMode.PUSH not in peer.modes:
            return False
        return any(
            self._prefers_write(self._asks.read_command(want, link, route))
            for link in want.sources
            for route in link.routes
        )

    def _register(self, want: Want) -> None:
        want.advance(WantEvent.REGISTRATION_SENT)
        self._space.set_timer(
            TimerKind.WANT, want.request_id, self._space.timing.push_registration_timeout
        )
        for link in want.sources:
            link.expect(want.span)
            link.may_write = not want.reads
            link.fenced = False
            self._asks.register(want, link)
        self._space.set_timer(TimerKind.RESEND, want.request_id, self._space.timing.resend_s)
        self._space.watch(want.address)

    def _read(self, want: Want) -> None:
        want.advance(WantEvent.READ_POSTED)
        self._space.set_timer(
            TimerKind.WANT, want.request_id, self._space.timing.transfer_timeout_s
        )
        # Asked before the first byte is read: the answer proves that the hold stood all along.
        self._space.set_timer(TimerKind.ASK, want.request_id, 0.0)
        for link in want.sources:
            self._asks.read(want, link)
            if self._checks.enabled:
                # Summed up there while it is read.
                link.check = None
                self._checks.ask(want, link)
        self._space.watch(want.address)

    def _prove(self, want: Want) -> None:
        """A READ counts only if every holder still held the KV when it had ended, and in the very
        blocks that were read."""
        if all(
            link.confirmed and link.proven_until >= want.read_completed_at for link in want.sources
        ):
            self._check_or_receive(want, WantEvent.PROVEN)

    def _check_or_receive(self, want: Want, event: WantEvent) -> None:
        """All has come. Is it what its holders have?"""
        if not self._checks.enabled:
            self._receive(want, event)
            return
        want.advance(WantEvent.CHECK_BEGUN)
        timing = self._space.timing
        self._space.set_timer(TimerKind.WANT, want.request_id, timing.transfer_timeout_s)
        self._space.set_timer(TimerKind.RESEND, want.request_id, timing.resend_s)
        self._checks.begin(want)
        self._judge(want)

    def _judge(self, want: Want) -> None:
        """Accept what has come, have it sent again, or give it up; once both sides have told."""
        verdict = self._checks.verdict(want) if want.state is WantState.CHECKING else None
        if verdict is None:
            return
        self._space.cancel_timer(TimerKind.RESEND, want.request_id)
        if not verdict.differing:
            self._receive(want, WantEvent.AGREED)
        elif not self._repairs.mend(want, verdict.differing, verdict.reason):
            self._end(want, Outcome.RECEIVE_FAILED, verdict.reason)

    def _receive(self, want: Want, event: WantEvent) -> None:
        self._space.tell(
            Side.WANT, want.request_id, Outcome.RECEIVED, continuation=want.continuation
        )
        # A written-to holder rank knows by itself, unless it waits for our check; one that we READ
        # from or only free does not.
        self._let_go(want, read=want.reads or self._checks.enabled)
        self._release(want, event)

    def _part(self, want: Want) -> None:
        """No blocks were handed over; only the holder must learn that it may let go."""
        want.advance(WantEvent.NOT_NEEDED)
        self._space.set_timer(
            TimerKind.WANT, want.request_id, self._space.timing.handshake_timeout_s
        )
        peer = self._space.peers.get(want.address)
        if peer is None:
            self._release(want, WantEvent.ENDED_QUIET)
        elif peer.state is PeerState.CONNECTED:
            self._on_connected(want, peer)

    def _reconnect(self, want: Want, reason: str) -> None:
        """The peer was replaced before it knew of us: try its successor, once."""
        if want.num_connects >= _MAX_CONNECTS:
            self._end(want, Outcome.RECEIVE_FAILED, reason)
            return
        want.links = {}
        want.advance(WantEvent.PEER_REPLACED)
        self._space.cancel_timer(TimerKind.RESEND, want.request_id)
        want.num_connects += 1
        self._await_connection(want)

    def _end(
        self, want: Want, outcome: Outcome | None, reason: str, cause: Cause | None = None
    ) -> None:
        """The KV will not come, or is not wanted; None where the engine needs no outcome."""
        want.gave_up = True
        if outcome is not None:
            self._space.tell(Side.WANT, want.request_id, outcome, reason, cause=cause)
        if want.may_be_served or not want.reads:
            for link in want.sources:
                self._asks.cancel(want, link)
        self._let_go(want, read=False)
        if want.quiet_remotely and self._quiet_locally(want):
            self._release(want, WantEvent.ENDED_QUIET)
            return
        want.advance(WantEvent.ENDED_IN_FLIGHT)
        self._space.note(want.request_id, "quarantined", reason=reason)
        self._space.set_timer(
            TimerKind.WANT, want.request_id, self._space.timing.quarantine_limit_s
        )
        self._space.set_timer(TimerKind.RESEND, want.request_id, self._space.timing.resend_s)

    def _give_back_if_fenced(self, want: Want) -> None:
        if want.state is WantState.RECALLING and all(link.fenced for link in want.sources):
            self._give_back(want)

    def _give_back(self, want: Want) -> None:
        """The engine has asked for the blocks, and nobody can touch them: it waits for others."""
        block_ids = want.block_ids
        want.advance(WantEvent.BLOCKS_RETURNED)
        want.unreserve()
        self._space.cancel_timer(TimerKind.WANT, want.request_id)
        self._space.cancel_timer(TimerKind.RESEND, want.request_id)
        self._await_word(want)
        self._space.tell(Side.WANT, want.request_id, Outcome.RECALLED, block_ids=block_ids)

    def _release_if_quiet(self, want: Want) -> None:
        if (
            want.state is WantState.QUARANTINED
            and want.quiet_remotely
            and self._quiet_locally(want)
        ):
            self._release(want, WantEvent.QUIESCED)

    def _release(self, want: Want, event: WantEvent) -> None:
        """Give the blocks back: the only place where a wanter does."""
        self._checks.drop(want)
        had_blocks = want.state not in _BEFORE_BLOCKS
        want.advance(event)
        del self._wants[want.request_id]
        self._space.cancel_timer(TimerKind.WANT, want.request_id)
        self._space.cancel_timer(TimerKind.RESEND, want.request_id)
        self._space.leave_peer(want.address, want.request_id)
        if had_blocks:
            self._space.tell(Side.WANT, want.request_id, Outcome.RELEASED, block_ids=want.block_ids)
        else:
            self._space.note(want.request_id, "dropped")

    def _on_overdue(self, request_id: RequestId) -> None:
        want = self._wants[request_id]
        if want.state is WantState.PARTING:
            self._release(want, WantEvent.ENDED_QUIET)
        elif want.state is WantState.QUEUED:
            self._stop_waiting(want, _TIMEOUT_REASONS[want.state])
        elif want.state is WantState.QUARANTINED:
            self._space.counts[Counted.QUARANTINES_EXPIRED] += 1
            for link in want.links.values():
                link.may_write = False
                for operation_id in self._space.flights.of(want.owner(link)):
                    self._space.emit(Abandon(operation_id))
                    self._space.flights.land(operation_id)
            self._release(want, WantEvent.QUIESCED)
        else:
            self._end(want, Outcome.RECEIVE_FAILED, _TIMEOUT_REASONS[want.state])

    def _on_resend(self, request_id: RequestId) -> None:
        want = self._wants[request_id]
        if want.registered:
            self._space.counts[Counted.REGISTRATIONS_RESENT] += 1
            for link in want.sources:
                if not link.acknowledged:
                    self._asks.register(want, link)
        elif want.state is WantState.CHECKING:
            self._checks.ask_again(want)
        elif want.state is WantState.RECALLING:
            for link in want.sources:
                if not link.fenced:
                    self._asks.cancel(want, link, for_now=True)
        elif want.state is WantState.PROVING:
            # The question or its answer was lost, or the hold had yet to be told to its holder.
            self._space.set_timer(TimerKind.ASK, request_id, 0.0)
        elif want.state is WantState.QUARANTINED and not want.reads:
            for link in want.sources:
                if link.may_write:
                    self._asks.cancel(want, link)
        else:
            return
        self._space.set_timer(TimerKind.RESEND, request_id, self._space.timing.resend_s)

    # Answers.

    def _let_go(self, want: Want, *, read: bool) -> None:
        """Free the holder ranks that do not know by themselves that we need nothing more.

        Where another may follow us, they must know whether we have it or have given up.
        """
        for link in want.links.values():
            if link.refused:
                # It may be somebody else's, and not ours to end.
                continue
            reads = want.reads and not want.may_be_served
            checked = read and want.state is WantState.CHECKING
            if reads or checked or not link.routes or want.state is WantState.PARTING:
                if want.gave_up and want.may_be_followed:
                    self._asks.cancel(want, link)
                else:
                    self._asks.let_go(want, link, read=read)

    def _match(self, peer: PeerRank, request_id: str) -> tuple[Want | None, Link | None]:
        """The want a message is about, and its link, if it comes from the matched life."""
        want = self._wants.get(RequestId(request_id))
        link = want.links.get(peer.rank) if want else None
        return (want, link) if link is not None and link.peer == peer else (None, None)

    def _quiet_locally(self, want: Want) -> bool:
        return all(self._space.flights.quiet(want.owner(link)) for link in want.links.values())

    def _ignore(self) -> None:
        self._space.counts[Counted.MESSAGES_IGNORED] += 1


def _expected(want: Want, link: Link, message: Landed) -> Coverage | None:
    """What is to come of the tiles' route; None if the tiles are foreign or of an older epoch."""
    if message.route >= len(link.coverage) or not _is_current(want, link, message.epoch):
        return None
    return link.coverage[message.route]


def _is_current(want: Want, link: Link, epoch: int) -> bool:
    """False for an older epoch. With a newer one all that has landed from this rank is void."""
    if epoch > link.epoch:
        link.epoch = epoch
        link.may_write = True
        link.expect(want.span)
    return epoch == link.epoch


def _is_outdated(want: Want, peer: Peer) -> bool:
    """Whether the request names another life of the peer than the connected one."""
    expected = getattr(want.intent, "incarnation", None)
    return expected not in (None, peer.incarnation)


def _mismatch(want: Want, peer: Peer) -> str:
    """Why this connected peer cannot serve this request, or nothing."""
    if want.mode not in peer.modes:
        return f"mode: {want.mode} asked for, {', '.join(sorted(peer.modes))} there"
    if _is_outdated(want, peer):
        return "the other instance was restarted since; its KV is gone"
    if peer.why_not_to_us or want.offer is None:
        return peer.why_not_to_us
    if any(link.refused for link in want.sources):
        return _REFUSED
    problems = (_unusable(want, link, want.offer) for link in want.sources)
    return next(filter(None, problems), "")


def _unusable(want: Want, link: Link, offer: Offer) -> str:
    """Why what a source rank offers cannot be READ, or nothing."""
    if offer.num_tokens is None and any(route.window for route in link.routes):
        return "remote_num_tokens: needed to know where a window's blocks begin, found none"
    if offer.num_tokens is not None and want.span.stop > offer.num_tokens:
        return f"{want.span.stop} tokens are wanted, {offer.num_tokens} were computed"
    return ""
