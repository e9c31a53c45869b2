"""The lease table against a plain list of leases, and the trap that leaked blocks elsewhere."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcourier.core.leases import LeaseTable
from kvcourier.ids import RequestId

REQUESTS = st.sampled_from([RequestId(f"r{index}") for index in range(6)])
DURATIONS = st.sampled_from([0.5, 3.0, 30.0, 480.0])


class LeasesAgainstAList(RuleBasedStateMachine):
    """The model keeps [request, end] pairs in the order they came and searches all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.plain: list[list] = []
        self.now = 100.0

    def running(self, request_id):
        return next((lease for lease in self.plain if lease[0] == request_id), None)

    @rule(request_id=REQUESTS, duration_s=DURATIONS)
    def grant(self, request_id, duration_s):
        self.table.grant(request_id, self.now, duration_s)
        lease = self.running(request_id)
        if lease is None:
            self.plain.append([request_id, self.now + duration_s])
        else:
            lease[1] = max(lease[1], self.now + duration_s)

    @rule(request_id=REQUESTS, duration_s=DURATIONS)
    def renew(self, request_id, duration_s):
        lease = self.running(request_id)
        assert self.table.renew(request_id, self.now, duration_s) is (lease is not None)
        if lease is not None:
            lease[1] = max(lease[1], self.now + duration_s)

    @rule(request_id=REQUESTS)
    def end(self, request_id):
        self.table.end(request_id)
        self.plain = [lease for lease in self.plain if lease[0] != request_id]

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 29.0, 200.0]))
    def advance(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.plain)
    @rule()
    def advance_to_the_next_end(self):
        self.now = max(self.now, min(end for _, end in self.plain))

    @rule()
    def take_expired(self):
        expired = [lease for lease in self.plain if lease[1] <= self.now]
        taken = self.table.take_expired(self.now)
        assert set(taken) == {request_id for request_id, _ in expired}
        ends = dict(expired)
        assert [ends[each] for each in taken] == sorted(ends[each] for each in taken)
        self.plain = [lease for lease in self.plain if lease not in expired]

    @invariant()
    def agrees(self):
        assert len(self.table) == len(self.plain)
        assert self.table.next_expiry() == min((end for _, end in self.plain), default=None)
        assert all(request_id in self.table for request_id, _ in self.plain)


TestLeasesAgainstAList = pytest.mark.slow(LeasesAgainstAList.TestCase)
TestLeasesAgainstAList.settings = settings(stateful_step_count=40, max_examples=100)


def test_insertion_order_is_not_expiry_order():
    """vllm#58222: a reaper that stopped at the first lease still running never saw A and B."""
    table = LeaseTable()
    table.grant(RequestId("C"), 0.0, 480.0)
    table.grant(RequestId("A"), 0.0, 30.0)
    table.grant(RequestId("B"), 0.0, 30.0)
    assert table.next_expiry() == 30.0
    assert table.take_expired(30.0) == ["A", "B"]
    assert table.take_expired(479.9) == []
    assert table.take_expired(480.0) == ["C"]


def test_a_renewal_never_shortens_a_lease():
    table = LeaseTable()
    table.grant(RequestId("a"), 0.0, 480.0)
    assert table.renew(RequestId("a"), 1.0, 30.0)
    table.grant(RequestId("a"), 2.0, 1.0)
    assert table.take_expired(479.9) == []
    assert table.take_expired(480.0) == ["a"]


def test_what_is_not_leased_cannot_be_renewed():
    table = LeaseTable()
    table.grant(RequestId("a"), 0.0, 1.0)
    table.end(RequestId("a"))
    table.end(RequestId("a"))
    assert not table.renew(RequestId("a"), 0.5, 1.0)
    assert table.next_expiry() is None


def test_heartbeats_for_hours_keep_the_table_small():
    table = LeaseTable()
    for beat in range(10_000):
        table.grant(RequestId(f"r{beat % 10}"), float(beat), 30.0)
    assert len(table) == 10
    assert len(table._deadlines._heap) <= 2 * 10 + 64


def test_a_clock_may_start_below_zero():
    """`Endpoint` says: any clock that never goes back; only differences matter."""
    table = LeaseTable()
    table.grant(RequestId("a"), -100.0, 30.0)
    assert table.next_expiry() == -70.0
