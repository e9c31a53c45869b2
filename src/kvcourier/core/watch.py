"""Whether the peers that transfers wait for still live.

Decides whom to ask for a sign of life, how often, when to look closer, and when a peer counts as
silent. Refuses to know what becomes of its transfers. docs/protocol.md has the reasons.

A silent peer may have stopped, or only the way to it, so what it has posted may still land:
silence ends waiting, and never gives memory back. That takes a proof: `PeerLost`, or another life
that answers at its address.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvcourier.core.commands import Probe, SendMessage, SendNotification
from kvcourier.core.events import Sign
from kvcourier.core.messages import Beat
from kvcourier.core.peers import PeerState
from kvcourier.core.workspace import Counted, TimerKind, Workspace
from kvcourier.ids import InstanceAddress, PeerRank


@dataclass(slots=True)
class _Watched:
    """One peer rank.

    Attributes:
        heard: something has come from it since the last round.
        num_missed: rounds since then in which nothing came. Rounds and not time: one of ours that
            comes late, because our own thread was kept waiting, must not count for many.
        probing: a closer look is under way.
        is_silent: it was given up, and nothing has come from it since.
    """

    address: InstanceAddress
    heard: bool = True
    num_missed: int = 0
    probing: bool = False
    is_silent: bool = False


class Watch:
    """The peer ranks of one rank's live transfers.

    Args:
        needed: the ranks at an address that some live transfer waits for.
        on_silent: told of a peer whose transfers should wait no longer, with the reason.
    """

    def __init__(
        self,
        space: Workspace,
        needed: Callable[[InstanceAddress], set[PeerRank]],
        on_silent: Callable[[InstanceAddress, str], None],
    ) -> None:
        self._space = space
        self._needed = needed
        self._on_silent = on_silent
        self._watched: dict[PeerRank, _Watched] = {}
        self._most_missed = round(space.timing.peer_silence_s / space.timing.beat_s)
        self.on_timer = {TimerKind.WATCH: self._on_round}

    def __len__(self) -> int:
        return len(self._watched)

    def heard(self, peer: PeerRank) -> None:
        """Any message is a sign of life. One from another life at the same engine id is a reason
        to ask who lives there."""
        watched = self._watched.get(peer)
        if watched is not None:
            watched.heard = True
            return
        for other, entry in self._watched.items():
            if (other.engine_id, other.rank) == (peer.engine_id, peer.rank):
                self._look_closer(other, entry)

    def on_beat(self, message: Beat) -> None:
        """A peer asks for a sign of life, or gives one. Whom we ask ourselves needs no answer:
        our own questions are signs enough."""
        peer = message.sender.peer()
        if message.is_question and peer not in self._watched:
            self._space.emit(SendMessage(peer, Beat(self._space.sender, is_question=False)))

    def on_reset(self, peer: PeerRank) -> None:
        """The connection to it broke: a hint, as a living peer's may break too."""
        for each in self._space.peers.all():
            if peer in self._needed(each.address):
                self._look_closer(peer, self._watched.setdefault(peer, _Watched(each.address)))
            elif (each.address.engine_id, each.incarnation) == peer[:2]:
                each.was_reset = True

    def on_probed(self, peer: PeerRank, sign: Sign) -> None:
        """What the closer look has found."""
        watched = self._watched.get(peer)
        if watched is None:
            return
        watched.probing = False
        if peer not in self._needed(watched.address):
            # Its life may be over, and another one at its address be served by now.
            return
        if sign is Sign.RUNS:
            # Its courier has no time to answer, for somebody keeps the interpreter or the cores.
            watched.num_missed = 0
        elif sign is Sign.GONE:
            self._give_up(watched, f"{peer} is gone: nobody listens at its side channel")
            # A process that ends closes its sockets a moment before its memory is gone.
            soon_s = self._space.timing.beat_s / 10
            self._space.set_timer(TimerKind.WATCH, watched.address, soon_s)
        elif watched.num_missed >= self._most_missed - 1:
            silence_s = self._space.timing.peer_silence_s
            self._give_up(watched, f"{peer} has been silent for {silence_s:g} s")

    def _on_round(self, address: InstanceAddress) -> None:
        needed = self._needed(address)
        for peer in [p for p, each in self._watched.items() if each.address == address]:
            if peer not in needed:
                del self._watched[peer]
        if not needed:
            return
        self._space.set_timer(TimerKind.WATCH, address, self._space.timing.beat_s)
        entry = self._space.peers.get(address)
        was_reset = entry is not None and entry.was_reset
        for peer in sorted(needed):
            watched = self._watched.setdefault(peer, _Watched(address))
            self._take_turn(peer, watched)
            if was_reset:
                self._look_closer(peer, watched)
        if entry is not None:
            entry.was_reset = False

    def _take_turn(self, peer: PeerRank, watched: _Watched) -> None:
        watched.num_missed = 0 if watched.heard else watched.num_missed + 1
        watched.is_silent = watched.is_silent and not watched.heard
        watched.heard = False
        beat = Beat(self._space.sender, is_question=True)
        self._space.emit(SendMessage(peer, beat))
        if watched.is_silent:
            # What is kept for it waits for a proof that it is dead, or for a lease.
            self._space.emit(SendNotification(peer, watched.address, beat))
        if watched.num_missed >= self._most_missed - 1 and not watched.is_silent:
            self._look_closer(peer, watched)

    def _look_closer(self, peer: PeerRank, watched: _Watched) -> None:
        """Ask the data path, which may know that it is dead; the sockets of its process, which
        answer also while its courier cannot; and whoever lives at its address."""
        if watched.probing:
            return
        watched.probing = True
        self._space.counts[Counted.PEERS_PROBED] += 1
        beat = Beat(self._space.sender, is_question=True)
        self._space.emit(SendNotification(peer, watched.address, beat))
        self._space.emit(Probe(peer, self._space.timing.beat_s))
        self._shake_again(watched.address)

    def _shake_again(self, address: InstanceAddress) -> None:
        peer = self._space.peers.get(address)
        if peer is not None and peer.state is PeerState.CONNECTED:
            self._space.shake_again(address, min(peer.modes))

    def _give_up(self, watched: _Watched, reason: str) -> None:
        if watched.is_silent:
            return
        watched.is_silent, watched.heard = True, False
        self._space.counts[Counted.PEERS_SILENT] += 1
        self._on_silent(watched.address, reason)
