"""Policies, what they go by, and the breaker: pure, so any state can be drawn."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcourier.errors import ConfigError
from kvcourier.router.breaker import Breaker, BreakerSettings, BreakerState
from kvcourier.router.load import FULL, Load, read_load
from kvcourier.router.policy import POLICIES, Candidate, Need, choose
from kvcourier.router.prompts import PART_TOKENS, PrefixMemory, Prompt, prompt_of

repeatable = settings(derandomize=True, deadline=None)

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        name=st.text("abc", min_size=1, max_size=3),
        usable=st.booleans(),
        reachable=st.booleans(),
        trusted=st.booleans(),
        num_requests=st.integers(0, 5),
        kv_used=st.sampled_from((0.0, 0.5, FULL, 1.0)),
        backlog=st.integers(0, 9),
        num_known=st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)
NEEDS = st.builds(
    Need, st.integers(0, 100), st.integers(0, 9), st.sampled_from(("", "chat-1", "chat-2"))
)
ALL = st.sampled_from(sorted(POLICIES))


@repeatable
@given(ALL, CANDIDATES, NEEDS)
def test_a_choice_is_usable_and_as_good_as_any(
    policy: str, candidates: list[Candidate], need: Need
) -> None:
    index = choose(policy, candidates, need)
    usable = [candidate for candidate in candidates if candidate.usable]
    if index is None:
        assert not usable
        return
    chosen = candidates[index]
    assert chosen.usable
    if any(candidate.reachable for candidate in usable):
        assert chosen.reachable
    if any(candidate.reachable and candidate.trusted for candidate in usable):
        assert chosen.trusted
    assert choose(policy, candidates, need) == index, "the same question, another answer"


@repeatable
@given(ALL, st.integers(1, 6), st.integers(0, 20))
def test_equal_candidates_take_turns(policy: str, size: int, first: int) -> None:
    candidates = [Candidate(name=str(number)) for number in range(size)]
    chosen = [choose(policy, candidates, Need(first + step)) for step in range(size)]
    assert sorted(index for index in chosen if index is not None) == list(range(size))


@repeatable
@given(CANDIDATES, NEEDS)
def test_load_only_a_lighter_one_is_preferred(candidates: list[Candidate], need: Need) -> None:
    index = choose("least_loaded", candidates, need)
    if index is None:
        return
    chosen = candidates[index]
    rivals = [
        one
        for one in candidates
        if one.usable
        and (one.reachable, one.trusted) == (chosen.reachable, chosen.trusted)
        and not (one.is_full and not chosen.is_full)
    ]
    assert all(chosen.num_requests <= one.num_requests for one in rivals if not one.is_full) or (
        chosen.is_full
    )


def test_a_full_one_comes_last() -> None:
    candidates = [Candidate(num_requests=1, kv_used=FULL), Candidate(num_requests=7)]
    for policy in ("least_loaded", "prefix_aware", "conversation"):
        need = Need(conversation="c" if policy == "conversation" else "")
        assert choose(policy, candidates, need) == 1


@repeatable
@given(CANDIDATES, NEEDS)
def test_prefix_the_choice_has_least_to_compute(candidates: list[Candidate], need: Need) -> None:
    index = choose("prefix_aware", candidates, need)
    if index is None:
        return

    def to_compute(one: Candidate) -> int:
        return one.backlog + max(0, need.num_parts - one.num_known)

    chosen = candidates[index]
    for one in candidates:
        equal = (one.usable, one.reachable, one.trusted, one.is_full) == (
            chosen.usable,
            chosen.reachable,
            chosen.trusted,
            chosen.is_full,
        )
        assert not equal or to_compute(chosen) <= to_compute(one)


@repeatable
@given(st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=2, max_size=6), st.data())
def test_a_conversation_stays_unless_its_instance_goes(names: set[str], data: Any) -> None:
    need = Need(data.draw(st.integers(0, 9)), conversation=data.draw(st.text(max_size=5)) or "c")
    before = [Candidate(name=name, num_requests=len(name)) for name in sorted(names)]
    home = choose("conversation", before, need)
    assert home is not None
    for gone in range(len(before)):
        after = before[:gone] + before[gone + 1 :]
        moved = choose("conversation", after, Need(7, conversation=need.conversation))
        assert moved is not None
        if gone != home:
            assert after[moved].name == before[home].name


def test_conversations_spread() -> None:
    candidates = [Candidate(name=f"http://d{number}:8200") for number in range(4)]
    homes = [
        choose("conversation", candidates, Need(conversation=f"chat-{each}")) for each in range(400)
    ]
    assert all(60 <= homes.count(index) <= 140 for index in range(4))


# Prompts.


def test_the_size_of_a_prompt() -> None:
    assert prompt_of({"prompt": [1] * 130}).num_tokens == 130
    assert prompt_of({"prompt": [[1] * 130]}) == prompt_of({"prompt": [1] * 130})
    assert prompt_of({"prompt": "x" * 400}).num_tokens == 100
    assert prompt_of({"prompt": ["x" * 400]}) == prompt_of({"prompt": "x" * 400})
    assert prompt_of({}).num_tokens == 0
    assert prompt_of({"prompt": [1] * 130}).num_parts == 3
    assert len(prompt_of({"prompt": [1] * 130}).parts) == 2


@repeatable
@given(
    st.one_of(
        st.lists(st.integers(-5, 2**40), max_size=300),
        st.text(max_size=900),
        st.lists(st.one_of(st.text(max_size=9), st.lists(st.integers())), max_size=3),
        st.none(),
        st.integers(),
    ),
    st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=400)), max_size=4),
)
def test_any_body_has_a_prompt_of_bounded_size(prompt: Any, messages: Any) -> None:
    for body in ({"prompt": prompt}, {"messages": messages}, {"prompt": prompt, "model": [1]}):
        found = prompt_of(body)
        assert len(found.parts) <= found.num_parts
        assert found == prompt_of(dict(body))


@repeatable
@given(st.integers(0, 400), st.integers(0, 200), st.integers(0, 200))
def test_prompts_that_begin_alike_share_their_parts(shared: int, one: int, other: int) -> None:
    left = prompt_of({"prompt": [7] * shared + [1] * one})
    right = prompt_of({"prompt": [7] * shared + [2] * other})
    memory = PrefixMemory(1000)
    memory.add(left)
    least = shared // PART_TOKENS
    assert memory.num_known(left) == len(left.parts)
    known = memory.num_known(right)
    assert known == min(least, len(right.parts)) or (not one or not other)
    assert known <= len(right.parts)


def test_a_further_turn_begins_like_the_one_before() -> None:
    turn = {"role": "user", "content": "tell me " * 200}
    first = prompt_of({"messages": [turn]})
    second = prompt_of({"messages": [turn, {"role": "assistant", "content": "no"}, turn]})
    assert first.parts == second.parts[: len(first.parts)] != ()
    assert prompt_of({"messages": [turn], "model": "other"}).parts != first.parts
    assert prompt_of({"messages": [turn], "cache_salt": "mine"}).parts != first.parts


@repeatable
@given(st.integers(1, 20), st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=12))
def test_memory_is_bounded_and_keeps_the_latest(limit: int, prompts: list[list[int]]) -> None:
    memory = PrefixMemory(limit)
    for ids in prompts:
        prompt = prompt_of({"prompt": [each for each in ids for _ in range(PART_TOKENS)]})
        memory.add(prompt)
        assert len(memory) <= limit
        assert memory.num_known(prompt) == min(limit, len(prompt.parts))
    memory.clear()
    assert memory.num_known(Prompt(1, (1,))) == 0


# Load.

OURS = """\
# HELP kvcourier:num_requests_running Requests in the running batch.
# TYPE kvcourier:num_requests_running gauge
kvcourier:num_requests_running{model_name="tiny"} 3.0
kvcourier:num_requests_waiting{model_name="tiny"} 2.0
kvcourier:num_requests_waiting_remote{model_name="tiny"} 1.0
kvcourier:kv_cache_usage_perc{model_name="tiny"} 0.25
kvcourier_holds{rank="pp0tp0"} 9
"""
VLLM = """\
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.125
vllm:num_requests_waiting_by_reason{engine="0"} 77
"""


def test_loads_of_both_engines() -> None:
    assert read_load(OURS) == Load(6, 0.25)
    assert read_load(VLLM) == Load(7, 0.5)
    assert read_load(VLLM, dp_rank=1) == Load(1, 0.125)
    assert read_load('vllm:gpu_cache_usage_perc{model_name="m"} 0.75\n') == Load(0, 0.75)
    assert read_load("kvcourier_holds 3\n") is None
    assert read_load("vllm:num_requests_running nan\nvllm:kv_cache_usage_perc -1\n") is None


@repeatable
@given(st.text(max_size=60))
def test_any_page_is_read_or_refused(text: str) -> None:
    for page in (text, f"vllm:num_requests_running{text}", f"vllm:num_requests_running {text}"):
        try:
            load = read_load(page)
        except ValueError:
            continue
        assert load is None or (load.num_requests >= 0 and 0 <= load.kv_used <= 1)


# The breaker.


class BreakerMachine(RuleBasedStateMachine):
    """Against the plain rules: opens after failures in a row, probes one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = BreakerSettings(failures=3, open_s=5.0, max_open_s=20.0)
        self.breaker = Breaker(self.settings)
        self.now = 100.0
        self.in_a_row = 0
        self.opened_at: float | None = None
        self.open_s = 5.0
        self.probing = False

    @rule(seconds=st.sampled_from((0.1, 1.0, 5.0, 21.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_request_begins(self) -> None:
        self.breaker.begin(self.now)
        if self.model() is BreakerState.PROBING:
            self.probing = True

    @rule()
    def one_succeeds(self) -> None:
        self.breaker.succeeded()
        self.in_a_row, self.opened_at, self.open_s, self.probing = 0, None, 5.0, False

    @rule()
    def one_fails(self) -> None:
        state = self.model()
        self.breaker.failed(self.now)
        self.in_a_row += 1
        if state is BreakerState.PROBING:
            self.open_s = min(self.open_s * 2, 20.0)
            self.opened_at, self.probing = self.now, False
        elif state is BreakerState.CLOSED and self.in_a_row >= 3:
            self.opened_at, self.probing = self.now, False

    @rule()
    def one_is_cancelled(self) -> None:
        self.breaker.ended()
        self.probing = False

    def model(self) -> BreakerState:
        if self.opened_at is None:
            return BreakerState.CLOSED
        is_open = self.now < self.opened_at + self.open_s
        return BreakerState.OPEN if is_open else BreakerState.PROBING

    @invariant()
    def they_agree(self) -> None:
        state = self.model()
        assert self.breaker.state(self.now) is state
        expected = state is BreakerState.CLOSED or (
            state is BreakerState.PROBING and not self.probing
        )
        assert self.breaker.allows(self.now) == expected


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(derandomize=True, deadline=None, max_examples=60)


def test_a_breaker_can_be_turned_off() -> None:
    breaker = Breaker(BreakerSettings(failures=0))
    for _ in range(100):
        breaker.failed(1.0)
    assert breaker.allows(1.0)


@pytest.mark.parametrize(
    "wrong", [{"failures": -1}, {"open_s": 0.0}, {"open_s": 9.0, "max_open_s": 1.0}]
)
def test_settings_of_a_breaker_must_make_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="breaker"):
        BreakerSettings(**wrong)
