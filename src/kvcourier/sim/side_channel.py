"""The side channel on virtual time: what `runtime.side_channel` is, without sockets.

Decides who listens where and how a message finds back. Refuses to know when it arrives, which
`network` decides, and what it says.
"""

import functools
from collections.abc import Callable

from kvcourier.core.events import PeerProbed, Sign
from kvcourier.errors import RemoteProtocolError
from kvcourier.ids import InstanceAddress, PeerRank
from kvcourier.runtime.side_channel import identity_of, sender_matches
from kvcourier.sim.faults import Path
from kvcourier.sim.network import Network
from kvcourier.sim.timeline import Timeline

_FIRST_PORT = 40000


class Wire:
    """Everybody's sockets. Ports are taken in order and never again."""

    def __init__(self, timeline: Timeline, network: Network) -> None:
        self._timeline = timeline
        self._network = network
        self._next_port = _FIRST_PORT
        self._stalled: dict[str, list[Callable[[], None]]] = {}
        self.channels: dict[int, SimulatedChannel] = {}
        self.servers: dict[int, SimulatedServer] = {}
        self._places: dict[int, str] = {}

    def open_channel(
        self, place: str, me: PeerRank, wake: Callable[[], None]
    ) -> "SimulatedChannel":
        """A rank's sockets; `wake` is called when something has come."""
        self._next_port += 1
        channel = SimulatedChannel(self, place, self._next_port, me, wake)
        self.channels[channel.port] = channel
        self._places[channel.port] = place
        return channel

    def open_server(
        self, place: str, port: int, answer: Callable[[bytes], bytes]
    ) -> "SimulatedServer":
        """An instance's handshake server, which answers once started."""
        return SimulatedServer(self, place, port, answer)

    def carry(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Have a message arrive as often as it does."""
        for when in self._network.arrivals(Path.SIDE, source, target):
            self._timeline.at(when, lambda: self._arrive(target, arrive))

    def look(self, channel: "SimulatedChannel", port: int, see: Callable[[Sign], None]) -> None:
        """Have a rank see who listens at a port, as soon as that place has answered."""
        place = self._places.get(port)
        if place is None:
            return

        def answer() -> None:
            sign = Sign.RUNS if port in self.channels else Sign.GONE
            self.carry(place, channel.place, lambda: see(sign))

        self.carry(channel.place, place, answer)

    def hang_up(self, channel: "SimulatedChannel") -> None:
        """Everybody who was connected to a rank sees that it has ended."""
        for other in list(self.channels.values()):
            self.carry(
                channel.place, other.place, functools.partial(other.be_hung_up_on, channel.port)
            )

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Have something happen later, whatever the network does."""
        self._timeline.after(seconds, what)

    def stall(self, place: str) -> None:
        """Its process is stopped: what comes waits."""
        self._stalled[place] = []

    def resume(self, place: str) -> None:
        """It goes on."""
        for arrive in self._stalled.pop(place, ()):
            arrive()

    def _arrive(self, target: str, arrive: Callable[[], None]) -> None:
        if target in self._stalled:
            self._stalled[target].append(arrive)
        else:
            arrive()


class SimulatedServer:
    """Answers handshakes at its port."""

    def __init__(self, wire: Wire, place: str, port: int, answer: Callable[[bytes], bytes]) -> None:
        self.port = port
        self.place = place
        self.answer = answer
        self._wire = wire

    def start(self) -> None:
        """Answer from now on."""
        self._wire.servers[self.port] = self

    def close(self) -> None:
        """Answer no more."""
        if self._wire.servers.get(self.port) is self:
            del self._wire.servers[self.port]


class SimulatedChannel:
    """One rank's sockets; see `runtime.side_channel.Channel`.

    What is sent to a socket that nobody has is lost; what a dead process had sent before arrives.
    """

    def __init__(
        self, wire: Wire, place: str, port: int, me: PeerRank, wake: Callable[[], None]
    ) -> None:
        self.port = port
        self.place = place
        self._wire = wire
        self._identity = identity_of(me)
        self._wake = wake
        self._arrived: list[tuple[bytes, bytes]] = []
        self._outgoing: dict[PeerRank, int] = {}
        self._reached_by: dict[bytes, SimulatedChannel] = {}
        self._asked: dict[InstanceAddress, int] = {}
        self._num_asked = 0
        self._answered: list[tuple[InstanceAddress, bytes]] = []
        self._refused: list[tuple[InstanceAddress, str]] = []
        self._broken: list[PeerRank] = []
        self._looking: dict[PeerRank, int] = {}
        self._num_looks = 0
        self._signs: list[PeerProbed] = []

    def wake(self) -> None:
        """See Channel."""
        self._wake()

    def wait(self, timeout_s: float | None) -> None:
        """Nobody waits on virtual time."""

    def messages(self) -> list[tuple[bytes, bytes]]:
        """See Channel."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def is_from(self, identity: bytes, peer: PeerRank) -> bool:
        """See Channel."""
        return sender_matches(identity, peer)

    def connect(self, peer: PeerRank, host: str, port: int) -> None:
        """See Channel."""
        self._outgoing.setdefault(peer, port)
        listener = self._wire.channels.get(port)
        if listener is not None:
            self._wire.carry(self.place, listener.place, lambda: self._reach(port))

    def disconnect(self, peer: PeerRank) -> None:
        """See Channel."""
        self._outgoing.pop(peer, None)

    def send(self, peer: PeerRank, payload: bytes) -> bool:
        """See Channel."""
        port = self._outgoing.get(peer)
        if port is not None:
            listener = self._wire.channels.get(port)
            if listener is not None:
                self._wire.carry(self.place, listener.place, lambda: self._arrive(port, payload))
            return True
        back = self._reached_by.get(identity_of(peer))
        if back is None:
            return False
        self._wire.carry(self.place, back.place, lambda: back._take(b"", payload))
        return True

    def reply(self, identity: bytes, payload: bytes) -> None:
        """See Channel. No operator asks in a world."""

    def ask(self, address: InstanceAddress, payload: bytes) -> None:
        """See Channel."""
        self._num_asked += 1
        self._asked[address] = number = self._num_asked
        self._wire.carry(self.place, address.host, lambda: self._serve(address, number, payload))

    def answers(self) -> list[tuple[InstanceAddress, bytes]]:
        """See Channel."""
        answered, self._answered = self._answered, []
        return answered

    def refusals(self) -> list[tuple[InstanceAddress, str]]:
        """See Channel."""
        refused, self._refused = self._refused, []
        return refused

    def drop(self, address: InstanceAddress) -> None:
        """See Channel."""
        self._asked.pop(address, None)

    def resets(self) -> list[PeerRank]:
        """See Channel."""
        broken, self._broken = self._broken, []
        return broken

    def look_at(self, peer: PeerRank, timeout_s: float) -> None:
        """See Channel. A process that is stopped answers when it goes on; one that has ended, its
        host refuses for it."""
        self._num_looks += 1
        self._looking[peer] = number = self._num_looks
        port = self._outgoing.get(peer, 0)
        self._wire.look(self, port, lambda sign: self._see(peer, number, sign))
        self._wire.after(timeout_s, lambda: self._see(peer, number, Sign.SILENT))

    def signs(self) -> list[PeerProbed]:
        """See Channel."""
        signs, self._signs = self._signs, []
        return signs

    def close(self) -> None:
        """See Channel."""
        if self._wire.channels.pop(self.port, None) is not None:
            self._wire.hang_up(self)

    def be_hung_up_on(self, port: int) -> None:
        """Whoever listened at this port has ended."""
        if self.port in self._wire.channels:
            self._broken += [peer for peer, other in self._outgoing.items() if other == port]
            self._wake()

    def _see(self, peer: PeerRank, number: int, sign: Sign) -> None:
        if self._looking.get(peer) == number and self.port in self._wire.channels:
            del self._looking[peer]
            self._signs.append(PeerProbed(peer, sign))
            self._wake()

    def _reach(self, port: int) -> None:
        listener = self._wire.channels.get(port)
        if listener is not None:
            listener._reached_by[self._identity] = self

    def _arrive(self, port: int, payload: bytes) -> None:
        listener = self._wire.channels.get(port)
        if listener is not None:
            listener._reached_by[self._identity] = self
            listener._take(self._identity, payload)

    def _take(self, identity: bytes, payload: bytes) -> None:
        if self.port in self._wire.channels:
            self._arrived.append((identity, payload))
            self._wake()

    def _serve(self, address: InstanceAddress, number: int, payload: bytes) -> None:
        server = self._wire.servers.get(address.port)
        if server is None:
            self._wire.carry(address.host, self.place, lambda: self._be_refused(address, number))
            return
        try:
            reply = server.answer(payload)
        except RemoteProtocolError:
            return
        self._wire.carry(
            server.place, self.place, lambda: self._be_answered(address, number, reply)
        )

    def _be_refused(self, address: InstanceAddress, number: int) -> None:
        if self._asked.get(address) == number and self.port in self._wire.channels:
            del self._asked[address]
            self._refused.append((address, f"nobody listens at {address}"))
            self._wake()

    def _be_answered(self, address: InstanceAddress, number: int, reply: bytes) -> None:
        if self._asked.get(address) == number and self.port in self._wire.channels:
            del self._asked[address]
            self._answered.append((address, reply))
            self._wake()
