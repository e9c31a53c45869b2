"""How a want comes to be connected with its holder's instance, and what it loses with that.

Decides when to connect, whether the instance that answers is the one that is meant and can serve
the request, and whether a want outlives its peer. Refuses to know what comes over the connection.
"""

from kvcourier.core.bindings import first_epoch
from kvcourier.core.checks import Checks
from kvcourier.core.lifecycle import WantEvent, WantState
from kvcourier.core.outcomes import NOT_AS_REQUESTED, Cause
from kvcourier.core.peers import Peer, PeerState
from kvcourier.core.receipts import Receipts
from kvcourier.core.want_endings import WantEndings
from kvcourier.core.wants import Link, Want
from kvcourier.core.words import Words
from kvcourier.core.workspace import TimerKind, Workspace
from kvcourier.ids import Rank

_MAX_CONNECTS = 2


class Connections:
    """The wants of one rank and their peers."""

    def __init__(
        self,
        space: Workspace,
        words: Words,
        checks: Checks,
        receipts: Receipts,
        endings: WantEndings,
    ) -> None:
        self._space = space
        self._words = words
        self._checks = checks
        self._receipts = receipts
        self._endings = endings

    def begin(self, want: Want) -> None:
        """Connect early, while it waits for blocks."""
        want.num_connects += 1
        peer = self._space.use_peer(want.address, want.request_id, want.mode)
        if peer is not None and peer.state is PeerState.CONNECTED:
            self.on_connected(want, peer)

    def require(self, want: Want) -> None:
        """CONNECTING: go on at once if connected, else at the latest fail in time."""
        self._space.set_timer(
            TimerKind.WANT, want.request_id, 1.5 * self._space.timing.handshake_timeout_s
        )
        peer = self._space.peers.get(want.address)
        if peer is None:
            # The early connection had failed or was given up: one more try, now that it matters.
            peer = self._space.use_peer(want.address, want.request_id, want.mode)
            if peer is None:
                self._endings.fail(want, self._space.refuse_peer(want.address))
        elif peer.state is PeerState.CONNECTED:
            self.on_connected(want, peer)

    def part(self, want: Want) -> None:
        """No blocks were handed over; only the holder must learn that it may let go."""
        want.advance(WantEvent.NOT_NEEDED)
        self._space.set_timer(
            TimerKind.WANT, want.request_id, self._space.timing.handshake_timeout_s
        )
        peer = self._space.peers.get(want.address)
        if peer is None:
            self._endings.drop(want)
        elif peer.state is PeerState.CONNECTED:
            self.on_connected(want, peer)

    def on_connected(self, want: Want, peer: Peer) -> None:
        """It answers: go on with what has waited for that."""
        if not want.links:
            want.links = self._links(want, peer)
            self._space.set_timer(TimerKind.ASK, want.request_id, 0.0)
        if want.state is WantState.PARTING:
            self._endings.part(want)
        elif want.state is WantState.CONNECTING:
            self._go_on(want, peer)

    def on_failed(self, want: Want, reason: str) -> None:
        """It does not answer: whoever needs it now fails."""
        if want.state is WantState.CONNECTING:
            self._endings.fail(want, reason)
        elif want.state is WantState.PARTING:
            self._endings.drop(want)
        else:
            self._words.stop_waiting(want, reason)

    def on_lost(self, want: Want, reason: str) -> None:
        """That life is over: it writes no more, and holds nothing."""
        for link in want.links.values():
            link.may_write = False
        acknowledged = any(link.acknowledged for link in want.links.values())
        if want.state is WantState.REGISTERING and not acknowledged:
            self._reconnect(want, reason)
        elif want.state is WantState.QUARANTINED:
            self._endings.release_if_quiet(want)
        elif want.state is WantState.PARTING:
            self._endings.drop(want)
        elif want.state in (WantState.QUEUED, WantState.CONNECTING):
            want.links = {}
            self._words.stop_waiting(want, reason)
        else:
            self._endings.fail(want, reason, Cause.RESTARTED)

    def _links(self, want: Want, peer: Peer) -> dict[Rank, Link]:
        """One for each rank that has something for us, or that we have to free."""
        epoch = first_epoch(want.intent.binding)
        return {
            rank: Link(
                peer.rank(rank),
                peer.routes_to_us.get(rank, ()),
                consumers,
                want.offer,
                epoch=epoch,
                asked_epoch=epoch,
            )
            for rank, consumers in peer.consumers.items()
            if self._space.me.rank in consumers
        }

    def _go_on(self, want: Want, peer: Peer) -> None:
        """It has blocks, and its peer is here."""
        if _is_outdated(want, peer) and not want.rechecked:
            # Either the reference is older than the connection, or the connection than the
            # reference: ask who lives there now.
            want.rechecked = True
            self._space.shake_again(want.address, want.mode)
            return
        problem = self._problem(want, peer)
        if problem:
            self._endings.fail(want, problem, Cause.RESTARTED if _is_outdated(want, peer) else None)
        else:
            self._receipts.begin(want, peer)

    def _problem(self, want: Want, peer: Peer) -> str:
        """Why this connected peer cannot serve this request, or nothing."""
        if self._checks.enabled and not peer.gives_digests:
            return (
                "integrity: the prefill instance gives no digests, so nothing can be compared; "
                "update it, or turn kv_integrity off here"
            )
        if want.mode not in peer.modes:
            return f"mode: {want.mode} asked for, {', '.join(sorted(peer.modes))} there"
        if _is_outdated(want, peer):
            return "the other instance was restarted since; its KV is gone"
        offer = want.offer
        if peer.why_not_to_us or offer is None:
            return peer.why_not_to_us
        if any(link.refused for link in want.sources):
            return NOT_AS_REQUESTED
        problems = (offer.why_unusable(want.span, link.routes) for link in want.sources)
        return next(filter(None, problems), "")

    def _reconnect(self, want: Want, reason: str) -> None:
        """The peer was replaced before it knew of us: try its successor, once."""
        if want.num_connects >= _MAX_CONNECTS:
            self._endings.fail(want, reason)
            return
        want.links = {}
        want.advance(WantEvent.PEER_REPLACED)
        self._space.cancel_timer(TimerKind.RESEND, want.request_id)
        want.num_connects += 1
        self.require(want)


def _is_outdated(want: Want, peer: Peer) -> bool:
    """Whether the request names another life of the peer than the connected one."""
    expected = getattr(want.intent, "incarnation", None)
    return expected not in (None, peer.incarnation)
