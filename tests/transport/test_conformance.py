"""What every transport does, checked on each implementation."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvcourier.errors import (
    ConfigError,
    LocalProtocolError,
    PeerLost,
    PostFailed,
    RegistrationFailed,
    RemoteProtocolError,
)
from kvcourier.ids import AgentName
from kvcourier.layout.geometry import MemoryKind, Region
from kvcourier.transport.interface import (
    DescriptorListId,
    Descriptors,
    Notification,
    Operation,
    Selection,
    TransferHandle,
    TransferState,
    TransferStatus,
    Transport,
)
from kvcourier.transport.memory import MemoryNetwork, MemoryTransport
from kvcourier.transport.nixl import NixlTransport
from transport.ends import Ends, Memory

Make = Callable[[str], Transport]

_SIZE = 1 << 16
_names = itertools.count()


@pytest.fixture(params=["memory", pytest.param("nixl", marks=pytest.mark.nixl)])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes transports that can reach each other; closes them in the end."""
    made: list[Transport] = []
    network = MemoryNetwork()

    def build(name: str) -> Transport:
        if request.param == "memory":
            transport: Transport = MemoryTransport(network, name)
        else:
            try:
                transport = NixlTransport(name)
            except ConfigError as error:
                pytest.skip(f"NIXL cannot be used here: {error}")
        made.append(transport)
        return transport

    yield build
    for transport in made:
        transport.close()


@dataclass
class Pair:
    """Two connected transports with registered memory; `a` posts."""

    a: Transport
    b: Transport
    a_memory: Memory
    b_memory: Memory
    ends: Ends

    def piece(self, size: int = 512) -> dict[str, Descriptors]:
        return {
            "local": self.a_memory.descriptors([0], [size]),
            "remote": self.b_memory.descriptors([0], [size]),
        }


@pytest.fixture
def pair(make: Make) -> Pair:
    number = next(_names)
    a, b = make(f"a{number}"), make(f"b{number}")
    a_memory, b_memory = Memory(_SIZE, seed=1), Memory(_SIZE, seed=2)
    a.register([a_memory.region])
    b.register([b_memory.region])
    assert a.connect(b.agent_metadata()) == b.agent_name
    assert b.connect(a.agent_metadata()) == a.agent_name
    return Pair(a, b, a_memory, b_memory, Ends(a, b))


# Registering and connecting


@pytest.mark.parametrize(
    "bad",
    [
        Region(4096, 0, MemoryKind.DRAM, 0),
        Region(4096, -1, MemoryKind.DRAM, 0),
        Region(0, 4096, MemoryKind.DRAM, 0),
    ],
)
def test_a_failed_registration_keeps_nothing(make: Make, bad: Region) -> None:
    a, b = make("a"), make("b")
    source, good = Memory(_SIZE, seed=1), Memory(_SIZE)
    a.register([source.region])
    with pytest.raises(RegistrationFailed):
        b.register([good.region, bad])
    a.connect(b.agent_metadata())
    with pytest.raises(PostFailed):
        a.post(
            Operation.WRITE,
            b.agent_name,
            local=source.descriptors([0], [64]),
            remote=good.descriptors([0], [64]),
        )
    assert not good.data.any()


def test_after_a_failed_registration_the_rest_is_usable(make: Make) -> None:
    a, b = make("a"), make("b")
    source, target, other = Memory(_SIZE, seed=1), Memory(_SIZE), Memory(_SIZE)
    a.register([source.region])
    b.register([target.region])
    with pytest.raises(RegistrationFailed):  # host memory that claims to lie on a GPU
        b.register([other.region, Region(target.address, 64, MemoryKind.VRAM, 0)])
    a.connect(b.agent_metadata())
    ends = Ends(a, b)
    local = source.descriptors([0], [64])
    with pytest.raises(PostFailed):
        a.post(Operation.WRITE, b.agent_name, local=local, remote=other.descriptors([0], [64]))
    handle = a.post(
        Operation.WRITE, b.agent_name, local=local, remote=target.descriptors([0], [64])
    )
    assert ends.finish(a, handle).state is TransferState.DONE
    assert (target.data[:64] == source.data[:64]).all()


def test_connect_is_idempotent(pair: Pair) -> None:
    for _ in range(2):
        assert pair.a.connect(pair.b.agent_metadata()) == pair.b.agent_name
    handle = pair.a.post(Operation.WRITE, pair.b.agent_name, **pair.piece())
    assert pair.ends.finish(pair.a, handle).state is TransferState.DONE


def test_memory_registered_later_is_reached_after_connecting_again(pair: Pair) -> None:
    later = Memory(_SIZE)
    pair.b.register([later.region])
    sides = {
        "local": pair.a_memory.descriptors([0], [64]),
        "remote": later.descriptors([0], [64]),
    }
    with pytest.raises(PostFailed):
        pair.a.post(Operation.WRITE, pair.b.agent_name, **sides)
    pair.a.connect(pair.b.agent_metadata())
    handle = pair.a.post(Operation.WRITE, pair.b.agent_name, **sides)
    assert pair.ends.finish(pair.a, handle).state is TransferState.DONE
    assert (later.data[:64] == pair.a_memory.data[:64]).all()


@pytest.mark.parametrize("garbage", [b"", b"garbage", bytes(range(256)), b"[1, 2, 3, 4]"])
def test_connect_refuses_garbage(pair: Pair, garbage: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        pair.a.connect(garbage)


def test_connect_refuses_truncated_metadata(pair: Pair) -> None:
    metadata = pair.b.agent_metadata()
    for length in range(0, len(metadata), 1 + len(metadata) // 16):
        with pytest.raises(RemoteProtocolError):
            pair.a.connect(metadata[:length])


def test_connect_refuses_our_own_metadata(pair: Pair) -> None:
    with pytest.raises(RemoteProtocolError):
        pair.a.connect(pair.a.agent_metadata())


def test_reconnect_after_disconnect(pair: Pair) -> None:
    pair.a.disconnect(pair.b.agent_name)
    pair.a.connect(pair.b.agent_metadata())
    handle = pair.a.post(Operation.WRITE, pair.b.agent_name, **pair.piece())
    assert pair.ends.finish(pair.a, handle).state is TransferState.DONE


def test_an_agent_that_comes_back_under_its_name_is_connected_anew(make: Make) -> None:
    a, first = make("a"), make("b")
    source, target = Memory(_SIZE, seed=1), Memory(_SIZE)
    a.register([source.region])
    a.connect(first.agent_metadata())
    first.close()
    second = make("b")
    second.register([target.region])
    with pytest.raises(RemoteProtocolError):
        a.connect(second.agent_metadata())
    a.disconnect(AgentName("b"))
    a.connect(second.agent_metadata())
    handle = a.post(
        Operation.WRITE,
        AgentName("b"),
        local=source.descriptors([0], [64]),
        remote=target.descriptors([0], [64]),
    )
    assert Ends(a, second).finish(a, handle).state is TransferState.DONE
    assert (target.data[:64] == source.data[:64]).all()


def test_disconnect_of_an_unknown_agent_is_ignored(pair: Pair) -> None:
    pair.a.disconnect(AgentName("nobody"))


# Moving bytes


def _scatter(count: int) -> tuple[list[int], list[int], list[int]]:
    """Offsets at both sides and lengths of disjoint pieces, shuffled differently."""
    rng = np.random.default_rng(count)
    slot = _SIZE // count
    sizes = rng.integers(1, slot + 1, count).tolist()
    return (rng.permutation(count) * slot).tolist(), (rng.permutation(count) * slot).tolist(), sizes


@pytest.mark.parametrize("prepared", [False, True], ids=["descriptors", "selections"])
@pytest.mark.parametrize("count", [1, 7, 500])
@pytest.mark.parametrize("operation", list(Operation))
def test_exactly_the_named_bytes_move(
    pair: Pair, operation: Operation, count: int, prepared: bool
) -> None:
    at_a, at_b, sizes = _scatter(count)
    a_data, b_data = pair.a_memory.data.copy(), pair.b_memory.data.copy()
    for x, y, size in zip(at_a, at_b, sizes, strict=True):
        if operation is Operation.WRITE:
            b_data[y : y + size] = a_data[x : x + size]
        else:
            a_data[x : x + size] = b_data[y : y + size]

    local = pair.a_memory.descriptors(at_a, sizes)
    remote = pair.b_memory.descriptors(at_b, sizes)
    if prepared:  # the remote list in another order, undone by its indices
        order = np.random.default_rng(0).permutation(count)
        shuffled = Descriptors(remote.table[order], remote.memory)
        sides = {
            "local": Selection(pair.a.prepare(local, None), np.arange(count)),
            "remote": Selection(
                pair.a.prepare(shuffled, pair.b.agent_name), np.argsort(order).astype(np.int64)
            ),
        }
        handle = pair.a.post(operation, pair.b.agent_name, **sides)
    else:
        handle = pair.a.post(operation, pair.b.agent_name, local=local, remote=remote)

    assert pair.ends.finish(pair.a, handle) == TransferStatus(TransferState.DONE)
    pair.a.release(handle)
    assert (pair.a_memory.data == a_data).all()
    assert (pair.b_memory.data == b_data).all()
    assert pair.a_memory.canaries_intact() and pair.b_memory.canaries_intact()


def test_a_prepared_list_serves_many_operations(pair: Pair) -> None:
    slots = list(range(0, _SIZE, 4096))
    sizes = [4096] * len(slots)
    ours = pair.a.prepare(pair.a_memory.descriptors(slots, sizes), None)
    theirs = pair.a.prepare(pair.b_memory.descriptors(slots, sizes), pair.b.agent_name)
    for local, remote in [([0, 1], [3, 2]), ([5], [0]), ([2, 2], [8, 9])]:
        handle = pair.a.post(
            Operation.WRITE,
            pair.b.agent_name,
            local=Selection(ours, np.array(local)),
            remote=Selection(theirs, np.array(remote)),
        )
        assert pair.ends.finish(pair.a, handle).state is TransferState.DONE
        pair.a.release(handle)
        for x, y in zip(local, remote, strict=True):
            source = pair.a_memory.data[x * 4096 :][:4096]
            assert (pair.b_memory.data[y * 4096 :][:4096] == source).all()


def test_operations_in_both_directions_at_once(pair: Pair) -> None:
    half = _SIZE // 2
    first = pair.a.post(
        Operation.WRITE,
        pair.b.agent_name,
        local=pair.a_memory.descriptors([0], [half]),
        remote=pair.b_memory.descriptors([half], [half]),
    )
    second = pair.b.post(
        Operation.WRITE,
        pair.a.agent_name,
        local=pair.b_memory.descriptors([0], [half]),
        remote=pair.a_memory.descriptors([half], [half]),
    )
    assert pair.ends.finish(pair.a, first).state is TransferState.DONE
    assert pair.ends.finish(pair.b, second).state is TransferState.DONE
    assert (pair.b_memory.data[half:] == pair.a_memory.data[:half]).all()
    assert (pair.a_memory.data[half:] == pair.b_memory.data[:half]).all()


# Notices and notifications


@pytest.mark.parametrize("operation", list(Operation))
def test_a_notice_comes_once_and_after_the_bytes(pair: Pair, operation: Operation) -> None:
    count = 200
    at_a, at_b, sizes = _scatter(count)
    mover = (pair.a_memory, at_a), (pair.b_memory, at_b)
    source, target = mover if operation is Operation.WRITE else mover[::-1]

    def moved() -> bool:
        pieces = zip(source[1], target[1], sizes, strict=True)
        return all(
            (target[0].data[y : y + n] == source[0].data[x : x + n]).all() for x, y, n in pieces
        )

    assert not moved()
    handle = pair.a.post(
        operation,
        pair.b.agent_name,
        local=pair.a_memory.descriptors(at_a, sizes),
        remote=pair.b_memory.descriptors(at_b, sizes),
        notice=b"all \x00 there",
    )

    def noticed() -> bool:
        pair.a.poll(handle)  # the initiator's polling is what sends the notice
        return bool(pair.ends.payloads(pair.b))

    pair.ends.until(noticed)
    if operation is Operation.WRITE:
        assert moved()  # as the target sees it when the notice is there
    assert pair.ends.finish(pair.a, handle).state is TransferState.DONE
    assert moved()
    for _ in range(100):
        pair.ends.poll()
    assert pair.ends.arrived[pair.b.agent_name] == [
        Notification(pair.a.agent_name, b"all \x00 there")
    ]
    assert pair.ends.arrived[pair.a.agent_name] == []


@pytest.mark.parametrize("operation", list(Operation))
def test_a_finished_operation_can_be_posted_again(pair: Pair, operation: Operation) -> None:
    origin, goal = pair.a_memory, pair.b_memory
    if operation is Operation.READ:
        origin, goal = goal, origin
    handle = pair.a.post(operation, pair.b.agent_name, **pair.piece(512), notice=b"first")
    pair.ends.finish(pair.a, handle)
    for number in range(3):
        origin.data[:512] = number + 100
        pair.a.post_again(handle, notice=b"again %d" % number)
        assert pair.ends.finish(pair.a, handle).state is TransferState.DONE
        expected = [b"first", *(b"again %d" % each for each in range(number + 1))]
        pair.ends.until(lambda: len(pair.ends.payloads(pair.b)) == len(expected))  # noqa: B023
        assert pair.ends.payloads(pair.b) == expected
        assert (goal.data[:512] == number + 100).all()


def test_only_a_finished_operation_of_a_connected_peer_is_posted_again(pair: Pair) -> None:
    handle = pair.a.post(Operation.WRITE, pair.b.agent_name, **pair.piece())
    pair.ends.finish(pair.a, handle)
    pair.a.disconnect(pair.b.agent_name)
    with pytest.raises(PeerLost):
        pair.a.post_again(handle)
    pair.a.release(handle)
    with pytest.raises(LocalProtocolError):
        pair.a.post_again(handle)


def test_an_operation_without_a_notice_tells_nobody(pair: Pair) -> None:
    handle = pair.a.post(Operation.WRITE, pair.b.agent_name, **pair.piece())
    pair.ends.finish(pair.a, handle)
    for _ in range(100):
        pair.ends.poll()
    assert pair.ends.payloads(pair.b) == []


def test_notifications_go_both_ways(pair: Pair) -> None:
    to_b = [b"one", b"", bytes(range(256)), b"x" * 100_000]
    for payload in to_b:
        pair.a.notify(pair.b.agent_name, payload)
    pair.b.notify(pair.a.agent_name, b"hello")
    pair.ends.until(
        lambda: len(pair.ends.payloads(pair.b)) == 4 and len(pair.ends.payloads(pair.a)) == 1
    )
    assert sorted(pair.ends.payloads(pair.b)) == sorted(to_b)
    assert pair.ends.arrived[pair.a.agent_name] == [Notification(pair.b.agent_name, b"hello")]


# What is refused


@pytest.mark.parametrize("known_before", [False, True])
def test_an_agent_that_is_not_connected_is_lost(pair: Pair, known_before: bool) -> None:
    agent = pair.b.agent_name if known_before else AgentName("nobody")
    pair.a.disconnect(agent)
    with pytest.raises(PeerLost):
        pair.a.post(Operation.WRITE, agent, **pair.piece())
    with pytest.raises(PeerLost):
        pair.a.notify(agent, b"x")
    with pytest.raises(PeerLost):
        pair.a.prepare(pair.b_memory.descriptors([0], [64]), agent)


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize("offset", [-1, _SIZE - 63, _SIZE])
def test_unregistered_memory_is_refused_and_nothing_moves(
    pair: Pair, side: str, offset: int
) -> None:
    before = pair.a_memory.data.copy(), pair.b_memory.data.copy()
    outside = {"local": pair.a_memory, "remote": pair.b_memory}[side]
    sides = {
        "local": pair.a_memory.descriptors([0, 64], [64, 64]),
        "remote": pair.b_memory.descriptors([0, 64], [64, 64]),
        side: outside.descriptors([0, offset], [64, 64]),
    }
    for operation in Operation:
        with pytest.raises(PostFailed):
            pair.a.post(operation, pair.b.agent_name, notice=b"no", **sides)
    with pytest.raises(PostFailed):
        pair.a.prepare(sides[side], None if side == "local" else pair.b.agent_name)
    for _ in range(100):
        pair.ends.poll()
    assert pair.ends.payloads(pair.b) == []
    assert (pair.a_memory.data == before[0]).all() and (pair.b_memory.data == before[1]).all()
    assert pair.a_memory.canaries_intact() and pair.b_memory.canaries_intact()


def test_two_adjacent_regions_do_not_make_one(make: Make) -> None:
    a, b = make("a"), make("b")
    source, target = Memory(_SIZE, seed=1), Memory(_SIZE)
    a.register([source.region])
    half = _SIZE // 2
    b.register(
        [
            Region(target.address, half, MemoryKind.DRAM, 0),
            Region(target.address + half, half, MemoryKind.DRAM, 0),
        ]
    )
    a.connect(b.agent_metadata())
    with pytest.raises(PostFailed):
        a.post(
            Operation.WRITE,
            b.agent_name,
            local=source.descriptors([half - 8], [16]),
            remote=target.descriptors([half - 8], [16]),
        )


def _malformed(pair: Pair) -> dict[str, dict[str, Descriptors | Selection]]:
    ours, theirs = pair.a_memory, pair.b_memory
    good = ours.descriptors([0, 64], [64, 64])
    slots, lengths = [0, 64, 128], [64, 64, 32]
    our_list = pair.a.prepare(ours.descriptors(slots, lengths), None)
    their_list = pair.a.prepare(theirs.descriptors(slots, lengths), pair.b.agent_name)

    def select(list_id: DescriptorListId, *indices: int) -> Selection:
        return Selection(list_id, np.array(indices, dtype=np.int64))

    return {
        "counts": {"local": good, "remote": theirs.descriptors([0], [64])},
        "lengths": {"local": good, "remote": theirs.descriptors([0, 64], [64, 63])},
        "none": {"local": ours.descriptors([], []), "remote": theirs.descriptors([], [])},
        "empty piece": {
            "local": ours.descriptors([0], [0]),
            "remote": theirs.descriptors([0], [0]),
        },
        "forms": {"local": good, "remote": select(their_list, 0, 1)},
        "shape": {
            "local": Descriptors(good.table[:, :2], MemoryKind.DRAM),
            "remote": theirs.descriptors([0, 64], [64, 64]),
        },
        "dtype": {
            "local": Descriptors(good.table.astype(np.float64), MemoryKind.DRAM),
            "remote": theirs.descriptors([0, 64], [64, 64]),
        },
        "selected counts": {"local": select(our_list, 0, 1), "remote": select(their_list, 0)},
        "selected lengths": {"local": select(our_list, 0), "remote": select(their_list, 2)},
        "selected none": {"local": select(our_list), "remote": select(their_list)},
        "index too large": {"local": select(our_list, 0, 3), "remote": select(their_list, 0, 1)},
        "index negative": {"local": select(our_list, 0, -1), "remote": select(their_list, 0, 1)},
        "index that wraps": {"local": select(our_list, 1 << 32), "remote": select(their_list, 0)},
        "swapped lists": {"local": select(their_list, 0), "remote": select(our_list, 0)},
        "unknown list": {
            "local": select(our_list, 0),
            "remote": select(DescriptorListId(10_000), 0),
        },
    }


_MALFORMED = [
    "counts",
    "lengths",
    "none",
    "empty piece",
    "forms",
    "shape",
    "dtype",
    "selected counts",
    "selected lengths",
    "selected none",
    "index too large",
    "index negative",
    "index that wraps",
    "swapped lists",
    "unknown list",
]


@pytest.mark.parametrize("case", _MALFORMED)
def test_malformed_sides_are_refused(pair: Pair, case: str) -> None:
    before = pair.b_memory.data.copy()
    with pytest.raises(LocalProtocolError):
        pair.a.post(Operation.WRITE, pair.b.agent_name, **_malformed(pair)[case])
    for _ in range(100):
        pair.ends.poll()
    assert (pair.b_memory.data == before).all()


def test_a_list_dies_with_its_release_and_with_its_peer(pair: Pair) -> None:
    ours = pair.a.prepare(pair.a_memory.descriptors([0], [64]), None)
    theirs = pair.a.prepare(pair.b_memory.descriptors([0], [64]), pair.b.agent_name)

    def post() -> TransferHandle:
        return pair.a.post(
            Operation.WRITE,
            pair.b.agent_name,
            local=Selection(ours, np.array([0])),
            remote=Selection(theirs, np.array([0])),
        )

    pair.ends.finish(pair.a, post())
    pair.a.disconnect(pair.b.agent_name)
    pair.a.connect(pair.b.agent_metadata())
    with pytest.raises(LocalProtocolError):
        post()
    theirs = pair.a.prepare(pair.b_memory.descriptors([0], [64]), pair.b.agent_name)
    pair.ends.finish(pair.a, post())
    pair.a.release_list(theirs)
    pair.a.release_list(theirs)
    with pytest.raises(LocalProtocolError):
        post()


# Handles and closing


def test_a_terminal_status_stays_until_release(pair: Pair) -> None:
    handle = pair.a.post(Operation.WRITE, pair.b.agent_name, **pair.piece())
    status = pair.ends.finish(pair.a, handle)
    assert pair.a.poll(handle) == status
    pair.a.release(handle)
    pair.a.release(handle)
    with pytest.raises(LocalProtocolError):
        pair.a.poll(handle)


def test_a_handle_outlives_its_peers_connection(pair: Pair) -> None:
    handle = pair.a.post(Operation.WRITE, pair.b.agent_name, **pair.piece(_SIZE))
    pair.a.disconnect(pair.b.agent_name)
    assert pair.ends.finish(pair.a, handle).state is not TransferState.IN_FLIGHT


def test_close_is_idempotent_and_final(pair: Pair) -> None:
    handle = pair.a.post(Operation.WRITE, pair.b.agent_name, **pair.piece())
    pair.a.close()
    pair.a.close()
    with pytest.raises(LocalProtocolError):
        pair.a.notifications()
    with pytest.raises(LocalProtocolError):
        pair.a.poll(handle)
