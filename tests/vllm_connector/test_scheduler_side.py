"""vLLM's scheduler hooks, and the calls that reach a courier's socket."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvcourier.config import EndpointConfig, Granularity, Limits
from kvcourier.core.events import (
    BlocksReserved,
    HoldBegun,
    PrefillFinished,
    RequestAborted,
    WantBegun,
    WantDeclined,
)
from kvcourier.core.handshake import facts_of, rank_offer
from kvcourier.core.params import PullIntent, parse_params
from kvcourier.ids import AgentName, EngineId, Incarnation, Rank
from kvcourier.layout import RankCache, TokenSpan, instance_geometries
from kvcourier.runtime.engine_link import decode_call, new_token
from kvcourier.vllm_connector.block_tables import BlockTable
from kvcourier.vllm_connector.scheduler_side import SchedulerSide
from kvcourier.vllm_connector.settings import ConnectorSettings
from layout_builders import make_instance, model_cache, one_group

BLOCK = 16
LIMIT_MS = 10_000
PUSH = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "transfer_id": "t1",
}


@dataclass
class Request:
    """What the hooks read of vLLM's request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int = 40
    max_tokens: int = 5
    prompt_token_ids: list[int] | None = None
    status: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))


class Rank0:
    """A courier's socket that keeps what it hears."""

    def __init__(self) -> None:
        self.token = new_token()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    def next(self) -> object:
        assert self._socket.poll(LIMIT_MS), "no call came"
        return decode_call(self._socket.recv_multipart()[-1], self.token, Limits())

    def silent(self) -> bool:
        return not self._socket.poll(50)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def rank() -> Iterator[Rank0]:
    rank = Rank0()
    yield rank
    rank.close()


def make_side(
    rank: Rank0,
    tables: tuple[BlockTable, ...] = (BlockTable(0, BLOCK),),
    num_blocks: int = 1000,
    largest: int = 0,
    **changes: Any,
) -> SchedulerSide:
    config = EndpointConfig(EngineId("p"), "m", side_channel_host="127.0.0.1", side_channel_port=0)
    values = {"tp_size": 1, "recompute_threshold": 0, "may_receive": True} | changes
    side = SchedulerSide(
        ConnectorSettings(endpoint=config, incarnation=Incarnation("life"), **values),
        num_blocks,
        largest,
    )
    geometries = instance_geometries(model_cache(), 1)
    cache, _ = make_instance(geometries)[Rank(0, 0)]
    offer = SimpleNamespace(
        offer=rank_offer(RankCache((cache,)), AgentName("a"), b"metadata", rank.port),
        tables=tables,
        facts=facts_of("m", one_group(geometries)),
        host="127.0.0.1",
        port=rank.port,
        token=rank.token,
    )
    side.connect_workers({(0, 0): offer})
    return side


@pytest.fixture
def side(rank: Rank0) -> Iterator[SchedulerSide]:
    side = make_side(rank)
    yield side
    side.close()


def finish(side: SchedulerSide, request: Request, status: str, blocks: list[int]):
    request.status = SimpleNamespace(name=status)
    return side.on_finished(request, (blocks,))


def test_a_held_prompt_is_handed_over_with_params_that_a_decode_instance_reads(side, rank) -> None:
    request = Request("r1", {"do_remote_decode": True, "transfer_id": "t1"})
    side.on_new_request(request)
    begun = rank.next()
    assert isinstance(begun, HoldBegun)
    assert side.num_external_tokens(request, 0) == 0
    lent, params = finish(side, request, "FINISHED_LENGTH_CAPPED", [4, 2, 7])
    assert lent
    assert rank.next() == PrefillFinished("r1", ((4, 2, 7),), 40)
    intent = parse_params(params, Limits())
    assert isinstance(intent, PullIntent)
    assert intent.hold_id == begun.hold_id
    assert intent.block_ids == ((4, 2, 7),)
    assert intent.incarnation == "life"


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_a_held_prompt_that_ends_badly_is_given_up_at_once(rank, status, granularity) -> None:
    """Where chunks of it may be on their way, its blocks stay out of use until they are sent."""
    with contextlib.closing(make_side(rank, granularity=granularity)) as side:
        request = Request("r1", {"do_remote_decode": True})
        side.on_new_request(request)
        rank.next()
        lent = granularity is not Granularity.REQUEST
        assert finish(side, request, status, [1, 2, 3]) == (lent, None)
        assert rank.next() == RequestAborted("r1", ((1, 2, 3),) if lent else None)
        sent = {"r1"}
        side.on_results(None, sent)
        assert sent == ({"r1"} if lent else set())


def test_a_prompt_preempted_in_its_last_step_hands_no_empty_blocks_over(side, rank) -> None:
    request = Request("r1", {"do_remote_decode": True})
    side.on_new_request(request)
    rank.next()
    assert finish(side, request, "FINISHED_LENGTH_CAPPED", []) == (False, None)
    assert rank.next() == RequestAborted("r1")


def test_a_wanted_prompt_gets_the_blocks_after_the_local_hit(side, rank) -> None:
    request = Request("d1", PUSH)
    side.on_new_request(request)
    assert isinstance(rank.next(), WantBegun)
    assert side.num_external_tokens(request, 16) == 23
    assert side.num_external_tokens(request, 16) == 23, "asking changes nothing"
    side.on_allocated(request, ([5, 9, 3],), 23)
    assert rank.next() == BlocksReserved("d1", ((9, 3),), TokenSpan(16, 39))
    side.on_allocated(request, ([5, 9, 3],), 0)
    assert side.num_external_tokens(request, 0) == 0
    results = {"d1"}
    side.on_results(results, None)
    assert results == {"d1"}
    assert finish(side, request, "FINISHED_STOPPED", [5, 9, 3]) == (False, None)
    assert rank.silent()


def test_a_full_local_hit_lets_the_holder_go(side, rank) -> None:
    request = Request("d1", PUSH)
    side.on_new_request(request)
    rank.next()
    side.on_allocated(request, ([5, 9, 3],), 0)
    assert rank.next() == WantDeclined("d1")


@pytest.mark.parametrize("allocated", [False, True])
def test_an_abort_while_waiting_reaches_the_courier(side, rank, allocated) -> None:
    request = Request("d1", PUSH)
    side.on_new_request(request)
    rank.next()
    if allocated:
        side.on_allocated(request, ([5, 9, 3],), 39)
        rank.next()
    assert finish(side, request, "FINISHED_ABORTED", [5, 9, 3]) == (False, None)
    assert rank.next() == RequestAborted("d1")
    results = {"d1"}
    side.on_results(results, None)
    assert results == ({"d1"} if allocated else set())


def test_results_that_vllm_would_die_of_are_taken_out(side) -> None:
    received, sent = {"never seen"}, {"nor this"}
    side.on_results(received, sent)
    assert (received, sent) == (set(), set())


def test_a_short_rest_is_computed(rank) -> None:
    side = make_side(rank, recompute_threshold=24)
    try:
        request = Request("d1", PUSH)
        side.on_new_request(request)
        assert side.num_external_tokens(request, 16) == 0
        assert side.num_external_tokens(request, 0) == 39
    finally:
        side.close()


def test_a_producer_that_is_asked_to_receive_computes(rank) -> None:
    side = make_side(rank, may_receive=False)
    try:
        request = Request("d1", PUSH)
        side.on_new_request(request)
        assert side.num_external_tokens(request, 0) == 0
        assert rank.silent()
    finally:
        side.close()


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": True}, {"do_remote_decode": 1}, PUSH | {"tp_size": 10**9}],
    ids=str,
)
def test_params_that_cannot_be_used_mean_a_local_prefill(side, rank, params) -> None:
    request = Request("d1", params)
    side.on_new_request(request)
    assert side.num_external_tokens(request, 0) == 0
    side.on_allocated(request, ([1, 2, 3],), 0)
    assert finish(side, request, "FINISHED_STOPPED", [1, 2, 3]) == (False, None)
    assert rank.silent()


def test_a_transfer_id_in_use_is_held_under_its_own_id(side, rank) -> None:
    for request_id, expected in (("r1", "t1"), ("r2", None)):
        side.on_new_request(Request(request_id, {"do_remote_decode": True, "transfer_id": "t1"}))
        begun = rank.next()
        assert (begun.key.transfer_id if begun.key else None) == expected


def test_a_transfer_id_is_in_use_until_its_blocks_are_back(side, rank) -> None:
    """The couriers know it until then: a second one would end them."""
    keys = []
    for request_id in ("r1", "r2", "r3"):
        request = Request(request_id, {"do_remote_decode": True, "transfer_id": "t1"})
        side.on_new_request(request)
        begun = rank.next()
        keys.append(begun.key.transfer_id if begun.key else None)
        finish(side, request, "FINISHED_LENGTH_CAPPED", [1, 2, 3])
        rank.next()
        if request_id == "r2":
            side.on_results(None, {"r1"})
    assert keys == ["t1", None, "t1"]


PULL = PUSH | {
    "remote_request_id": "r1",
    "remote_block_ids": [[4, 2, 7]],
    "remote_num_tokens": 40,
    "remote_hold_id": "life:1",
    "remote_incarnation": "life",
    "part": 3,
}


@pytest.mark.parametrize("params", [PUSH, PUSH | {"remote_request_id": "r1"}, PULL], ids=str)
@pytest.mark.parametrize(
    "junk",
    [10**30, "\ud800", {1}, "x" * (17 << 20)],
    ids=["beyond 64 bits", "surrogate", "set", "too long"],
)
def test_a_courier_hears_what_was_understood_and_nothing_else(side, rank, params, junk) -> None:
    side.on_new_request(Request("d1", params | {"note": junk}))
    assert rank.next() == WantBegun("d1", parse_params(params, Limits()))


def test_the_params_of_a_longer_prompt_mean_a_local_prefill(side, rank) -> None:
    request = Request("d1", PULL | {"remote_num_tokens": 41}, 40)
    side.on_new_request(request)
    assert side.num_external_tokens(request, 0) == 0
    assert rank.silent()


def test_more_block_ids_than_fit_in_a_message_mean_a_local_prefill(side, rank) -> None:
    request = Request("d1", PULL | {"remote_block_ids": [[2**31 - 1] * (1 << 17)] * 64})
    side.on_new_request(request)
    assert side.num_external_tokens(request, 0) == 0
    assert rank.silent()


WINDOWED = (
    BlockTable(index=1, block_size=16),
    BlockTable(index=0, block_size=16, window=20),
    BlockTable(index=2, block_size=32, kernel_blocks=2, window=20),
)


@pytest.fixture
def windowed(rank: Rank0) -> Iterator[SchedulerSide]:
    side = make_side(rank, WINDOWED)
    yield side
    side.close()


def test_a_prompt_with_windows_is_computed_short_of_its_last_token(windowed, rank) -> None:
    """100 tokens, so P computes 99: the next query is at 99 and looks at 80 to 99.

    vLLM drops blocks that end at 80 or before. With all 100 computed it would drop up to 81.
    """
    request = Request("r1", {"do_remote_decode": True}, 100, prompt_token_ids=list(range(100)))
    request._all_token_ids = list(range(100))
    windowed.on_new_request(request)
    assert isinstance(rank.next(), HoldBegun)
    assert request.prompt_token_ids == request._all_token_ids == list(range(99))
    assert (request.num_prompt_tokens, request.max_tokens) == (99, 1)
    request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    blocks = ([0, 0, 0, 0, 0, 8, 9], [1, 2, 3, 4, 5, 6, 7], [0, 0, 10, 11])
    lent, params = windowed.on_finished(request, blocks)
    assert lent
    ids = ((1, 2, 3, 4, 5, 6, 7), (8, 9), (21, 22))
    assert rank.next() == PrefillFinished("r1", ids, 99)
    assert parse_params(params, Limits()).block_ids == ids
    assert params["remote_num_tokens"] == 99


def test_a_prompt_without_windows_is_computed_whole(side, rank) -> None:
    request = Request("r1", {"do_remote_decode": True}, 100, prompt_token_ids=list(range(100)))
    side.on_new_request(request)
    assert (request.num_prompt_tokens, request.max_tokens) == (100, 5)


def test_a_prompt_that_cannot_be_shortened_is_left_alone(windowed, rank) -> None:
    for request in (
        Request("r1", {"do_remote_decode": True}, 1, prompt_token_ids=[7]),
        Request("r2", {"do_remote_decode": True}, 100),
    ):
        before = request.num_prompt_tokens
        windowed.on_new_request(request)
        assert request.num_prompt_tokens == before


@pytest.mark.parametrize(
    ("cached", "ids"),
    [
        (0, ((1, 2, 3, 4, 5, 6, 7), (8, 9), (21, 22))),
        (64, ((5, 6, 7), (8, 9), (21, 22))),
        (96, ((7,), (9,), (22,))),
    ],
)
def test_each_group_receives_what_the_last_token_looks_at(windowed, rank, cached, ids) -> None:
    request = Request("d1", PUSH, 100)
    windowed.on_new_request(request)
    rank.next()
    assert windowed.num_external_tokens(request, cached) == 99 - cached
    blocks = ([0, 0, 0, 0, 0, 8, 9, 12], [1, 2, 3, 4, 5, 6, 7, 13], [0, 0, 10, 11])
    windowed.on_allocated(request, blocks, 99 - cached)
    assert rank.next() == BlocksReserved("d1", ids, TokenSpan(cached, 99))


def test_a_local_hit_that_ends_inside_a_group_s_block_is_computed(windowed, rank) -> None:
    request = Request("d1", PUSH, 100)
    windowed.on_new_request(request)
    rank.next()
    assert windowed.num_external_tokens(request, 48) == 0


def nothing_scheduled(*ran: str) -> Any:
    nothing = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(ran, 1),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=nothing,
        preempted_req_ids=None,
    )


@pytest.fixture
def short_of_blocks(rank) -> Iterator[SchedulerSide]:
    """Nine blocks and vLLM's null block; the longest request takes six, a prompt of 40 three."""
    with contextlib.closing(make_side(rank, num_blocks=10, largest=6)) as side:
        yield side


def pushed(side: SchedulerSide, name: str, **fields: Any) -> Request:
    request = Request(name, PUSH | {"transfer_id": name}, **fields)
    side.on_new_request(request)
    return request


def test_unfinished_prompts_leave_room_and_the_others_are_to_ask_again(short_of_blocks) -> None:
    side = short_of_blocks
    first, second, third = (pushed(side, name) for name in ("d1", "d2", "d3"))
    assert side.num_external_tokens(first, 0) == 39
    side.on_allocated(first, ([1, 2, 3],), 39)
    assert side.num_external_tokens(second, 0) is None
    side.on_held({"d2", "nobody"})
    assert side.num_external_tokens(second, 0) == 39
    assert side.num_external_tokens(third, 0) is None
    local = Request("local", None)
    assert side.num_external_tokens(local, 0) == 0
    side.on_results({"d1"}, None)
    assert side.num_external_tokens(third, 0) == 39


@pytest.mark.parametrize("end", ["abort", "held", "received", "declined"])
def test_room_is_left_until_it_is_over(short_of_blocks, end) -> None:
    side = short_of_blocks
    first, second = pushed(side, "d1"), pushed(side, "d2")
    if end == "declined":
        side.on_allocated(first, ([1, 2, 3],), 0)
    else:
        side.on_allocated(first, ([1, 2, 3],), side.num_external_tokens(first, 0))
        assert side.num_external_tokens(second, 0) is None
    if end == "abort":
        finish(side, first, "FINISHED_ABORTED", [1, 2, 3])
    elif end == "held":
        side.on_held({"d1"})
    elif end == "received":
        side.on_results({"d1"}, None)
    assert side.num_external_tokens(second, 0) == 39


def test_a_pull_is_held_from_the_beginning(short_of_blocks) -> None:
    side = short_of_blocks
    first = pushed(side, "d1")
    side.on_allocated(first, ([1, 2, 3],), side.num_external_tokens(first, 0))
    params = PUSH | {"remote_request_id": "r1", "remote_block_ids": [[4, 5, 6]]}
    pull = Request("d2", params | {"transfer_id": None})
    side.on_new_request(pull)
    assert side.num_external_tokens(pull, 0) == 39


def test_what_needs_no_kv_needs_no_room(rank) -> None:
    with contextlib.closing(make_side(rank, num_blocks=7, largest=6)) as side:
        request = pushed(side, "d1")
        assert side.num_external_tokens(request, 0) is None
        assert side.num_external_tokens(request, 39) == 0


def test_windows_need_no_more_than_they_hold(rank) -> None:
    """40 tokens are three blocks of the first group; of the second, a window of 16 is two."""
    tables = (BlockTable(0, BLOCK), BlockTable(1, BLOCK, window=16))
    for num_blocks, count in ((11, None), (12, 39)):
        with contextlib.closing(make_side(rank, tables, num_blocks, largest=6)) as side:
            request = pushed(side, "d1")
            assert side.num_external_tokens(request, 0) == count


def test_who_has_everything_is_run_before_others_are_asked(side) -> None:
    complete, short = pushed(side, "d1"), pushed(side, "d2")
    side.on_allocated(complete, ([1, 2, 3],), side.num_external_tokens(complete, 0))
    side.on_results({"d1"}, None)
    assert side.num_external_tokens(short, 0) == 39
    side.step_news(nothing_scheduled())
    assert side.num_external_tokens(short, 0) is None, "it found no blocks, and d1 was not run"
    side.step_news(nothing_scheduled("d1"))
    assert side.num_external_tokens(short, 0) == 39
