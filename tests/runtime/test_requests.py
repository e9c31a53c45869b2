"""From ranks' reports to the instance's: against a log that is read from the start each time."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcourier.core.events import BlocksReserved
from kvcourier.core.outcomes import Outcome, Report
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import Rank, RequestId, TransferId, TransferKey
from kvcourier.layout import TokenSpan
from kvcourier.runtime.requests import RequestTable

FAILURES = frozenset({Outcome.RECEIVE_FAILED, Outcome.SEND_FAILED})
IDS = [RequestId(f"r{index}") for index in range(2)]
KEYS = [None, *(TransferKey(TransferId(f"t{index}"), 0) for index in range(2))]


@dataclass
class Life:
    """One request's log: what each rank has reported, and what the instance was told."""

    success: Outcome
    failure: Outcome
    key: TransferKey | None
    handed_over: bool = False
    aborted: bool = False
    by_rank: dict[Rank, list[Outcome]] = field(default_factory=dict)
    told: list[Outcome] = field(default_factory=list)

    def reports(self, rank: Rank) -> list[Outcome]:
        return self.by_rank.setdefault(rank, [])

    def ended(self, rank: Rank) -> bool:
        return bool(self.reports(rank))

    def released(self, rank: Rank) -> bool:
        return Outcome.RELEASED in self.reports(rank)


def nobody(reserved, ranks):
    """No rank gives its blocks back while another one receives."""
    raise AssertionError((reserved, ranks))


class RequestsAgainstALog(RuleBasedStateMachine):
    """Ranks keep the core's promise: at most one end, then one release, if blocks were given."""

    @initialize(num_ranks=st.integers(1, 3))
    def make(self, num_ranks):
        self.ranks = [Rank(0, index) for index in range(num_ranks)]
        self.abandoned: list[RequestId] = []
        self.table = RequestTable(frozenset(self.ranks), self.abandoned.append, nobody)
        self.live: dict[RequestId, Life] = {}
        self.finished: list[Life] = []

    @rule(request_id=st.sampled_from(IDS), key=st.sampled_from(KEYS), pulls=st.booleans())
    def begin(self, request_id, key, pulls):
        if request_id in self.live:
            with pytest.raises(LocalProtocolError, match="is known already"):
                self.table.begin(request_id, key)
            return
        free = key is None or key not in {life.key for life in self.live.values()}
        assert self.table.begin(request_id, key) is free
        if free:
            received = (Outcome.RECEIVED, Outcome.RECEIVE_FAILED)
            sent = (Outcome.SENT, Outcome.SEND_FAILED)
            self.live[request_id] = Life(*(received if pulls else sent), key)

    @rule(request_id=st.sampled_from(IDS))
    def hand_over(self, request_id):
        life = self.live.get(request_id)
        if life is None or life.handed_over:
            with pytest.raises(LocalProtocolError, match="no blocks to hand over now"):
                self.table.hand_over(request_id)
            return
        self.table.hand_over(request_id)
        life.handed_over = True

    @rule(request_id=st.sampled_from(IDS))
    def abort(self, request_id):
        life = self.live.get(request_id)
        assert self.table.abort(request_id) is (life is not None)
        if life is not None:
            life.aborted = True
            if not life.handed_over:
                self.finish(request_id)

    @precondition(lambda self: any(life.handed_over for life in self.live.values()))
    @rule(data=st.data(), good=st.booleans())
    def one_rank_ends(self, data, good):
        request_id, life = self.draw_handed_over(data)
        rank = data.draw(st.sampled_from(self.ranks))
        if life.ended(rank):
            return
        self.report(request_id, rank, life.success if good else life.failure)

    @precondition(lambda self: any(life.handed_over for life in self.live.values()))
    @rule(data=st.data())
    def one_rank_releases(self, data):
        request_id, life = self.draw_handed_over(data)
        rank = data.draw(st.sampled_from(self.ranks))
        gave_up = life.aborted or request_id in self.abandoned
        if not life.released(rank) and (life.ended(rank) or gave_up):
            self.report(request_id, rank, Outcome.RELEASED)

    @rule(request_id=st.sampled_from(IDS), outcome=st.sampled_from(Outcome))
    def a_late_report(self, request_id, outcome):
        if request_id not in self.live:
            assert self.table.report(self.ranks[0], Report(request_id, outcome)) == []

    @invariant()
    def agrees(self):
        if hasattr(self, "table"):
            assert len(self.table) == len(self.live)

    def teardown(self):
        """Every rank ends and releases everything: only then can promises be judged."""
        if not hasattr(self, "table"):
            return
        for request_id, life in list(self.live.items()):
            if not life.handed_over:
                self.abort(request_id)
                continue
            for rank in self.ranks:
                if not life.ended(rank) and not life.aborted and request_id not in self.abandoned:
                    self.report(request_id, rank, life.success)
                if request_id in self.live and not life.released(rank):
                    self.report(request_id, rank, Outcome.RELEASED)
        assert not self.live and len(self.table) == 0
        for life in self.finished:
            ends = [outcome for outcome in life.told if outcome is not Outcome.RELEASED]
            assert len(ends) == 1 or (life.aborted and len(ends) <= 1)
            assert life.told.count(Outcome.RELEASED) == int(life.handed_over)
            if life.handed_over:
                assert life.told[-1] is Outcome.RELEASED
        assert all(self.table.begin(RequestId(f"new{i}"), key) for i, key in enumerate(KEYS))

    def draw_handed_over(self, data):
        names = [request_id for request_id, life in self.live.items() if life.handed_over]
        request_id = data.draw(st.sampled_from(names))
        return request_id, self.live[request_id]

    def report(self, request_id, rank, outcome):
        life = self.live[request_id]
        expected = self.expected(life, rank, outcome)
        before = len(self.abandoned)
        told = self.table.report(rank, Report(request_id, outcome, f"by {rank}"))
        assert [each.outcome for each in told] == expected
        assert all(each.request_id == request_id for each in told)
        must_give_up = Outcome.RECEIVE_FAILED in expected
        assert self.abandoned[before:] == [request_id] * must_give_up
        life.reports(rank).append(outcome)
        life.told += expected
        if all(life.released(each) for each in self.ranks):
            self.finish(request_id)

    def expected(self, life, rank, outcome):
        earlier = [each for reports in life.by_rank.values() for each in reports]
        if outcome in FAILURES:
            return [] if life.aborted or FAILURES & set(earlier) else [outcome]
        if outcome is not Outcome.RELEASED:
            return []
        if not all(life.released(each) for each in self.ranks if each != rank):
            return []
        all_good = all(life.success in life.reports(each) for each in self.ranks)
        return [life.success] * (all_good and not life.aborted) + [Outcome.RELEASED]

    def finish(self, request_id):
        # A later life of the same name starts anew.
        self.abandoned[:] = [each for each in self.abandoned if each != request_id]
        self.finished.append(self.live.pop(request_id))


TestRequestsAgainstALog = pytest.mark.slow(RequestsAgainstALog.TestCase)
TestRequestsAgainstALog.settings = settings(stateful_step_count=40, max_examples=150)

ONE, TWO = Rank(0, 0), Rank(0, 1)
R = RequestId("r")


BLOCKS = BlocksReserved(R, ((1, 2),), TokenSpan(0, 8))


def both_ranks(abandon=lambda request_id: None, resume=nobody) -> RequestTable:
    table = RequestTable(frozenset({ONE, TWO}), abandon, resume)
    table.begin(R, None)
    table.hand_over(R, BLOCKS)
    return table


def test_blocks_are_recalled_when_the_last_rank_has_given_them_back():
    table = both_ranks()
    assert table.report(ONE, Report(R, Outcome.RECALLED)) == []
    assert table.report(TWO, Report(R, Outcome.RECALLED)) == [Report(R, Outcome.RECALLED)]
    table.hand_over(R, BLOCKS)
    for rank in (ONE, TWO):
        table.report(rank, Report(R, Outcome.RECEIVED))
    assert table.report(ONE, Report(R, Outcome.RELEASED)) == []
    told = table.report(TWO, Report(R, Outcome.RELEASED))
    assert [each.outcome for each in told] == [Outcome.RECEIVED, Outcome.RELEASED]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_was_faster_to_give_up_than_to_receive_receives_as_well(is_first):
    resumed = []
    table = both_ranks(resume=lambda *each: resumed.append(each))
    received = [Report(R, Outcome.RECEIVED), Report(R, Outcome.RELEASED)]
    reports = [(ONE, each) for each in received]
    reports.insert(0 if is_first else 2, (TWO, Report(R, Outcome.RECALLED)))
    assert [table.report(*each) for each in reports] == [[], [], []]
    assert resumed == [(BLOCKS, frozenset({TWO}))]
    assert table.report(TWO, received[0]) == []
    told = table.report(TWO, received[1])
    assert [each.outcome for each in told] == [Outcome.RECEIVED, Outcome.RELEASED]
    assert len(table) == 0


@pytest.mark.parametrize("end", [Outcome.RECEIVE_FAILED, None])
def test_of_a_request_that_has_ended_blocks_are_released_whoever_gives_them_back(end):
    table = both_ranks()
    assert table.report(ONE, Report(R, Outcome.RECALLED)) == []
    if end is None:
        assert table.abort(R)
    else:
        assert table.report(TWO, Report(R, end)) == [Report(R, end)]
    assert table.report(TWO, Report(R, Outcome.RELEASED)) == [Report(R, Outcome.RELEASED)]
    assert len(table) == 0


def test_a_prompt_is_told_to_be_held_once():
    table = both_ranks()
    assert table.report(ONE, Report(R, Outcome.HELD)) == [Report(R, Outcome.HELD)]
    assert table.report(TWO, Report(R, Outcome.HELD)) == []


def test_received_is_told_when_the_last_rank_has_let_go():
    table = both_ranks()
    for rank in (ONE, TWO):
        assert table.report(rank, Report(R, Outcome.RECEIVED)) == []
    assert table.report(ONE, Report(R, Outcome.RELEASED)) == []
    assert table.report(TWO, Report(R, Outcome.RELEASED)) == [
        Report(R, Outcome.RECEIVED),
        Report(R, Outcome.RELEASED),
    ]


@pytest.mark.parametrize(
    ("ones", "twos", "told"), [("a", "a", "a"), ("a", "b", None), ("a", None, None)]
)
def test_a_continuation_is_told_if_all_ranks_have_the_same(ones, twos, told):
    table = both_ranks()
    for rank, continuation in ((ONE, ones), (TWO, twos)):
        table.report(rank, Report(R, Outcome.RECEIVED, continuation=continuation))
        reports = table.report(rank, Report(R, Outcome.RELEASED))
    assert reports[0] == Report(R, Outcome.RECEIVED, continuation=told)


def test_the_first_failed_rank_is_told_at_once_and_makes_the_others_give_up():
    given_up: list[RequestId] = []
    table = both_ranks(given_up.append)
    table.report(ONE, Report(R, Outcome.RECEIVED))
    failed = Report(R, Outcome.RECEIVE_FAILED, "the write failed")
    assert table.report(TWO, failed) == [failed]
    assert given_up == [R]
    assert table.report(TWO, Report(R, Outcome.RELEASED)) == []
    assert table.report(ONE, Report(R, Outcome.RELEASED)) == [Report(R, Outcome.RELEASED)]


def test_giving_up_may_report_back_into_the_table():
    """`abandon` is called outside the lock: it may end in another report at once."""
    nested: list[list[Report]] = []

    def abandon(request_id: RequestId) -> None:
        nested.append(table.report(ONE, Report(request_id, Outcome.RELEASED)))

    table = both_ranks(abandon)
    table.report(TWO, Report(R, Outcome.RECEIVE_FAILED, "why"))
    assert nested == [[]]


def test_a_holder_that_failed_on_one_rank_does_not_stop_the_others():
    given_up: list[RequestId] = []
    table = both_ranks(given_up.append)
    assert len(table.report(ONE, Report(R, Outcome.SEND_FAILED, "why"))) == 1
    assert given_up == []


def test_an_aborted_request_is_told_nothing_but_its_release():
    table = both_ranks()
    assert table.abort(R)
    assert table.report(ONE, Report(R, Outcome.RECEIVE_FAILED, "why")) == []
    assert table.report(TWO, Report(R, Outcome.RECEIVED)) == []
    assert table.report(ONE, Report(R, Outcome.RELEASED)) == []
    assert table.report(TWO, Report(R, Outcome.RELEASED)) == [Report(R, Outcome.RELEASED)]


def test_a_transfer_key_is_free_again_when_its_request_is_gone():
    table = RequestTable(frozenset({ONE}), lambda request_id: None, nobody)
    key = TransferKey(TransferId("t"), 0)
    assert table.begin(R, key)
    assert not table.begin(RequestId("other"), key)
    assert table.abort(R)
    assert table.begin(RequestId("other"), key)
