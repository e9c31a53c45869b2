"""What the load generator sends, when, and what it takes for what."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pair_load
import pytest
from pair_load import (
    Cell,
    RequestFailed,
    Sample,
    Target,
    Traffic,
    Way,
    make_traffic,
    parse_cells,
    spread,
)

from benchmarks.fake_vllm import event, tokens
from router.fake_instance import (
    Connection,
    FakeInstance,
    Received,
    answering,
    bounded,
    die,
    hold,
    holding_until,
)

anyio = pytest.mark.anyio
OUTPUT_TOKENS = 4
HANDOFF = {"do_remote_prefill": True, "remote_block_ids": [[4, 2]], "of_a_later_release": [None]}
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Clock:
    """Time that only the test moves, and that knows when somebody has looked at it."""

    def __init__(self) -> None:
        self.now = 100.0
        self._read = asyncio.Event()

    def perf_counter(self) -> float:
        self._read.set()
        return self.now

    async def advance(self, seconds: float, *, after_read: bool) -> None:
        if after_read:
            await self._read.wait()
        self._read.clear()
        self.now += seconds


class Pair:
    def __init__(self) -> None:
        self.p, self.d = FakeInstance("p"), FakeInstance("d")
        self.p.script, self.d.script = self.prefill, self.decode

    async def prefill(self, _leg: Received, connection: Connection) -> None:
        answer = {"choices": [{"text": "w"}], "kv_transfer_params": HANDOFF}
        await connection.answer(json.dumps(answer).encode())

    async def decode(self, leg: Received, connection: Connection) -> None:
        await connection.head()
        async for chunk in tokens(leg.body["max_tokens"]):
            await connection.chunk(chunk)
        await connection.end()

    async def run(self, way: Way, num_requests: int = 1) -> list[Sample | RequestFailed]:
        target = Target("m", 100, "127.0.0.1", self.p.server.port, self.d.server.port, "p", 5600)
        traffic = Traffic(("[5, 6, 7]",) * num_requests, (0.0,) * num_requests)
        return await pair_load.run(target, way, traffic, OUTPUT_TOKENS, timeout_s=60.0)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    each = Pair()
    async with bounded():
        await each.p.server.start()
        await each.d.server.start()
    try:
        async with bounded():
            yield each
    finally:
        async with bounded():
            await asyncio.gather(each.p.server.stop(), each.d.server.stop())


def failure_of(outcomes: list[Sample | RequestFailed]) -> str:
    (outcome,) = outcomes
    assert isinstance(outcome, RequestFailed)
    return str(outcome)


@anyio
async def test_pull_hands_the_params_on_unchanged() -> None:
    async with pair() as w:
        (sample,) = await w.run(Way.PULL)
        assert isinstance(sample, Sample)
        (p,), (d,) = w.p.legs, w.d.legs
        assert p.params == PREFILL_PARAMS
        assert (p.body["max_tokens"], p.body["stream"]) == (1, False)
        assert d.params == HANDOFF
        assert (d.body["max_tokens"], d.body["stream"]) == (OUTPUT_TOKENS, True)
        assert p.body["prompt"] == d.body["prompt"] == [5, 6, 7]
        assert d.body["ignore_eos"] is True
        assert p.header("x-request-id") == d.header("x-request-id") is not None


@anyio
async def test_push_sends_both_legs_at_once() -> None:
    async with pair() as w:
        w.p.script = holding_until(w.d.arrived, w.prefill)
        w.d.script = holding_until(w.p.arrived, w.decode)
        (sample,) = await w.run(Way.PUSH)
        assert isinstance(sample, Sample)
        (p,), (d,) = w.p.legs, w.d.legs
        transfer_id = p.params["transfer_id"]
        assert p.params == PREFILL_PARAMS | {"transfer_id": transfer_id}
        assert d.params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "p",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": f"cmpl-{p.header('x-request-id')}-0",
            "transfer_id": transfer_id,
        }
        assert p.header("x-request-id") == d.header("x-request-id")


@anyio
async def test_single_asks_the_decode_server_alone() -> None:
    async with pair() as w:
        (sample,) = await w.run(Way.SINGLE)
        assert isinstance(sample, Sample)
        assert sample.after_prefill_ms is None
        assert w.p.legs == []
        assert "kv_transfer_params" not in w.d.legs[0].body


@anyio
@pytest.mark.parametrize("way", [Way.PULL, Way.PUSH])
async def test_times_are_taken_where_they_are_said_to_be(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(pair_load, "time", clock)
    async with pair() as w:
        prefilled = asyncio.Event()

        async def prefill(leg: Received, connection: Connection) -> None:
            await clock.advance(0.2, after_read=False)
            await w.prefill(leg, connection)
            await clock.advance(0.05, after_read=True)
            prefilled.set()

        async def decode(_leg: Received, connection: Connection) -> None:
            await prefilled.wait()
            await connection.head()
            for index in range(OUTPUT_TOKENS):
                reason = "length" if index == OUTPUT_TOKENS - 1 else None
                await connection.chunk(event(choices=[{"text": "w", "finish_reason": reason}]))
                await clock.advance(0.03, after_read=True)
            await connection.chunk(event(choices=[], usage={"completion_tokens": OUTPUT_TOKENS}))
            await clock.advance(5.0, after_read=True)
            await connection.end()

        w.p.script, w.d.script = prefill, decode
        (sample,) = await w.run(way)
        assert isinstance(sample, Sample)
        assert sample.ttft_ms == pytest.approx(250.0)
        assert sample.after_prefill_ms == pytest.approx(50.0)
        assert sample.tpot_ms == pytest.approx(30.0)


@anyio
async def test_events_may_come_in_any_pieces() -> None:
    async with pair() as w:

        async def torn(leg: Received, connection: Connection) -> None:
            stream = b"".join([chunk async for chunk in tokens(leg.body["max_tokens"])])
            await connection.head()
            for start in range(0, len(stream), 7):
                await connection.chunk(stream[start : start + 7])
            await connection.end()

        w.d.script = torn
        (sample,) = await w.run(Way.PULL)
        assert isinstance(sample, Sample)


@anyio
async def test_the_load_is_open_loop() -> None:
    async with pair() as w:
        everybody = asyncio.Event()

        async def counted(leg: Received, connection: Connection) -> None:
            if len(w.p.legs) == 5:
                everybody.set()
            await holding_until(everybody, w.prefill)(leg, connection)

        w.p.script = counted
        outcomes = await w.run(Way.PULL, num_requests=5)
        assert [type(each) for each in outcomes] == [Sample] * 5


@anyio
@pytest.mark.parametrize("way", [Way.PULL, Way.PUSH])
async def test_a_refusal_is_a_failure_with_its_text(way: Way) -> None:
    async with pair() as w:
        w.p.script = answering(503, b"no blocks left")
        w.d.script = hold
        assert failure_of(await w.run(way)) == "the prefill server answered 503: no blocks left"


@anyio
async def test_a_failed_push_lets_go_of_the_decode_server() -> None:
    async with pair() as w:
        w.d.script = hold
        w.p.script = holding_until(w.d.arrived, answering(503, b""))
        await w.run(Way.PUSH)
        await w.d.legs[0].gone.wait()


@anyio
async def test_an_answer_without_params_is_a_failure() -> None:
    async with pair() as w:
        w.p.script = answering(200, b'{"choices": []}')
        assert "without kv_transfer_params" in failure_of(await w.run(Way.PULL))
        assert w.d.legs == []


@anyio
@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([event(error={"message": "KV lost"})], "broke off.*KV lost"),
        ([event(choices=[{"text": "w", "finish_reason": "stop"}])], "found 0 that end by stop"),
        (
            [
                event(choices=[{"text": "w", "finish_reason": "length"}]),
                event(choices=[], usage={"completion_tokens": 3}),
            ],
            "expected 4 tokens that end by length, found 3",
        ),
        (
            [
                event(choices=[{"text": "w", "finish_reason": "error"}]),
                event(choices=[], usage={"completion_tokens": OUTPUT_TOKENS}),
            ],
            "end by error",
        ),
        ([], "found 0 that end by None"),
    ],
)
async def test_a_short_or_broken_stream_is_a_failure(chunks: list[bytes], expected: str) -> None:
    async with pair() as w:

        async def script(_leg: Any, connection: Connection) -> None:
            await connection.head()
            for chunk in chunks:
                await connection.chunk(chunk)
            await connection.end()

        w.d.script = script
        with pytest.raises(RequestFailed, match=expected):
            raise (await w.run(Way.SINGLE))[0]  # type: ignore[misc]


@anyio
async def test_a_connection_that_drops_is_a_failure() -> None:
    async with pair() as w:
        w.d.script = die
        assert failure_of(await w.run(Way.SINGLE))


@anyio
async def test_an_answer_that_does_not_come_is_a_failure() -> None:
    async with pair() as w:
        w.d.script = hold
        target = Target("m", 9, "127.0.0.1", w.p.server.port, w.d.server.port, "p", 5600)
        outcomes = await pair_load.run(target, Way.SINGLE, Traffic(("[5]",), (0.0,)), 4, 0.01)
        assert failure_of(outcomes) == "not answered in 0.01 s"
        await w.d.legs[0].gone.wait()


def test_traffic_repeats_between_connectors_but_not_within_one_pair() -> None:
    cell = Cell(50, 2.0, 6)
    pull = make_traffic(cell, 1000, 7, "pull")
    push = make_traffic(cell, 1000, 7, "push")
    assert pull == make_traffic(cell, 1000, 7, "pull")
    assert pull.arrivals_s == push.arrivals_s
    prompts = [json.loads(text) for text in (*pull.prompts, *push.prompts)]
    assert len({tuple(prompt) for prompt in prompts}) == 12
    assert {len(prompt) for prompt in prompts} == {50}
    assert all(2 <= token < 1000 for prompt in prompts for token in prompt)
    assert make_traffic(cell, 1000, 8, "pull").arrivals_s != pull.arrivals_s


def test_arrivals_have_the_mean_rate() -> None:
    arrivals = make_traffic(Cell(1, 4.0, 2000), 10, 7, "pull").arrivals_s
    assert list(arrivals) == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(2000 / 4.0, rel=0.1)


def test_cells_are_read_in_their_order() -> None:
    assert parse_cells("2000:2:24,16000:0.5:6") == [Cell(2000, 2.0, 24), Cell(16000, 0.5, 6)]


@pytest.mark.parametrize(
    "text", ["", "2000:2", "2000:2:24,", "0:2:24", "9:0:1", "9:nan:1", "9:1:x"]
)
def test_a_cell_that_cannot_be_used_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cell: expected"):
        parse_cells(text)


def test_spread() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == {"p50": 2.5, "mean": 2.5, "p90": pytest.approx(3.7)}
    assert spread([2.0]) == {"p50": 2.0, "mean": 2.0, "p90": 2.0}
    assert spread([]) == {"p50": None, "mean": None, "p90": None}
