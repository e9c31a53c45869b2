"""Two instances on one memory network, with what tests of their couriers do to them."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import zmq

from endpoint_rig import WAIT_S, Rig
from kvcourier.config import Limits, PathPolicy, StagingConfig, Timing, TransferMode
from kvcourier.core.handshake import Facts, PeerInstance, facts_of, read_answer, request
from kvcourier.ids import EngineId, Incarnation, InstanceAddress, PeerRank, Rank
from kvcourier.runtime.reports import Outcome
from kvcourier.runtime.side_channel import SideChannel
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate, InFlight, MemoryNetwork, MemoryTransport

SOURCE, TARGET = [5, 0, 3], [6, 1, 4]
STOP = 40
STRANGER = PeerRank(EngineId("x"), Incarnation("life-of-x"), Rank(0, 0))


ONE_PARCEL = StagingConfig(
    path=PathPolicy.PACKED, send_bytes=1 << 17, receive_bytes=1 << 17, slot_bytes=1 << 16
)
"""A prompt of the tests fits into one slot."""


class World:
    """A network, the instances on it, and what tests do with both."""

    def __init__(self, stack: ExitStack, staging: StagingConfig) -> None:
        self.staging = staging
        self.network = MemoryNetwork()
        self.transports: dict[str, MemoryTransport] = {}
        self._stack = stack
        self._serial = itertools.count(1)

    def make_transport(self, name: str) -> MemoryTransport:
        transport = MemoryTransport(self.network, name)
        self.transports[name.split(":")[0]] = transport
        return transport

    def rig(self, engine_id: str, **options: object) -> Rig:
        options.setdefault("transport_factory", self.make_transport)
        options.setdefault("staging", self.staging)
        return self._stack.enter_context(Rig(engine_id, **options))

    def pair(self, **timing: float) -> tuple[Rig, Rig]:
        return tuple(self.rig(name, timing=Timing(**timing)) for name in ("p", "d"))

    def operation(self, mode: str) -> Operation:
        """What ends a transfer: a pull is written as well where it goes packed."""
        reads = mode == "pull" and self.staging.path is PathPolicy.DIRECT
        return Operation.READ if reads else Operation.WRITE

    def plan(self, operation: Operation, fate: Fate) -> None:
        self.network.fault_plan = lambda item: fate if item.operation is operation else Fate.DELIVER

    def plan_all(self, fate: Fate) -> None:
        """Of whatever is tried, as a transfer that has failed is repaired if it can."""
        self.network.fault_plan = lambda item: fate if item.operation else Fate.DELIVER

    def heal(self) -> None:
        self.network.fault_plan = lambda item: Fate.DELIVER

    def held(self, rig: Rig, operation: Operation) -> InFlight:
        """The one held operation, as soon as it is posted."""
        rig.wait_until(lambda: any(item.operation is operation for item in self.network.pending))
        (item,) = [item for item in self.network.pending if item.operation is operation]
        return item

    def channel(self, me: PeerRank = STRANGER) -> SideChannel:
        channel = SideChannel(me, "127.0.0.1", Limits().max_message_bytes)
        self._stack.callback(channel.close)
        return channel

    def stranger(self, rig: Rig) -> "zmq.Socket[bytes]":
        """A socket to an instance's handshake server that sends whatever it is told to."""
        socket = self._stack.enter_context(
            self._stack.enter_context(zmq.Context()).socket(zmq.DEALER)
        )
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        socket.connect(f"tcp://127.0.0.1:{rig.endpoint.instance_info()['side_channel_port']}")
        return socket

    def still_works(self, prefill: Rig, decode: Rig) -> None:
        """A push and a pull with fresh names bring every byte."""
        for mode in ("push", "pull"):
            name = f"again{next(self._serial)}"
            transfer(prefill, decode, mode, name)
            decode.wait_for(f"d-{name}", Outcome.RECEIVED, Outcome.RELEASED)
            prefill.wait_for(f"p-{name}", Outcome.SENT, Outcome.RELEASED)
            assert not decode.wrong(name, TARGET, 0, STOP)
        for rig in (prefill, decode):
            rig.wait_until(lambda rig=rig: tables(rig) == EMPTY)


EMPTY = {"holds": 0, "wants": 0, "waiting_registrations": 0, "operations_in_flight": 0}


def tables(rig: Rig) -> dict[str, int]:
    """Sizes of the core's tables that must be empty when nothing goes on."""
    return {name: sum(g[name] for _, g in rig.endpoint.snapshots().values()) for name in EMPTY}


def counts(rig: Rig) -> Mapping[str, int]:
    """What the core of an instance's first rank has counted."""
    return rig.endpoint.snapshots()["pp0tp0"][0]


def quarantined(rig: Rig) -> int:
    return sum(gauges["quarantined_blocks"] for _, gauges in rig.endpoint.snapshots().values())


def transfer(prefill: Rig, decode: Rig, mode: str, name: str) -> None:
    """Both engines' calls for one prompt."""
    prefill.hold(f"p-{name}", f"t-{name}")
    if mode == "push":
        want(prefill, decode, name)
        prefill.prefill(f"p-{name}", name, SOURCE, STOP)
    else:
        params = prefill.prefill(f"p-{name}", name, SOURCE, STOP)
        decode.expect(f"d-{name}", params)
        decode.receive(f"d-{name}", TARGET, 0, STOP)


def want(prefill: Rig, decode: Rig, name: str, **changes: object) -> None:
    """D's half of a push."""
    coordinates = {**prefill.coordinates(), "transfer_id": f"t-{name}", **changes}
    decode.expect(f"d-{name}", coordinates)
    decode.receive(f"d-{name}", TARGET, 0, STOP)


def outcomes(rig: Rig, request_id: str) -> list[Outcome]:
    return [report.outcome for report in rig.of(request_id)]


def failure(rig: Rig, request_id: str) -> str:
    """Why a receive failed; its blocks are back too, and nothing else is told."""
    rig.wait_for(request_id, Outcome.RECEIVE_FAILED, Outcome.RELEASED)
    assert outcomes(rig, request_id) == [Outcome.RECEIVE_FAILED, Outcome.RELEASED]
    return rig.of(request_id)[0].reason


def dropped(rig: Rig, why: str) -> float:
    labels = {"why": why}
    return rig.endpoint.registry.get_sample_value("kvcourier_dropped_messages_total", labels) or 0


def describe(rig: Rig, channel: SideChannel) -> tuple[InstanceAddress, PeerInstance]:
    """Shake hands as a stranger would."""
    info = rig.endpoint.instance_info()
    address = InstanceAddress(info["engine_id"], "127.0.0.1", info["side_channel_port"])
    facts = facts_for(rig)
    channel.ask(address, request(address.engine_id, TransferMode.PUSH, facts))
    answers: list[tuple[InstanceAddress, bytes]] = []

    def answered() -> bool:
        answers.extend(channel.answers())
        return bool(answers)

    rig.wait_until(answered)
    return address, read_answer(answers[0][1], address.engine_id, facts, Limits())


def facts_for(rig: Rig) -> Facts:
    return facts_of("test-model", {r: (cache.geometry,) for r, (cache, _) in rig.caches.items()})


def inbox_of(world: World, rig: Rig, me: PeerRank = STRANGER) -> Callable[[bytes], None]:
    """A way to send anything to the first rank of an instance."""
    channel = world.channel(me)
    address, instance = describe(rig, channel)
    rank = Rank(0, 0)
    peer = PeerRank(instance.engine_id, instance.incarnation, rank)
    channel.connect(peer, address.host, instance.ranks[rank].side_channel_port)

    def send(payload: bytes) -> None:
        assert channel.send(peer, payload)

    return send
