"""What vLLM's scheduler hooks mean for the turns of conversations."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvcourier.config import Limits
from kvcourier.core.events import (
    BlocksReserved,
    HoldBegun,
    PrefillFinished,
    RequestAborted,
    WantBegun,
    WantDeclined,
)
from kvcourier.core.histories import Miss
from kvcourier.core.params import HoldIntent, PullIntent, parse_params
from kvcourier.ids import EngineId, InstanceAddress, TransferId
from kvcourier.layout import TokenSpan
from kvcourier.runtime.asking import Asker, NoAnswer
from kvcourier.vllm_connector.block_tables import BlockTable
from kvcourier.vllm_connector.scheduler_side import SchedulerSide
from kvcourier.vllm_connector.settings import TurnSettings
from vllm_connector.test_scheduler_side import BLOCK, PUSH, Rank0, finish, make_side

THRESHOLD = 32
LIMIT_S = 60.0
ON = {"turns": TurnSettings(ttl_s=60.0, threshold=THRESHOLD)}
TOKENS = list(range(100, 200))


@dataclass
class Request:
    """What the hooks read of vLLM's request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] = field(default_factory=lambda: TOKENS[:40])
    output: list[int] = field(default_factory=list)
    max_tokens: int = 5
    status: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    cache_salt: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        # With asynchronous scheduling the step after the last one has begun.
        return self.num_tokens


@pytest.fixture
def rank() -> Iterator[Rank0]:
    rank = Rank0()
    yield rank
    rank.close()


@pytest.fixture
def side(rank: Rank0) -> Iterator[SchedulerSide]:
    side = make_side(rank, **ON)
    yield side
    side.close()


def heard(rank: Rank0) -> list[Any]:
    calls = []
    while not rank.silent():
        calls.append(rank.next())
    return calls


def kept(side: SchedulerSide, rank: Rank0, name: str, **fields: Any) -> dict[str, Any]:
    """D serves a turn; what its answer says. Of before nothing is heard any more."""
    heard(rank)
    params = PUSH | {"transfer_id": f"t-{name}"} | fields.pop("params", {})
    request = Request(name, params, **fields)
    side.on_new_request(request)
    assert isinstance(rank.next(), WantBegun)
    count = side.num_external_tokens(request, 0)
    side.on_allocated(request, ([1, 2, 3],), count)
    assert isinstance(rank.next(), BlocksReserved)
    side.on_results({name}, set())
    request.output = TOKENS[len(request.prompt_token_ids) : 61]
    lent, told = finish(side, request, "FINISHED_LENGTH_CAPPED", [1, 2, 3, 4])
    assert lent == (told is not None)
    return told or {}


def test_an_answer_is_kept_and_the_next_turn_understands_what_is_said_of_it(side, rank) -> None:
    told = kept(side, rank, "d1")
    begun, finished = heard(rank)
    assert isinstance(begun, HoldBegun) and begun.request_id == "d1/kept" and begun.key is None
    # 61 tokens are known, the last was not computed.
    assert finished == PrefillFinished("d1/kept", ((1, 2, 3, 4),), 60, keep_s=60.0)
    intent = parse_params(told, Limits())
    assert isinstance(intent, HoldIntent) and intent.history is not None
    assert intent.history.is_proven and intent.history.source.hold_id == begun.hold_id
    assert intent.history.proof is not None and intent.history.proof.num_proven(TOKENS) == 48
    # Its blocks come back under the name that vLLM knows.
    sent = {"d1"}
    side.on_results(set(), sent)
    assert sent == {"d1"}
    assert side.take_counts() == {"num_histories_kept": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"params": {"keep_history": False}},
        {"lora_request": SimpleNamespace()},
        {"mm_features": (1,)},
        {"prompt_token_ids": TOKENS[:3]},
    ],
    ids=str,
)
def test_what_is_not_kept(side, rank, fields) -> None:
    if "prompt_token_ids" in fields:
        request = Request("d1", PUSH, **fields)
        side.on_new_request(request)
        side.on_allocated(request, ([1],), 0)
        assert finish(side, request, "FINISHED_STOPPED", [1]) == (False, None)
    else:
        assert kept(side, rank, "d1", **fields) == {}
    assert not any(isinstance(call, HoldBegun) for call in heard(rank))


@pytest.mark.parametrize("changes", [{}, {"tables": (BlockTable(0, BLOCK, 1, 32),), **ON}], ids=str)
def test_where_nothing_is_kept(rank, changes) -> None:
    side = make_side(rank, **changes)
    assert kept(side, rank, "d1") == {}
    side.close()


def asked(side: SchedulerSide, *questions: tuple[str, int]) -> list[Any]:
    """What whoever asks the side channel for these turns is told, in plain values."""
    host, port = side.side_channel
    with Asker(EngineId("router"), None, LIMIT_S) as asker:
        told = [
            asker.history(InstanceAddress(EngineId("p"), host, port), TransferId(name), part)
            for name, part in questions
        ]
    return [None if each is None else json.loads(each) for each in told]


def test_who_knows_the_dispatch_is_told_what_its_answer_says_while_it_is_kept(side, rank) -> None:
    first, second = kept(side, rank, "d1"), kept(side, rank, "d2", params={"part": 1})
    questions = ("t-d1", 0), ("t-d2", 1), ("t-d2", 0), ("d1", 0)
    assert asked(side, *questions) == [first, second, None, None]
    side.on_results(set(), {"d1"})
    assert asked(side, *questions) == [None, second, None, None]


def test_what_is_given_up_is_not_told_any_more(rank) -> None:
    with contextlib.closing(make_side(rank, num_blocks=100, **ON)) as side:
        kept(side, rank, "d1")
        side.step_news(output("r1"))
        assert asked(side, ("t-d1", 0)) == [None]


def test_two_of_one_dispatch_do_not_take_each_others_word_away(side, rank) -> None:
    name = {"transfer_id": "t", "remote_request_id": "r1"}
    kept(side, rank, "d1", params=name)
    second = kept(side, rank, "d2", params=name)
    side.on_results(set(), {"d1"})
    assert asked(side, ("t", 0)) == [second]


@pytest.mark.parametrize(
    "settings", [{}, {"turns": TurnSettings(60.0, THRESHOLD, tells=False)}], ids=["off", "quiet"]
)
def test_an_instance_that_tells_nothing_says_so_at_once(rank, settings) -> None:
    with contextlib.closing(make_side(rank, **settings)) as side:
        kept(side, rank, "d1")
        with pytest.raises(NoAnswer, match="not answered by this instance"):
            asked(side, ("t-d1", 0))


def test_an_abort_keeps_nothing(side, rank) -> None:
    request = Request("d1", PUSH)
    side.on_new_request(request)
    side.on_allocated(request, ([1, 2, 3],), side.num_external_tokens(request, 0))
    side.on_results({"d1"}, set())
    assert finish(side, request, "FINISHED_ABORTED", [1, 2, 3]) == (False, None)


def history_of(side: SchedulerSide, rank: Rank0, **changes: Any) -> dict[str, Any]:
    told = kept(side, rank, "d1")
    side.on_results(set(), {"d1"})
    heard(rank)
    side.take_counts()
    return told | {"transfer_id": "turn-2"} | changes


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_history_is_fetched_into_the_blocks_that_are_missing(side, rank, mode) -> None:
    request = Request("p1", history_of(side, rank, transfer_mode=mode), TOKENS[:90])
    side.on_new_request(request)
    hold, want = heard(rank)
    assert isinstance(hold, HoldBegun) and hold.request_id == "p1"
    assert isinstance(want, WantBegun) and want.request_id == "p1/fetched"
    assert isinstance(want.intent, PullIntent)
    assert want.intent.is_written is (mode == "push")
    assert side.num_external_tokens(request, 0) == 48
    assert side.num_external_tokens(request, BLOCK) == 32
    side.on_allocated(request, ([9, 8, 7, 6, 5, 4],), 32)
    assert rank.next() == BlocksReserved("p1/fetched", ((8, 7),), TokenSpan(16, 48))
    assert side.num_external_tokens(request, 0) == 0, "it comes once"
    received = {"p1"}
    side.on_results(received, set())
    assert received == {"p1"}
    lent, params = finish(side, request, "FINISHED_LENGTH_CAPPED", [9, 8, 7, 6, 5, 4])
    assert lent and params is not None and params["do_remote_prefill"] is True
    assert rank.next() == PrefillFinished("p1", ((9, 8, 7, 6, 5, 4),), 90)
    assert side.take_counts() == {}


def test_what_is_cached_is_not_fetched(side, rank) -> None:
    request = Request("p1", history_of(side, rank), TOKENS[:90])
    side.on_new_request(request)
    heard(rank)
    assert side.num_external_tokens(request, 2 * BLOCK) == 0
    side.on_allocated(request, ([9, 8, 7, 6, 5, 4],), 0)
    assert rank.next() == WantDeclined("p1/fetched")
    assert side.take_counts() == {f"num_history_misses_{Miss.NOT_NEEDED}": 1}


@pytest.mark.parametrize(
    ("changes", "prompt", "miss", "is_let_go"),
    [
        ({}, [7, *TOKENS[1:90]], Miss.REWRITTEN, True),
        ({}, TOKENS[:20], Miss.NOT_NEEDED, True),
        ({"remote_digests": None}, TOKENS[:90], Miss.UNPROVEN, False),
        ({"remote_hold_id": None}, TOKENS[:90], Miss.UNPROVEN, False),
    ],
    ids=str,
)
def test_a_history_that_is_not_used(side, rank, changes, prompt, miss, is_let_go) -> None:
    request = Request("p1", history_of(side, rank, **changes), prompt)
    side.on_new_request(request)
    calls = heard(rank)
    assert [type(call) for call in calls[1:]] == ([WantBegun, WantDeclined] if is_let_go else [])
    assert side.num_external_tokens(request, 0) == 0
    assert side.take_counts() == {f"num_history_misses_{miss}": 1}


def test_an_instance_that_fetches_none_lets_it_go(side, rank) -> None:
    params = history_of(side, rank)
    off = make_side(rank)
    off.on_new_request(Request("p1", params, TOKENS[:90]))
    assert [type(call) for call in heard(rank)] == [HoldBegun, WantBegun, WantDeclined]
    assert off.take_counts() == {f"num_history_misses_{Miss.OFF}": 1}
    off.close()


def test_another_salt_is_another_history(side, rank) -> None:
    request = Request("p1", history_of(side, rank), TOKENS[:90], cache_salt="somebody else")
    side.on_new_request(request)
    assert side.num_external_tokens(request, 0) == 0
    assert side.take_counts() == {f"num_history_misses_{Miss.REWRITTEN}": 1}


def test_an_abort_while_it_comes_returns_the_blocks_once(side, rank) -> None:
    request = Request("p1", history_of(side, rank), TOKENS[:90])
    side.on_new_request(request)
    side.on_allocated(request, ([9, 8, 7, 6, 5, 4],), side.num_external_tokens(request, 0))
    heard(rank)
    lent, params = finish(side, request, "FINISHED_ABORTED", [9, 8, 7, 6, 5, 4])
    # vLLM keeps the blocks of a request that is receiving until it is named as received.
    assert (lent, params) == (False, None)
    assert heard(rank) == [RequestAborted("p1/fetched"), RequestAborted("p1")]
    received, sent = {"p1"}, {"p1"}
    side.on_results(received, set())
    assert received == {"p1"}
    side.on_results(set(), sent)
    assert sent == set(), "nothing is owed any more"


def output(*preempted: str) -> SimpleNamespace:
    nothing = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return SimpleNamespace(
        num_scheduled_tokens={},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=nothing,
        preempted_req_ids=set(preempted),
    )


def test_what_is_kept_is_given_up_when_blocks_run_out_the_oldest_first(rank) -> None:
    side = make_side(rank, num_blocks=100, **ON)
    for name in ("d1", "d2", "d3"):
        assert kept(side, rank, name)
    heard(rank)
    waiting = Request("r1", None)
    # It was asked about, and got its blocks.
    side.num_external_tokens(waiting, 0)
    side.on_allocated(waiting, ([5],), 0)
    side.step_news(output())
    assert heard(rank) == []
    # It was asked about, and got none.
    side.num_external_tokens(waiting, 0)
    side.step_news(output())
    assert heard(rank) == [RequestAborted("d1/kept")]
    side.step_news(output("r2"))
    assert heard(rank) == [RequestAborted("d2/kept")]
    assert side.take_counts()["num_histories_given_up"] == 2
    side.close()


def test_who_is_passed_over_takes_nothing_from_what_is_kept(rank) -> None:
    with contextlib.closing(make_side(rank, num_blocks=100, largest=98, **ON)) as side:
        params = PUSH | {"transfer_id": "early"}
        waiting = Request("early", params)
        side.on_new_request(waiting)
        side.on_held({"d1"})
        pull = {"remote_request_id": "r1", "remote_block_ids": [[4, 5, 6]]}
        assert kept(side, rank, "d1", params=pull)
        heard(rank)
        assert side.num_external_tokens(waiting, 0) is None
        side.step_news(output())
        assert heard(rank) == []


def test_at_most_half_of_the_blocks_are_kept(rank) -> None:
    side = make_side(rank, num_blocks=20, **ON)
    for name in ("d1", "d2", "d3"):
        assert kept(side, rank, name)
    assert RequestAborted("d1/kept") in heard(rank)
    side.close()
