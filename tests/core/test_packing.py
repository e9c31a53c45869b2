"""The rules of the packed path, one by one; test_packing_stateful.py has them all at once."""

import pytest

from kvcourier.core.packing.actions import (
    NO_STAGING,
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
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import EngineId, Incarnation, PeerRank, Rank, RequestId

A, B = (PeerRank(EngineId(name), Incarnation("1"), Rank(0, 0)) for name in "ab")
R = RequestId("r")


def opened(num_parcels=2, num_slots=1, peers=(A,), write_limit_s=300.0):
    sender = Sender(num_slots, 1.0, stall_limit_s=5.0, write_limit_s=write_limit_s)
    for stream, peer in enumerate(peers):
        assert sender.open(stream, peer, num_parcels, 4, 0.0) == [SendOpen(peer, stream)]
    return sender


def receiving(num_slots=2, num_parcels=2, max_streams=2):
    receiver = Receiver(num_slots, max_streams, slot_limit_s=10.0)
    return receiver, receiver.on_open(A, 0, R, num_parcels, 0.0)


# The sender.


def test_a_stream_is_gathered_written_and_ended():
    sender = opened()
    assert sender.num_free == 1  # none is taken before a grant
    assert sender.on_granted(A, 0, 0, (3, 1), 0.0) == [Gather(0, 0, 0)]
    assert sender.on_gathered(0, 0) == [Write(0, 0, 0, 3)]
    assert sender.on_written(0, 0) == [Gather(0, 1, 0)]
    assert sender.on_gathered(0, 1) == [Write(0, 1, 0, 1)]
    assert sender.on_written(0, 1) == [StreamEnded(0, None, False)]
    assert sender.num_free == 1 and sender.next_deadline() is None


def test_streams_take_own_slots_in_turn():
    sender = opened(peers=(A, A))
    sender.on_granted(A, 0, 0, (0,), 0.0)
    sender.on_granted(A, 0, 1, (1,), 0.0)
    sender.on_granted(A, 1, 0, (2, 3), 0.0)
    served = []
    stream, parcel = 0, 0
    while True:
        sender.on_gathered(stream, parcel)
        gathers = [e for e in sender.on_written(stream, parcel) if isinstance(e, Gather)]
        if not gathers:
            break
        stream, parcel = gathers[0].stream, gathers[0].parcel
        served.append(stream)
    assert served == [0, 1, 1]


def test_no_grant_in_time_means_no_staging():
    sender = opened()
    assert sender.next_deadline() == 1.0
    assert sender.on_time(0.9) == []
    close, ended = sender.on_time(1.0)
    assert close == SendClose(A, 0, ())
    assert ended.reason.startswith("no staging")
    assert sender.on_granted(A, 0, 0, (2,), 1.1) == [SendClose(A, 0, (2,))]


def test_a_stalled_stream_ends_with_another_reason():
    sender = opened()
    sender.on_granted(A, 0, 0, (3,), 0.5)
    assert sender.on_time(5.5) == []  # it gathers: not the peer's fault
    sender.on_gathered(0, 0)
    sender.on_written(0, 0)
    close, ended = sender.on_time(10.5)
    assert close == SendClose(A, 0, ())
    assert ended.reason and not ended.reason.startswith("no staging")


@pytest.mark.parametrize(
    ("first", "slots"),
    [(1, (2, 2)), (1, (4,)), (1, (-1,)), (2, (2,)), (-1, (2,)), (1, (0,)), (0, (2,)), (1, (2, 3))],
)
def test_nonsense_from_the_peer_ends_the_stream_once_it_is_quiet(first, slots):
    sender = opened()
    sender.on_granted(A, 0, 0, (0,), 0.0)
    assert sender.on_granted(A, 0, first, slots, 0.0) == []
    close, ended = sender.on_gathered(0, 0)
    assert close == SendClose(A, 0, (0,))
    assert "nonsense" in ended.reason


def test_a_slot_of_another_stream_is_granted_already():
    sender = opened(peers=(A, A))
    sender.on_granted(A, 0, 0, (0,), 0.0)
    _, ended = sender.on_granted(A, 1, 0, (0,), 0.0)
    assert ended.stream == 1


def test_a_slot_may_be_granted_anew_before_its_write_is_known_to_have_ended():
    sender = opened(num_slots=2)
    sender.on_granted(A, 0, 0, (3,), 0.0)
    sender.on_gathered(0, 0)
    assert sender.on_granted(A, 0, 1, (3,), 0.0) == [Gather(0, 1, 1)]


def test_a_grant_that_comes_twice_gives_no_second_write():
    sender = opened(num_parcels=1)
    sender.on_granted(A, 0, 0, (3,), 0.0)
    assert sender.on_granted(A, 0, 0, (3,), 0.0) == []
    sender.on_gathered(0, 0)
    assert sender.on_granted(A, 0, 0, (3,), 0.0) == []
    sender.on_written(0, 0)
    assert sender.on_granted(A, 0, 0, (3,), 0.0) == []
    assert sender.counts["repeated_grants"] == 3


def test_a_failed_write_ends_the_stream_after_its_other_writes():
    sender = opened(num_parcels=3, num_slots=2)
    sender.on_granted(A, 0, 0, (0, 1, 2), 0.0)
    sender.on_gathered(0, 0)
    sender.on_gathered(0, 1)
    assert sender.on_write_failed(0, 0, "broken", peer_lost=False, now=0.0) == []
    assert sender.num_free == 1
    assert sender.on_written(0, 1) == [
        SendClose(A, 0, (0, 2)),
        StreamEnded(0, "broken", False),
    ]


def test_a_write_that_never_ends_keeps_its_slot_for_the_longest_a_write_can_take():
    # As long as it does not end, the slot holds what is in flight; but one stuck peer must not take
    # the staging memory of all others away for ever.
    sender = opened(num_parcels=2, num_slots=1, write_limit_s=30.0)
    sender.on_granted(A, 0, 0, (0, 1), 0.0)
    sender.on_gathered(0, 0)
    assert sender.abandon(0, "too late", 10.0) == []
    assert sender.next_deadline() == 40.0
    assert sender.num_free == 0
    # The peer's slot is not returned: what is stuck may land in it.
    assert sender.on_time(40.0) == [SendClose(A, 0, (1,)), StreamEnded(0, "too late", False)]
    assert sender.num_free == 1
    assert sender.next_deadline() is None
    assert sender.counts["abandoned_writes"] == 1
    sender.check()


def test_nobody_waits_for_slots_in_which_writes_to_another_peer_are_stuck():
    sender = opened(num_parcels=1, num_slots=1, peers=(A, B))
    sender.on_granted(A, 0, 0, (0,), 0.0)
    sender.on_gathered(0, 0)
    assert sender.on_granted(B, 1, 0, (2,), 0.5) == []
    (close, ended) = sender.on_time(1.5)
    assert close == SendClose(B, 1, (2,))
    assert ended.stream == 1
    # So the driver takes the direct path for it.
    assert ended.reason.startswith(NO_STAGING)
    sender.check()


def test_abandoned_while_gathering():
    sender = opened()
    sender.on_granted(A, 0, 0, (0, 1), 0.0)
    assert sender.abandon(0, "cancelled", 0.0) == []
    assert sender.num_free == 0
    assert sender.on_granted(A, 0, 0, (0, 1), 0.0) == []
    assert sender.on_gathered(0, 0) == [
        SendClose(A, 0, (0, 1)),
        StreamEnded(0, "cancelled", False),
    ]
    assert sender.abandon(0, "again", 0.0) == []


def test_a_lost_peer_is_told_nothing():
    sender = opened(peers=(A, A, B))
    sender.on_granted(A, 0, 0, (0,), 0.0)
    sender.on_gathered(0, 0)
    assert sender.on_peer_lost(A, "gone", 0.0) == [StreamEnded(1, "gone", True)]
    assert sender.on_write_failed(0, 0, "reset", peer_lost=True, now=0.0) == [
        StreamEnded(0, "gone", True)
    ]
    assert len(sender) == 1


def test_only_the_peer_itself_speaks_for_a_stream():
    sender = opened()
    assert sender.on_refused(B, 0, "no", 0.0) == []
    assert sender.on_granted(B, 0, 0, (1,), 0.0) == [SendClose(B, 0, (1,))]
    assert sender.on_refused(A, 0, "no", 0.0) == [SendClose(A, 0, ()), StreamEnded(0, "no", False)]


def test_misuse_of_the_sender_is_raised():
    sender = opened()
    for call in (sender.on_gathered, sender.on_written):
        with pytest.raises(LocalProtocolError):
            call(0, 0)
    with pytest.raises(LocalProtocolError):
        sender.open(0, A, 1, 1, 0.0)
    with pytest.raises(LocalProtocolError):
        sender.open(1, A, 0, 1, 0.0)


# The receiver.


def test_a_stream_is_granted_scattered_and_landed():
    receiver, actions = receiving(num_slots=1)
    assert actions == [SendGrant(A, 0, 0, (0,))]
    assert receiver.on_parcel(A, 0, 0, 0, 0.0) == [Scatter(A, 0, 0, 0)]
    assert receiver.scattering(R)
    assert receiver.on_scattered(A, 0, 0, 0.0) == [SendGrant(A, 0, 1, (0,))]
    assert receiver.on_parcel(A, 0, 1, 0, 0.0) == [Scatter(A, 0, 1, 0)]
    assert receiver.on_scattered(A, 0, 1, 0.0) == [StreamLanded(A, 0)]
    assert receiver.num_free == 1 and receiver.next_deadline() is None and not len(receiver)
    assert receiver.on_open(A, 0, R, 2, 0.0) == []


def test_no_more_slots_than_parcels():
    receiver, actions = receiving(num_slots=5, num_parcels=2)
    assert actions == [SendGrant(A, 0, 0, (0, 1))]
    assert receiver.num_free == 3


@pytest.mark.parametrize(
    ("peer", "stream", "parcel", "slot"),
    [(B, 0, 0, 0), (A, 1, 0, 0), (A, 0, 0, 1), (A, 0, 2, 0), (A, 0, -1, 0), (A, 0, 0, 7)],
)
def test_a_parcel_is_believed_only_in_its_slot(peer, stream, parcel, slot):
    receiver, _ = receiving()
    assert receiver.on_parcel(peer, stream, parcel, slot, 0.0) == []
    assert receiver.counts["stale_parcels"] == 1


def test_a_parcel_is_scattered_once():
    receiver, _ = receiving()
    receiver.on_parcel(A, 0, 0, 0, 0.0)
    assert receiver.on_parcel(A, 0, 0, 0, 0.0) == []
    receiver.on_scattered(A, 0, 0, 0.0)
    assert receiver.on_parcel(A, 0, 0, 0, 0.0) == []


def test_streams_beyond_the_bound_are_refused():
    receiver, _ = receiving(max_streams=1)
    (refusal,) = receiver.on_open(B, 0, R, 1, 0.0)
    assert isinstance(refusal, SendRefusal) and refusal.reason.startswith("no staging")
    receiver, _ = receiving()
    assert isinstance(receiver.on_open(B, 0, R, 0, 0.0)[0], SendRefusal)


def test_a_slow_peer_cannot_take_all():
    receiver, actions = receiving(num_slots=4, num_parcels=8, max_streams=8)
    assert actions == [SendGrant(A, 0, 0, (0, 1, 2, 3))]
    assert receiver.on_open(B, 0, R, 8, 0.0) == []
    granted = []
    for parcel in range(3):
        receiver.on_parcel(A, 0, parcel, parcel, 0.0)
        granted += receiver.on_scattered(A, 0, parcel, 0.0)
    # A gets none before it is below its half; B fills its own, and the third goes to A.
    assert granted[:2] == [SendGrant(B, 0, 0, (0,)), SendGrant(B, 0, 1, (1,))]
    assert granted[2] == SendGrant(A, 0, 4, (2,))
    receiver.check()


def test_streams_of_a_peer_take_turns():
    receiver = Receiver(1, 3, 10.0)
    receiver.on_open(A, 0, R, 2, 0.0)
    receiver.on_open(A, 1, R, 2, 0.0)
    receiver.on_open(A, 2, R, 2, 0.0)
    order, stream, parcel = [], 0, 0
    for _ in range(5):
        receiver.on_parcel(A, stream, parcel, 0, 0.0)
        grant = receiver.on_scattered(A, stream, parcel, 0.0)[-1]
        stream, parcel = grant.stream, grant.first_parcel
        order.append(stream)
    assert order == [0, 1, 2, 1, 2]


def test_a_forgotten_stream_keeps_slots_until_they_are_quiet():
    receiver, _ = receiving(num_slots=3, num_parcels=3)
    receiver.on_parcel(A, 0, 0, 0, 1.0)
    (refusal,) = receiver.forget(R, 2.0)
    assert isinstance(refusal, SendRefusal) and not refusal.reason.startswith("no staging")
    assert receiver.scattering(R) and receiver.num_free == 0
    assert receiver.on_scattered(A, 0, 0, 2.0) == []
    assert not receiver.scattering(R) and receiver.num_free == 1
    assert receiver.on_parcel(A, 0, 1, 1, 2.0) == []
    assert receiver.num_free == 2
    assert receiver.next_deadline() == 11.0
    assert receiver.on_time(11.0) == []
    assert receiver.num_free == 3 and not len(receiver)


def test_a_closed_stream_is_gone_and_wrong_numbers_are_counted():
    receiver, _ = receiving(num_slots=3, num_parcels=2)
    assert receiver.on_close(A, 0, (1, 2, 9), 0.0) == []
    assert receiver.num_free == 2  # the notice of the other one is on its way
    assert receiver.counts["wrong_unused_slots"] == 2
    assert receiver.on_parcel(A, 0, 0, 0, 0.0) == []
    assert receiver.num_free == 3 and not len(receiver)


def test_a_close_after_everything_arrived_changes_nothing():
    receiver, _ = receiving(num_parcels=1)
    receiver.on_parcel(A, 0, 0, 0, 0.0)
    assert receiver.on_close(A, 0, (0,), 0.0) == []
    assert receiver.on_scattered(A, 0, 0, 0.0) == [StreamLanded(A, 0)]


def test_a_lost_peer_frees_its_slots_for_others():
    receiver, _ = receiving(num_slots=1)
    receiver.on_open(B, 5, R, 1, 0.0)
    assert receiver.on_peer_lost(A, 0.0) == [SendGrant(B, 5, 0, (0,))]


def test_a_hung_sender_is_dropped():
    receiver, _ = receiving(num_slots=2)
    receiver.on_parcel(A, 0, 0, 0, 8.0)
    assert receiver.on_time(17.9) == []  # progress at 8
    (refusal,) = receiver.on_time(18.0)
    assert isinstance(refusal, SendRefusal)
    assert receiver.num_free == 1
    assert receiver.on_scattered(A, 0, 0, 18.0) == []
    assert receiver.num_free == 2 and not len(receiver)
    assert receiver.on_parcel(A, 0, 1, 1, 18.0) == []


def test_misuse_of_the_receiver_is_raised():
    receiver, _ = receiving()
    with pytest.raises(LocalProtocolError):
        receiver.on_scattered(A, 0, 0, 0.0)
    with pytest.raises(LocalProtocolError):
        Receiver(0, 1, 1.0)
