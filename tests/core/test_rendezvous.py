"""Rendezvous against a linear scan that spells the rules out, and the examples behind the rules."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcourier.core.messages import HoldName
from kvcourier.core.rendezvous import Claim, Rendezvous, strip_suffix
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import RequestId, TransferId, TransferKey

HOLDS = [RequestId(each) for each in ("a", "a-0000000a", "a-0000000b", "b-0000000a", "c")]
KEYS = [None, *(TransferKey(TransferId(t), part) for t, part in (("t1", 0), ("t1", 1), ("t2", 0)))]
NAMED = [None, "a", "a-0000000a", "b", "b-0000000f", "c", "nobody"]
WANTED = [RequestId(each) for each in ("a-000000d1", "a-000000d2", "b-000000d1", "c", "other")]


def claim(
    *,
    key: TransferKey | None = None,
    named: str | None = None,
    wanted: str = "other",
    engine: str = "d",
) -> Claim:
    name = HoldName(key.transfer_id if key else None, key.part if key else 0, named)
    return Claim(name, (engine, "life", wanted), RequestId(wanted))


claims = st.builds(
    lambda key, named, wanted, engine: claim(key=key, named=named, wanted=wanted, engine=engine),
    st.sampled_from(KEYS),
    st.sampled_from(NAMED),
    st.sampled_from(WANTED),
    st.sampled_from(["d", "e"]),
)


@dataclass
class Scan:
    """The rules, one after the other, over plain lists."""

    holds: list[tuple[str, TransferKey | None]]
    waiting: list[tuple[object, Claim]]

    def find(self, wanted: Claim) -> str | None:
        key, named = wanted.name.key(), wanted.name.request_id
        # 1. The exact transfer id.
        for request_id, held in self.holds:
            if key is not None and held == key:
                return request_id
        # Two transfer ids that differ never match: such holds are out of the question from here.
        possible = [request_id for request_id, held in self.holds if key is None or held is None]
        # 2. The exact request id.
        if named is not None and any(request_id == named for request_id, _ in self.holds):
            return named if named in possible else None
        # 3. Stripped request ids, if one hold and one wanter can be meant.
        stems = plain_stems(wanted)
        found = [request_id for request_id in possible if plain_strip(request_id) in stems]
        rivals = [
            other
            for _, other in self.waiting
            if other.wanter != wanted.wanter and stems & plain_stems(other)
        ]
        return found[0] if len(found) == 1 and not rivals else None


def plain_strip(request_id: str) -> str:
    stem, dash, tail = request_id[:-9], request_id[-9:-8], request_id[-8:]
    is_suffix = dash == "-" and len(tail) == 8 and set(tail) <= set("0123456789abcdef")
    return stem if is_suffix else request_id


def plain_stems(each: Claim) -> set[str]:
    stems = {plain_strip(each.wanter_request_id)}
    if each.name.request_id:
        stems.add(plain_strip(each.name.request_id))
    return stems


class RendezvousAgainstAScan(RuleBasedStateMachine):
    """A registration is (its wanter, a rank); it looks first and waits if nothing is found."""

    def __init__(self) -> None:
        super().__init__()
        self.rendezvous: Rendezvous[object] = Rendezvous()
        self.scan = Scan([], [])
        self.num_met = 0

    @rule(request_id=st.sampled_from(HOLDS), key=st.sampled_from(KEYS))
    def open_and_meet(self, request_id, key):
        ids = [held for held, _ in self.scan.holds]
        keys = [held for _, held in self.scan.holds if held is not None]
        if request_id in ids or key in keys:
            with pytest.raises(LocalProtocolError, match="is held already"):
                self.rendezvous.open(request_id, key)
            return
        self.rendezvous.open(request_id, key)
        self.scan.holds.append((request_id, key))
        self.meet(request_id)

    def meet(self, request_id):
        expected = [r for r, each in self.scan.waiting if self.scan.find(each) == request_id]
        assert self.rendezvous.meet(request_id) == expected
        # S3: what has met a hold waits for no other.
        self.scan.waiting = [entry for entry in self.scan.waiting if entry[0] not in expected]

    @precondition(lambda self: self.scan.holds)
    @rule(data=st.data())
    def close(self, data):
        request_id, key = data.draw(st.sampled_from(self.scan.holds))
        self.rendezvous.close(request_id)
        self.scan.holds.remove((request_id, key))

    @rule()
    def close_an_unknown_one(self):
        self.rendezvous.close(RequestId("never opened"))

    @rule(wanted=claims, rank=st.integers(0, 1))
    def register(self, wanted, rank):
        found = self.rendezvous.find(wanted)
        assert found == self.scan.find(wanted)
        if found is not None:
            held = dict(self.scan.holds)[found]
            assert wanted.name.key() in (None, held) or held is None
            return
        registration = (wanted.wanter, rank)
        self.rendezvous.wait(registration, wanted)
        for index, (known, _) in enumerate(self.scan.waiting):
            if known == registration:
                self.scan.waiting[index] = (registration, wanted)
                return
        self.scan.waiting.append((registration, wanted))

    @precondition(lambda self: self.scan.waiting)
    @rule(data=st.data())
    def withdraw(self, data):
        entry = data.draw(st.sampled_from(self.scan.waiting))
        self.rendezvous.withdraw(entry[0])
        self.rendezvous.withdraw(entry[0])
        self.scan.waiting.remove(entry)

    @precondition(lambda self: self.scan.holds)
    @rule(data=st.data())
    def look_again(self, data):
        self.meet(data.draw(st.sampled_from(self.scan.holds))[0])

    @invariant()
    def agrees(self):
        assert self.rendezvous.num_waiting == len(self.scan.waiting)
        assert all(registration in self.rendezvous for registration, _ in self.scan.waiting)


TestRendezvousAgainstAScan = pytest.mark.slow(RendezvousAgainstAScan.TestCase)
TestRendezvousAgainstAScan.settings = settings(stateful_step_count=30, max_examples=150)


@given(request_id=st.sampled_from(HOLDS), key=st.sampled_from(KEYS), wanted=claims)
def test_either_side_may_come_first(request_id, key, wanted):
    """vllm#43509: an early notification was dropped as unknown."""
    hold_first: Rendezvous[str] = Rendezvous()
    hold_first.open(request_id, key)
    registration_first: Rendezvous[str] = Rendezvous()
    registration_first.wait("r", wanted)
    registration_first.open(request_id, key)
    found = hold_first.find(wanted)
    assert registration_first.meet(request_id) == (["r"] if found == request_id else [])


def opened(*holds: tuple[str, TransferKey | None]) -> Rendezvous[str]:
    rendezvous: Rendezvous[str] = Rendezvous()
    for request_id, key in holds:
        rendezvous.open(RequestId(request_id), key)
    return rendezvous


T1, T1_PART_1, T2 = KEYS[1:]


def test_the_transfer_id_wins_over_all_request_ids():
    rendezvous = opened(("a-0000000a", T1), ("a-0000000b", None))
    assert rendezvous.find(claim(key=T1, named="a-0000000b", wanted="a")) == "a-0000000a"


def test_parts_of_one_transfer_are_different_keys():
    rendezvous = opened(("a", T1), ("b", T1_PART_1))
    assert rendezvous.find(claim(key=T1_PART_1, wanted="a")) == "b"


@pytest.mark.parametrize("named", ["a-0000000a", "a", None])
def test_different_transfer_ids_never_match(named):
    """A retry has a new transfer id: it must not get the KV of the attempt before."""
    rendezvous = opened(("a-0000000a", T1))
    assert rendezvous.find(claim(key=T2, named=named, wanted="a-000000d1")) is None


def test_a_transfer_id_on_one_side_only_leaves_the_request_id():
    assert opened(("a-0000000a", None)).find(claim(key=T1, named="a")) == "a-0000000a"
    assert opened(("a-0000000a", T1)).find(claim(named="a-0000000a")) == "a-0000000a"


def test_the_exact_request_id_wins_over_stripped_ones():
    """vllm#27987: suffixes appeared and matching went fuzzy."""
    rendezvous = opened(("a-0000000a", None), ("a-0000000b", None))
    assert rendezvous.find(claim(named="a-0000000b", wanted="a")) == "a-0000000b"


def test_stripped_request_ids_match_while_one_hold_can_be_meant():
    rendezvous = opened(("a-0000000a", None), ("b-0000000a", None))
    assert rendezvous.find(claim(wanted="a-000000d1")) == "a-0000000a"
    rendezvous.open(RequestId("a-0000000b"), None)
    assert rendezvous.find(claim(wanted="a-000000d1")) is None
    rendezvous.close(RequestId("a-0000000a"))
    assert rendezvous.find(claim(wanted="a-000000d1")) == "a-0000000b"


def test_two_wanters_of_one_stem_make_it_ambiguous():
    rendezvous: Rendezvous[str] = Rendezvous()
    rendezvous.wait("r1", claim(wanted="a-000000d1"))
    rendezvous.wait("r2", claim(wanted="a-000000d2"))
    rendezvous.open(RequestId("a-0000000a"), None)
    assert rendezvous.meet(RequestId("a-0000000a")) == []
    assert rendezvous.find(claim(wanted="a-000000d3")) is None
    rendezvous.withdraw("r2")
    assert rendezvous.meet(RequestId("a-0000000a")) == ["r1"]


def test_ranks_of_one_request_are_no_rivals():
    rendezvous: Rendezvous[str] = Rendezvous()
    for rank in ("tp0", "tp1"):
        rendezvous.wait(rank, claim(wanted="a-000000d1"))
    rendezvous.open(RequestId("a-0000000a"), None)
    assert rendezvous.meet(RequestId("a-0000000a")) == ["tp0", "tp1"]


def test_a_key_is_free_again_after_its_hold_has_closed():
    rendezvous = opened(("a", T1))
    with pytest.raises(LocalProtocolError):
        rendezvous.open(RequestId("b"), T1)
    rendezvous.close(RequestId("a"))
    rendezvous.open(RequestId("b"), T1)
    assert rendezvous.find(claim(key=T1)) == "b"


@pytest.mark.parametrize(
    ("request_id", "stem"),
    [
        ("cmpl-1-0123abcd", "cmpl-1"),
        ("cmpl-1-0123abcd-89abcdef", "cmpl-1-0123abcd"),
        ("cmpl-1-0123ABCD", "cmpl-1-0123ABCD"),
        ("cmpl-1-0123abc", "cmpl-1-0123abc"),
        ("cmpl-1-0123abcde", "cmpl-1-0123abcde"),
        ("0123abcd", "0123abcd"),
    ],
)
def test_only_the_suffix_of_one_engine_is_stripped(request_id, stem):
    assert strip_suffix(request_id) == stem


def test_a_suffix_ends_the_id():
    assert strip_suffix("a-0000000a\n") == "a-0000000a\n"
