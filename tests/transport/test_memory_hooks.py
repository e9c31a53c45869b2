"""The hooks of the memory network: what each does to bytes, notices and errors."""

import threading
from dataclasses import dataclass

import pytest

from kvcourier.errors import LocalProtocolError, PeerLost, PostFailed
from kvcourier.ids import AgentName
from kvcourier.transport.interface import (
    Notification,
    Operation,
    TransferHandle,
    TransferState,
    TransferStatus,
)
from kvcourier.transport.memory import Fate, InFlight, MemoryNetwork, MemoryTransport
from transport.ends import Ends, Memory

_PIECES = 8
_PIECE = 64
_SIZE = _PIECES * _PIECE
_IN_FLIGHT = TransferStatus(TransferState.IN_FLIGHT)
_DONE = TransferStatus(TransferState.DONE)


@dataclass
class World:
    network: MemoryNetwork
    a: MemoryTransport
    b: MemoryTransport
    source: Memory
    target: Memory

    def post(self, operation: Operation = Operation.WRITE, notice: bytes = b"") -> TransferHandle:
        offsets, sizes = list(range(0, _SIZE, _PIECE)), [_PIECE] * _PIECES
        return self.a.post(
            operation,
            self.b.agent_name,
            local=self.source.descriptors(offsets, sizes),
            remote=self.target.descriptors(offsets, sizes),
            notice=notice,
        )

    def num_landed(self) -> int:
        """Leading pieces at the target that equal the source; the rest must be untouched."""
        equal = (self.source.data == self.target.data).reshape(_PIECES, _PIECE).all(axis=1)
        count = int(equal.argmin()) if not equal.all() else _PIECES
        assert not self.target.data[count * _PIECE :].any()
        return count

    def payloads(self) -> list[bytes]:
        return [n.payload for n in self.b.notifications()]


def _world(network: MemoryNetwork) -> World:
    a, b = MemoryTransport(network, "a"), MemoryTransport(network, "b")
    world = World(network, a, b, Memory(_SIZE, seed=1), Memory(_SIZE))
    a.register([world.source.region])
    b.register([world.target.region])
    a.connect(b.agent_metadata())
    b.connect(a.agent_metadata())
    return world


@pytest.fixture
def world() -> World:
    return _world(MemoryNetwork())


@pytest.fixture
def manual() -> World:
    return _world(MemoryNetwork(manual=True))


def _plan(world: World, fate: Fate, *, of_notifications: bool) -> None:
    def plan(item: InFlight) -> Fate:
        return fate if item.is_notification is of_notifications else Fate.DELIVER

    world.network.fault_plan = plan


# Automatic delivery


def test_bytes_land_at_the_next_poll_and_not_before(world: World) -> None:
    handle = world.post()
    assert world.num_landed() == 0
    assert world.a.poll(handle) == _DONE
    assert world.num_landed() == _PIECES


def test_a_notice_waits_for_the_initiators_poll(world: World) -> None:
    handle = world.post(notice=b"there")
    assert world.payloads() == []
    assert world.num_landed() == _PIECES
    assert world.a.poll(handle) == _DONE
    assert world.payloads() == [b"there"]


# Manual delivery


def test_nothing_moves_by_itself_in_a_manual_network(manual: World) -> None:
    handle = manual.post(notice=b"there")
    manual.a.notify(AgentName("b"), b"alone")
    assert manual.a.poll(handle) == _IN_FLIGHT
    assert manual.payloads() == [] and manual.num_landed() == 0
    manual.network.deliver()
    assert manual.a.poll(handle) == _DONE
    assert manual.payloads() == [b"alone", b"there"] and manual.num_landed() == _PIECES
    assert manual.network.pending == ()


def test_a_write_can_stop_in_the_middle(manual: World) -> None:
    handle = manual.post(notice=b"there")
    (item,) = manual.network.pending
    assert manual.network.deliver(item, pieces=3) == 3
    assert manual.num_landed() == item.num_landed == 3
    assert manual.a.poll(handle) == _IN_FLIGHT
    manual.network.deliver(pieces=1)
    assert manual.num_landed() == 4
    manual.network.deliver(item)
    assert manual.a.poll(handle) == _DONE and manual.num_landed() == _PIECES
    assert manual.payloads() == []  # the notice is on its own way
    manual.network.deliver()
    assert manual.payloads() == [b"there"]


def test_landed_pieces_are_recorded_in_order(manual: World) -> None:
    manual.post()
    manual.network.deliver(pieces=2)
    manual.post(Operation.READ)
    manual.network.deliver()
    landed = manual.network.landed
    assert [piece.sequence for piece in landed] == list(range(2 * _PIECES))
    assert {piece.initiator for piece in landed} == {"a"}
    writes, reads = landed[:_PIECES], landed[_PIECES:]
    for pieces, agent, memory in ((writes, "b", manual.target), (reads, "a", manual.source)):
        assert [(p.agent, p.address, p.size_bytes) for p in pieces] == [
            (agent, memory.address + i * _PIECE, _PIECE) for i in range(_PIECES)
        ]


def test_reordering_changes_the_order_of_arrival(manual: World) -> None:
    for payload in (b"1", b"2", b"3"):
        manual.a.notify(AgentName("b"), payload)
    manual.network.reorder(lambda item: -int(item.payload))
    manual.network.deliver()
    assert manual.payloads() == [b"3", b"2", b"1"]


def test_what_has_arrived_cannot_be_delivered_again(manual: World) -> None:
    manual.a.notify(AgentName("b"), b"x")
    (item,) = manual.network.pending
    manual.network.deliver(item)
    with pytest.raises(LocalProtocolError, match="not under way"):
        manual.network.deliver(item)


def test_an_operation_failed_halfway_keeps_what_landed(manual: World) -> None:
    handle = manual.post(notice=b"there")
    (item,) = manual.network.pending
    manual.network.deliver(item, pieces=3)
    manual.network.fail(item, peer_lost=True)
    status = manual.a.poll(handle)
    assert status.state is TransferState.FAILED and status.peer_lost and status.reason
    manual.network.deliver()
    assert manual.num_landed() == 3 and manual.payloads() == []


# Fates


def test_a_held_operation_lands_when_it_is_named_even_after_release(world: World) -> None:
    _plan(world, Fate.HOLD, of_notifications=False)
    handle = world.post()
    assert world.a.poll(handle) == _IN_FLIGHT
    world.network.deliver()
    assert world.num_landed() == 0
    world.a.release(handle)  # no fence
    world.network.deliver(*world.network.pending)
    assert world.num_landed() == _PIECES


def test_a_held_notice_arrives_when_it_is_named(world: World) -> None:
    _plan(world, Fate.HOLD, of_notifications=True)
    assert world.a.poll(world.post(notice=b"there")) == _DONE
    assert world.payloads() == []
    world.network.deliver(*world.network.pending)
    assert world.payloads() == [b"there"]


@pytest.mark.parametrize("of_notifications", [False, True])
def test_refused(world: World, of_notifications: bool) -> None:
    _plan(world, Fate.REFUSE, of_notifications=of_notifications)
    if of_notifications:
        with pytest.raises(PeerLost):
            world.a.notify(AgentName("b"), b"x")
    else:
        with pytest.raises(PostFailed):
            world.post()
    assert world.network.pending == () and world.num_landed() == 0


def test_failed(world: World) -> None:
    _plan(world, Fate.FAIL, of_notifications=False)
    status = world.a.poll(world.post(notice=b"there"))
    assert status.state is TransferState.FAILED and not status.peer_lost and status.reason
    assert world.num_landed() == 0 and world.payloads() == []


@pytest.mark.parametrize("fate", [Fate.DROP, Fate.REFUSE, Fate.FAIL])
def test_a_lost_notice_leaves_the_bytes(world: World, fate: Fate) -> None:
    _plan(world, fate, of_notifications=True)
    assert world.a.poll(world.post(notice=b"there")) == _DONE
    assert world.num_landed() == _PIECES and world.payloads() == []


def test_a_dropped_operation_never_ends_until_its_peer_does(world: World) -> None:
    _plan(world, Fate.DROP, of_notifications=False)
    handle = world.post()
    for _ in range(3):
        assert world.a.poll(handle) == _IN_FLIGHT
    world.network.kill(AgentName("b"))
    assert world.a.poll(handle).peer_lost
    assert world.num_landed() == 0


def test_a_doubled_notification_arrives_twice(world: World) -> None:
    _plan(world, Fate.DUPLICATE, of_notifications=True)
    world.a.notify(AgentName("b"), b"x")
    assert world.payloads() == [b"x", b"x"]
    assert world.network.pending == ()


def test_a_doubled_operation_lands_twice(world: World) -> None:
    _plan(world, Fate.DUPLICATE, of_notifications=False)
    assert world.a.poll(world.post(notice=b"there")) == _DONE
    assert len(world.network.landed) == 2 * _PIECES
    assert world.payloads() == [b"there", b"there"]
    assert world.network.pending == ()


# Peers that die or stop


def test_a_killed_peer_is_lost_to_all_and_keeps_its_last_bytes(manual: World) -> None:
    handle = manual.post(notice=b"there")
    manual.network.deliver(pieces=3)
    manual.network.kill(AgentName("b"))
    assert manual.a.poll(handle).peer_lost
    with pytest.raises(PeerLost):
        manual.post()
    with pytest.raises(PeerLost):
        manual.a.notify(AgentName("b"), b"x")
    manual.network.deliver()
    assert manual.num_landed() == 3


def test_what_a_killed_peer_had_sent_is_lost(manual: World) -> None:
    handle = manual.post()
    manual.a.notify(AgentName("b"), b"x")
    manual.network.kill(AgentName("a"))
    manual.network.deliver()
    assert manual.num_landed() == 0 and manual.payloads() == []
    assert manual.a.poll(handle).peer_lost  # its thread may still run
    with pytest.raises(PeerLost):
        manual.a.notify(AgentName("b"), b"x")


def test_a_killed_peers_name_can_be_taken_again(world: World) -> None:
    stale = world.b.agent_metadata()
    world.network.kill(AgentName("b"))
    again = MemoryTransport(world.network, "b")
    world.b.close()  # the old life must not take the new one down
    world.a.disconnect(AgentName("b"))
    world.a.connect(stale)
    with pytest.raises(PeerLost):
        world.a.notify(AgentName("b"), b"x")
    world.a.disconnect(AgentName("b"))
    world.a.connect(again.agent_metadata())
    world.a.notify(AgentName("b"), b"x")
    assert again.notifications() == [Notification(AgentName("a"), b"x")]


def test_two_agents_cannot_have_one_name(world: World) -> None:
    with pytest.raises(LocalProtocolError, match="in use"):
        MemoryTransport(world.network, "a")


def test_a_stalled_peer_gets_everything_when_it_resumes(world: World) -> None:
    world.a.notify(AgentName("b"), b"before")
    world.a.notifications()  # arrived, not yet taken
    world.network.stall(AgentName("b"))
    handle = world.post(notice=b"there")
    world.a.notify(AgentName("b"), b"x")
    assert world.a.poll(handle) == _IN_FLIGHT
    assert world.payloads() == [] and world.num_landed() == 0
    world.network.deliver(*world.network.pending)
    assert world.num_landed() == 0
    world.network.resume(AgentName("b"))
    assert world.a.poll(handle) == _DONE
    assert world.payloads() == [b"before", b"x", b"there"] and world.num_landed() == _PIECES


# Threads


def test_two_threads_share_a_network() -> None:
    network = MemoryNetwork()
    ours = _world(network)
    back = World(network, ours.b, ours.a, Memory(_SIZE, seed=2), Memory(_SIZE))
    back.a.register([back.source.region])
    back.b.register([back.target.region])
    back.a.connect(back.b.agent_metadata())
    rounds = 200
    received: dict[str, list[bytes]] = {}
    failures: list[BaseException] = []

    def exchange(world: World) -> None:
        try:
            ends = Ends(world.a)
            for number in range(rounds):
                handle = world.post(notice=str(number).encode())
                assert world.a.poll(handle) == _DONE
                world.a.release(handle)
            ends.until(lambda: len(ends.payloads(world.a)) == rounds)
            received[world.a.agent_name] = ends.payloads(world.a)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=exchange, args=(world,)) for world in (ours, back)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    expected = [str(number).encode() for number in range(rounds)]
    assert received == {"a": expected, "b": expected}
    assert ours.num_landed() == back.num_landed() == _PIECES
    assert [p.sequence for p in network.landed] == list(range(2 * rounds * _PIECES))
