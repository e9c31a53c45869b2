"""Random lives of the packed path: nodes that send to and receive from each other.

Messages come late, twice, in another order or never, some of them only after all is over; peers
name wrong slots; writes fail with or without their notice; requests are abandoned and forgotten,
nodes restart, time passes. At the end of each run the faults stop: then every stream must end and
every slot be free.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcourier.core.packing.actions import (
    Gather,
    Scatter,
    SendClose,
    SendGrant,
    SendOpen,
    SendRefusal,
    StreamEnded,
    StreamLanded,
    Write,
)
from kvcourier.core.packing.receiver import Receiver
from kvcourier.core.packing.sender import Sender
from kvcourier.ids import EngineId, Incarnation, PeerRank, Rank, RequestId

SLOT_LIMIT_S = 2000.0
LIFE_S = 300.0
"""After it the core abandons a stream, and a gather or write has ended: far below the limit."""


@dataclass(eq=False)
class Item:
    """Something under way. Messages can be lost and doubled; work always ends."""

    arrive: Callable[[], None]
    since: float
    stream: int
    message: bool = False
    fail: Callable[[bool], None] | None = None


@dataclass(eq=False)
class Node:
    name: PeerRank
    own_slots: int
    ring_slots: int
    sender: Sender
    receiver: Receiver
    ring: dict = field(default_factory=dict)
    read: set = field(default_factory=set)
    alive: bool = True


class World:
    """All nodes, and what is under way between them."""

    def __init__(self, sizes):
        self.now = 0.0
        self.items: list[Item] = []
        self.kept: list[Item] = []  # doubles that come when the stream may be long over
        self.nodes: list[Node] = []
        self.streams = {}  # stream -> (node, peer, num_parcels, opened)
        self.ended = {}
        self.scattered = Counter()
        self.granted = {}  # (stream, parcel) -> the slot its receiver has named
        self.told = {}  # the same, of grants that have reached the sender
        self.landed = set()
        self.flying = {}  # (node, ring slot) -> the parcel that may still land there
        self.forgotten = set()
        self.lives = 0
        for own_slots, ring_slots in sizes:
            self.nodes.append(self.start(own_slots, ring_slots))

    def start(self, own_slots, ring_slots):
        self.lives += 1
        name = PeerRank(EngineId("e"), Incarnation(str(self.lives)), Rank(0, 0))
        sender = Sender(own_slots, patience_s=10.0, stall_limit_s=60.0)
        receiver = Receiver(ring_slots, max_streams=4, slot_limit_s=SLOT_LIMIT_S)
        return Node(name, own_slots, ring_slots, sender, receiver)

    def find(self, name):
        return next((node for node in self.nodes if node.name == name), None)

    def open(self, node, peer, num_parcels):
        stream = len(self.streams)
        self.streams[stream] = (node, peer, num_parcels, self.now)
        self.run(node, node.sender.open(stream, peer.name, num_parcels, peer.ring_slots, self.now))
        return stream

    def owner(self, stream):
        return RequestId(f"r{stream}")

    def forget(self, stream):
        _, peer, _, _ = self.streams[stream]
        self.forgotten.add(self.owner(stream))
        self.run(peer, peer.receiver.forget(self.owner(stream), self.now))

    def abandon(self, stream):
        node = self.streams[stream][0]
        if node.alive:
            self.run(node, node.sender.abandon(stream, "cancelled", self.now))

    def run(self, node, actions):
        node.sender.check()
        node.receiver.check()
        for action in actions:
            getattr(self, f"do_{type(action).__name__}")(node, action)

    def send(self, node, peer_name, stream, handle):
        def arrive():
            peer = self.find(peer_name)
            if peer is not None and node.alive:
                self.run(peer, handle(peer))

        self.items.append(Item(arrive, self.now, stream, message=True))

    def work(self, node, stream, done):
        def arrive():
            if node.alive:
                done()

        item = Item(arrive, self.now, stream)
        self.items.append(item)
        return item

    def answer(self, node, stream, done):
        """Of a stream that was given up the sender's driver has no handles left to ask."""
        return self.work(node, stream, lambda: None if stream in self.ended else done())

    # The sender's actions.

    def do_SendOpen(self, node, action: SendOpen):
        num_parcels, owner = self.streams[action.stream][2], self.owner(action.stream)

        def handle(peer):
            if owner in self.forgotten:
                return []
            return peer.receiver.on_open(node.name, action.stream, owner, num_parcels, self.now)

        self.send(node, action.peer, action.stream, handle)

    def do_SendClose(self, node, action: SendClose):
        self.send(
            node,
            action.peer,
            action.stream,
            lambda peer: peer.receiver.on_close(
                node.name, action.stream, action.unused_slots, self.now
            ),
        )

    def do_Gather(self, node, action: Gather):
        self.answer(
            node,
            action.stream,
            lambda: self.run(node, node.sender.on_gathered(action.stream, action.parcel)),
        )

    def do_Write(self, node, action: Write):
        stream, parcel = action.stream, action.parcel
        peer = self.streams[stream][1]
        place, content = (peer.name, action.peer_slot), (node.name, stream, parcel)
        if peer.alive:
            assert place not in self.flying, f"{place}: {content} and {self.flying[place]}"
            assert action.peer_slot not in peer.read, f"{place} is written while it is read"
        self.flying[place] = content

        def land(notice=True):
            self.flying.pop(place, None)
            if not peer.alive:
                return
            assert action.peer_slot not in peer.read, f"{place} is written while it is read"
            peer.ring[action.peer_slot] = content
            if notice:
                self.send(
                    node,
                    peer.name,
                    stream,
                    lambda there: there.receiver.on_parcel(
                        node.name, stream, parcel, action.peer_slot, self.now
                    ),
                )

        def failed():
            lost = not peer.alive
            self.run(node, node.sender.on_write_failed(stream, parcel, "failed", lost, self.now))

        def arrive():
            # The bytes are there before the sender knows.
            land()
            ended = lambda: self.run(node, node.sender.on_written(stream, parcel))  # noqa: E731
            self.answer(node, stream, ended if peer.alive else failed)

        def fail(notice):
            if notice:
                land()
            else:
                self.flying.pop(place, None)
                peer.ring[action.peer_slot] = "rubbish"
            self.answer(node, stream, failed)

        self.work(node, stream, arrive).fail = fail

    def do_StreamEnded(self, node, action: StreamEnded):
        stream = action.stream
        assert stream not in self.ended, f"{stream} ended twice"
        self.ended[stream] = action.reason
        flying = [content for content in self.flying.values() if content[1] == stream]
        assert not flying or not self.streams[stream][1].alive

    # The receiver's actions.

    def do_SendGrant(self, node, action: SendGrant):
        stream, slots = action.stream, action.slots
        assert stream not in self.landed, f"{stream} has landed and is granted {slots}"
        grants = {(stream, at): slot for at, slot in enumerate(slots, action.first_parcel)}
        self.granted |= grants

        def handle(peer):
            self.told |= grants
            return peer.sender.on_granted(node.name, stream, action.first_parcel, slots, self.now)

        self.send(node, action.peer, stream, handle)

    def do_SendRefusal(self, node, action: SendRefusal):
        self.send(
            node,
            action.peer,
            action.stream,
            lambda peer: peer.sender.on_refused(node.name, action.stream, action.reason, self.now),
        )

    def do_Scatter(self, node, action: Scatter):
        content = (action.peer, action.stream, action.parcel)
        assert node.ring.get(action.slot) == content
        assert self.owner(action.stream) not in self.forgotten
        node.read.add(action.slot)

        def done():
            assert node.ring[action.slot] == content
            node.read.discard(action.slot)
            self.scattered[action.stream, action.parcel] += 1
            self.run(
                node,
                node.receiver.on_scattered(action.peer, action.stream, action.parcel, self.now),
            )

        self.work(node, action.stream, done)

    def do_StreamLanded(self, node, action: StreamLanded):
        assert action.stream not in self.landed, "landed twice"
        self.landed.add(action.stream)
        for parcel in range(self.streams[action.stream][2]):
            assert self.scattered[action.stream, parcel] == 1
        assert self.owner(action.stream) not in self.forgotten

    # The test's hands.

    def deliver(self, item):
        self.items.remove(item)
        item.arrive()

    def deliver_all(self, wanted=lambda item: True):
        while (item := next(filter(wanted, self.items), None)) is not None:
            self.deliver(item)

    def lie_of_a_parcel(self, stream, parcel, slot):
        """The notice of a write that was never granted."""
        node, peer, _, _ = self.streams[stream]
        if peer.alive and self.granted[stream, parcel] != slot:
            actions = peer.receiver.on_parcel(node.name, stream, parcel, slot, self.now)
            assert not actions, f"parcel {parcel} of {stream} was believed in slot {slot}"

    def lie_of_a_grant(self, stream, parcel, slot):
        """Another slot for a parcel that has one."""
        node, peer, _, _ = self.streams[stream]
        if node.alive and peer.alive:
            self.run(node, node.sender.on_granted(peer.name, stream, parcel, (slot,), self.now))

    def advance(self, seconds):
        self.now += seconds
        for stream, (_, _, _, opened) in self.streams.items():
            if self.now - opened > LIFE_S:
                self.abandon(stream)
        for item in [each for each in self.items if not each.message]:
            if self.now - item.since > LIFE_S and item in self.items:
                self.deliver(item)
        self.wake()

    def wake(self):
        for node in list(self.nodes):
            self.run(node, node.sender.on_time(self.now))
            self.run(node, node.receiver.on_time(self.now))

    def restart(self, index):
        old = self.nodes[index]
        old.alive = False
        self.nodes[index] = self.start(old.own_slots, old.ring_slots)
        for place, content in list(self.flying.items()):
            if content[0] == old.name:
                del self.flying[place]
        for node in self.nodes:
            self.run(node, node.sender.on_peer_lost(old.name, "restarted", self.now))
            self.run(node, node.receiver.on_peer_lost(old.name, self.now))

    def settle(self):
        """No more faults: everything arrives, and time passes."""
        for _ in range(200):
            self.deliver_all()
            self.items, self.kept = self.kept, []
            self.deliver_all()
            ends = [
                end
                for node in self.nodes
                for end in (node.sender.next_deadline(), node.receiver.next_deadline())
                if end is not None
            ]
            if not ends:
                break
            self.now = max(self.now, min(ends))
            self.wake()
        for node in self.nodes:
            assert not len(node.sender) and node.sender.num_free == node.own_slots
            assert not len(node.receiver) and node.receiver.num_free == node.ring_slots
        for stream, (node, _, _, _) in self.streams.items():
            assert stream in self.ended or not node.alive, f"{stream} never ended"


# Rings of one slot are where one stream meets what another has left behind.
SIZES = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([1, 1, 1, 2, 3, 4])), min_size=3, max_size=3
)


class PackingMachine(RuleBasedStateMachine):
    @initialize(sizes=SIZES)
    def begin(self, sizes):
        self.world = World(sizes)

    @rule(source=st.integers(0, 2), step=st.integers(1, 2), num_parcels=st.integers(1, 6))
    def open(self, source, step, num_parcels):
        nodes = self.world.nodes
        self.world.open(nodes[source], nodes[(source + step) % 3], num_parcels)

    @precondition(lambda self: self.world.items)
    @rule(indices=st.lists(st.integers(0, 200), min_size=1, max_size=8))
    def deliver(self, indices):
        for index in indices:
            if self.world.items:
                self.world.deliver(self.world.items[index % len(self.world.items)])

    @precondition(lambda self: self.world.items)
    @rule()
    def deliver_all(self):
        self.world.deliver_all()

    @precondition(lambda self: any(each.message for each in self.world.items))
    @rule(index=st.integers(0, 200), twice=st.booleans())
    def lose_or_double(self, index, twice):
        messages = [each for each in self.world.items if each.message]
        item = messages[index % len(messages)]
        if twice:
            self.world.items.append(replace(item))
        else:
            self.world.items.remove(item)

    @precondition(lambda self: any(each.message for each in self.world.items))
    @rule(index=st.integers(0, 200))
    def keep_double(self, index):
        messages = [each for each in self.world.items if each.message]
        self.world.kept.append(replace(messages[index % len(messages)]))

    @precondition(lambda self: self.world.kept)
    @rule(index=st.integers(0, 200))
    def deliver_kept(self, index):
        self.world.kept.pop(index % len(self.world.kept)).arrive()

    @precondition(lambda self: self.world.granted)
    @rule(index=st.integers(0, 200), slot=st.integers(0, 3))
    def lie_of_a_parcel(self, index, slot):
        known = list(self.world.granted)
        self.world.lie_of_a_parcel(*known[index % len(known)], slot)

    @precondition(lambda self: self.world.told)
    @rule(index=st.integers(0, 200), slot=st.integers(0, 3))
    def lie_of_a_grant(self, index, slot):
        known = list(self.world.told)
        self.world.lie_of_a_grant(*known[index % len(known)], slot)

    @precondition(lambda self: self.world.flying)
    @rule(index=st.integers(0, 200), source=st.integers(0, 1), num_parcels=st.integers(1, 2))
    def forget_what_is_being_written(self, index, source, num_parcels):
        """Another stream wants the slot at once, and is as fast as can be."""
        world = self.world
        writes = list(world.flying.items())
        (peer_name, _), (_, stream, _) = writes[index % len(writes)]
        peer = world.find(peer_name)
        if peer is None:
            return
        world.forget(stream)
        others = [node for node in world.nodes if node is not peer]
        fresh = world.open(others[source], peer, num_parcels)
        world.deliver_all(lambda item: item.stream == fresh)

    @precondition(lambda self: any(each.fail for each in self.world.items))
    @rule(index=st.integers(0, 200), notice=st.booleans())
    def fail_write(self, index, notice):
        writes = [each for each in self.world.items if each.fail]
        item = writes[index % len(writes)]
        self.world.items.remove(item)
        item.fail(notice)

    @precondition(lambda self: self.world.streams)
    @rule(index=st.integers(0, 200))
    def abandon(self, index):
        self.world.abandon(index % len(self.world.streams))

    @precondition(lambda self: self.world.streams)
    @rule(index=st.integers(0, 200))
    def forget(self, index):
        stream = index % len(self.world.streams)
        if self.world.streams[stream][1].alive:
            self.world.forget(stream)

    @rule(seconds=st.sampled_from([1.0, 11.0, 70.0]), times=st.sampled_from([1, 1, 40]))
    def advance(self, seconds, times):
        for _ in range(times):
            self.world.advance(seconds)

    @rule(index=st.integers(0, 2))
    def restart(self, index):
        self.world.restart(index)

    @invariant()
    def slots_are_in_one_place(self):
        for node in self.world.nodes if hasattr(self, "world") else ():
            node.sender.check()
            node.receiver.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle()


TestPackingMachine = pytest.mark.slow(PackingMachine.TestCase)
TestPackingMachine.settings = settings(
    max_examples=int(os.environ.get("PAIR_EXAMPLES", "150")), stateful_step_count=50, deadline=None
)


@given(
    sizes=SIZES,
    streams=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 9)), min_size=1, max_size=4
    ),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_without_faults_everything_lands_in_any_order(sizes, streams, chance):
    world = World(sizes)
    for source, step, num_parcels in streams:
        world.open(world.nodes[source], world.nodes[(source + step) % 3], num_parcels)
    while world.items:
        world.deliver(chance.choice(world.items))
    assert world.now == 0.0
    assert world.ended == dict.fromkeys(world.streams)
    assert world.landed == world.streams.keys()
    world.settle()
