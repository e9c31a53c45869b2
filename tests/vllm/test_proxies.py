"""The proxies keep to vLLM's contract: its keys and no others, in the order that the mode has."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from router.fake_instance import (
    CHUNKS,
    DONE,
    FakeInstance,
    Server,
    answering,
    bounded,
    die,
    hold,
    holding_until,
    prompt,
)

from .proxies import Prefill, pull_proxy, push_proxy

pytestmark = pytest.mark.anyio

PREFILL_KEYS = {
    *("do_remote_decode", "do_remote_prefill", "remote_engine_id"),
    *("remote_block_ids", "remote_host", "remote_port"),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class World:
    """Both instances, and a client of the proxy in front of them."""

    def __init__(self, p: FakeInstance, d: FakeInstance, client: httpx.AsyncClient) -> None:
        self.p, self.d, self.client = p, d, client

    async def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body = prompt(**fields)
        return await self.client.post(path, json=body, headers={"X-Request-Id": "r1"})


@contextlib.asynccontextmanager
async def world(mode: str, **options: Any) -> AsyncIterator[World]:
    p, d = FakeInstance("p"), FakeInstance("d")
    where = Prefill(p.url, "p", "p.host", 5601, tp_size=2, pp_size=3)
    make = {"pull": pull_proxy, "push": push_proxy}[mode]
    app: Starlette = make(where, d.url, **options)
    proxy = Server(app)
    servers = (p.server, d.server, proxy)
    async with bounded():
        for server in servers:
            await server.start()
    try:
        async with (
            httpx.AsyncClient(base_url=proxy.url, timeout=None, trust_env=False) as client,
            bounded(),
        ):
            yield World(p, d, client)
    finally:
        async with bounded():
            await asyncio.gather(*(server.stop() for server in servers))


async def test_pull_hands_on_what_p_answered_unchanged() -> None:
    async with world("pull") as w:
        response = await w.post(stream=True, max_tokens=9)
        assert response.content == b"".join((*CHUNKS, DONE))
        (leg,), (decode_leg,) = w.p.legs, w.d.legs
        assert decode_leg.params == w.p.handoff(leg)
        assert decode_leg.body["max_tokens"] == 9
        assert [each.header("x-request-id") for each in (leg, decode_leg)] == ["r1", "r1"]


async def test_pull_begins_with_p_alone() -> None:
    async with world("pull") as w:
        gate = asyncio.Event()
        w.p.script = holding_until(gate, w.p.serve)
        answer = asyncio.create_task(w.post())
        await w.p.arrived.wait()
        assert w.d.legs == []
        gate.set()
        assert (await answer).json() == {"id": "r1", "by": "d"}


async def test_push_sends_both_legs_at_once_with_the_documented_keys() -> None:
    async with world("push") as w:
        gate = asyncio.Event()
        w.p.script = holding_until(gate, w.p.serve)
        answer = asyncio.create_task(w.post(stream=True))
        await w.p.arrived.wait()
        await w.d.arrived.wait()  # while P still computes
        gate.set()
        assert (await answer).content == b"".join((*CHUNKS, DONE))
        (leg,), (decode_leg,) = w.p.legs, w.d.legs
        transfer_id = leg.params["transfer_id"]
        assert isinstance(transfer_id, str) and transfer_id
        assert leg.params.keys() == PREFILL_KEYS | {"transfer_id"}
        assert decode_leg.params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "p",
            "remote_host": "p.host",
            "remote_port": 5601,
            "tp_size": 2,
            "pp_size": 3,
            "remote_request_id": "r1",
            "transfer_id": transfer_id,
        }
        assert [each.header("x-request-id") for each in (leg, decode_leg)] == ["r1", "r1"]


async def test_each_dispatch_has_a_transfer_id_of_its_own() -> None:
    async with world("push") as w:
        await w.post()
        await w.post()
        first, second = (leg.params["transfer_id"] for leg in w.p.legs)
        assert first != second


async def test_an_older_router_names_no_transfer() -> None:
    async with world("push", send_transfer_id=False) as w:
        await w.post()
        assert w.p.legs[0].params.keys() == PREFILL_KEYS
        assert "transfer_id" not in w.d.legs[0].params
        assert w.d.legs[0].params["remote_request_id"] == "r1"


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_the_prefill_leg_asks_for_one_token(mode: str) -> None:
    async with world(mode) as w:
        fields = {"stream_options": {"include_usage": True}, "min_tokens": 5, "seed": 3}
        await w.post("/v1/chat/completions", stream=True, max_completion_tokens=7, **fields)
        body = w.p.legs[0].body
        assert w.p.legs[0].path == w.d.legs[0].path == "/v1/chat/completions"
        assert (body["max_tokens"], body["max_completion_tokens"]) == (1, 1)
        assert (body["stream"], body["seed"]) == (False, 3)
        assert not body.keys() & {"stream_options", "min_tokens"}
        flags = {name: body["kv_transfer_params"][name] for name in PREFILL_KEYS}
        assert flags == dict.fromkeys(PREFILL_KEYS) | {
            "do_remote_decode": True,
            "do_remote_prefill": False,
        }
        assert w.d.legs[0].body | fields == w.d.legs[0].body


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_refusal_of_p_is_the_answer(mode: str) -> None:
    async with world(mode) as w:
        w.p.script = answering(400, b'{"error": "too long"}')
        w.d.script = hold
        response = await w.post()
        assert (response.status_code, response.json()) == (400, {"error": "too long"})
        if mode == "pull":
            assert w.d.legs == []


@pytest.mark.parametrize("named", ["p", "d"])
async def test_push_lets_go_of_the_other_leg_on_a_refusal(named: str) -> None:
    async with world("push") as w:
        refuser, other = (w.p, w.d) if named == "p" else (w.d, w.p)
        other.script = hold
        refuser.script = holding_until(other.arrived, answering(503, b"{}"))
        assert (await w.post()).status_code == 503
        await other.legs[0].gone.wait()


async def test_push_lets_go_of_a_stream_that_d_has_begun() -> None:
    async with world("push") as w:
        begun = asyncio.Event()

        async def only_a_head(_leg: Any, connection: Any) -> None:
            await connection.head()
            begun.set()
            await connection.until_gone()

        w.d.script = only_a_head
        w.p.script = holding_until(begun, answering(400, b"{}"))
        assert (await w.post(stream=True)).status_code == 400
        await w.d.legs[0].gone.wait()


async def test_pull_does_not_let_d_compute_in_silence() -> None:
    async with world("pull") as w:
        w.p.script = answering(200, json.dumps({"choices": []}).encode())
        response = await w.post()
        assert response.status_code == 502
        assert "kv_transfer_params" in response.text
        assert w.d.legs == []


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("named", ["p", "d"])
async def test_a_dead_instance_is_a_502(mode: str, named: str) -> None:
    async with world(mode) as w:
        dying, other = (w.p, w.d) if named == "p" else (w.d, w.p)
        dying.script = die
        if mode == "push":
            other.script = hold
        response = await w.post()
        assert response.status_code == 502
        assert "did not answer" in response.text


async def test_a_client_that_leaves_ends_d() -> None:
    async with world("pull") as w:

        async def one_chunk(leg: Any, connection: Any) -> None:
            await connection.head()
            await connection.chunk(CHUNKS[0])
            await connection.until_gone()

        w.d.script = one_chunk
        async with w.client.stream("POST", "/v1/completions", json=prompt(stream=True)) as answer:
            assert await anext(answer.aiter_raw()) == CHUNKS[0]
        await w.d.legs[0].gone.wait()
