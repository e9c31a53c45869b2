"""The router between real sockets: what passes through, and who gets what."""

import asyncio
import json

import pytest

from kvcourier.ids import EngineId
from kvcourier.router.config import Coordinates, InstanceSpec, RouterLimits
from router.fake_instance import (
    CHUNKS,
    DONE,
    MODES,
    FakeInstance,
    Received,
    bounded,
    holding_until,
    prompt,
    world,
)

pytestmark = pytest.mark.anyio
both_modes = pytest.mark.parametrize("mode", MODES)


@both_modes
async def test_a_stream_passes_through_byte_for_byte(mode: str) -> None:
    async with world() as here, bounded():
        answer = await here.post(prompt(stream=True), mode)
        assert answer.status_code == 200
        assert answer.content == b"".join((*CHUNKS, DONE))
        assert answer.headers["content-type"] == "text/event-stream"
        assert here.calls(mode, "ok") == 1
        assert here.count("kvcourier_router_first_byte_seconds_count", mode=mode) == 1


@both_modes
async def test_a_whole_answer_passes_through_byte_for_byte(mode: str) -> None:
    async with world() as here, bounded():
        odd = b'{"text": "caf\xc3\xa9",   "n": 1.50}\n'

        async def script(leg: Received, connection) -> None:  # type: ignore[no-untyped-def]
            await connection.answer(odd, 201, "application/json; charset=utf-8")

        here.decode[0].script = script
        answer = await here.post(mode=mode)
        assert (answer.status_code, answer.content) == (201, odd)
        assert answer.headers["content-type"] == "application/json; charset=utf-8"


@both_modes
async def test_chunks_are_not_kept_back(mode: str) -> None:
    async with world() as here, bounded():
        gates = [asyncio.Event() for _ in CHUNKS]

        async def script(leg: Received, connection) -> None:  # type: ignore[no-untyped-def]
            await connection.head()
            for gate, chunk in zip(gates, CHUNKS, strict=True):
                await gate.wait()
                await connection.chunk(chunk)
            await connection.chunk(DONE)
            await connection.end()

        here.decode[0].script = script
        gates[0].set()
        request = here.client.build_request(
            "POST", "/v1/completions", json=prompt(stream=True), headers={"x-kv-mode": mode}
        )
        answer = await here.client.send(request, stream=True)
        got = []
        async for chunk in answer.aiter_raw():
            got.append(chunk)
            if len(got) < len(gates):
                gates[len(got)].set()
        assert b"".join(got) == b"".join((*CHUNKS, DONE))
        # Each chunk was let out only after the one before had arrived here.
        assert got[: len(CHUNKS) - 1] == list(CHUNKS[:-1])


async def test_pull_asks_in_sequence_and_push_at_once() -> None:
    async with world() as here, bounded():
        prefill, decode = here.prefill[0], here.decode[0]
        gate = asyncio.Event()
        prefill.script = holding_until(gate, prefill.serve)
        pushed = asyncio.create_task(here.post(mode="push"))
        await prefill.arrived.wait()
        await decode.arrived.wait()  # while P is held
        gate.set()
        assert (await pushed).status_code == 200

        gate.clear()
        prefill.arrived.clear()
        decode.arrived.clear()
        pulled = asyncio.create_task(here.post(mode="pull"))
        await prefill.arrived.wait()
        assert not decode.arrived.is_set()
        gate.set()
        assert (await pulled).status_code == 200
        assert decode.arrived.is_set()


async def test_pull_legs_are_the_contract() -> None:
    async with world() as here, bounded():
        sent = prompt(
            stream=True,
            stream_options={"include_usage": True},
            min_tokens=2,
            max_completion_tokens=9,
            temperature=0.25,
        )
        answer = await here.post(sent, "pull", x_request_id="abc-1", authorization="Bearer k")
        prefill, decode = here.prefill[0].legs[0], here.decode[0].legs[0]
        transfer_id = answer.headers["x-kv-transfer-id"]
        assert prefill.body == {
            "model": "tiny",
            "prompt": "Say it.",
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "stream": False,
            "temperature": 0.25,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
                "transfer_id": transfer_id,
            },
        }
        handoff = here.prefill[0].handoff(prefill)
        own = {"transfer_id": transfer_id, "keep_history": False}
        assert decode.body == sent | {"kv_transfer_params": handoff | own}
        for leg in (prefill, decode):
            assert leg.path == "/v1/completions"
            assert leg.header("x-request-id") == "abc-1"
            assert leg.header("authorization") == "Bearer k"
            assert leg.header("x-kv-mode") is None


async def test_push_legs_are_the_contract() -> None:
    async with world() as here, bounded():
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await here.post(chat, "push", "/v1/chat/completions", x_request_id="abc-2")
        prefill, decode = here.prefill[0].legs[0], here.decode[0].legs[0]
        transfer_id = answer.headers["x-kv-transfer-id"]
        assert prefill.body == chat | {
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
                "transfer_id": transfer_id,
            },
        }
        assert decode.body == chat | {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "p0",
                "remote_host": "p0.host",
                "remote_port": 5600,
                "tp_size": 2,
                "pp_size": 3,
                "remote_request_id": "abc-2",
                "transfer_id": transfer_id,
                "keep_history": False,
            }
        }
        assert prefill.path == decode.path == "/v1/chat/completions"
        assert prefill.header("x-request-id") == decode.header("x-request-id") == "abc-2"


async def test_a_transfer_id_of_p_is_relayed_unchanged() -> None:
    async with world() as here, bounded():
        prefill = here.prefill[0]

        async def script(leg: Received, connection) -> None:  # type: ignore[no-untyped-def]
            handoff = prefill.handoff(leg) | {"transfer_id": "of-p"}
            await connection.answer(json.dumps({"kv_transfer_params": handoff}).encode())

        prefill.script = script
        await here.post(mode="pull")
        assert here.decode[0].legs[0].params["transfer_id"] == "of-p"


async def test_configured_coordinates_serve_an_instance_that_cannot_tell() -> None:
    def specs(fake: FakeInstance) -> InstanceSpec:
        where = Coordinates(EngineId("p0"), "kv.host", 5600, 4, 1)
        return InstanceSpec(fake.url, where, dp_rank=2)

    def mute(fakes: list[FakeInstance]) -> None:
        for fake in fakes:
            fake.tells = False

    async with world(specs=specs, prepare=mute) as here, bounded():
        here.prefill[0].handoff = lambda leg: {  # type: ignore[method-assign]
            "remote_engine_id": "p0",
            "remote_port": 5600,
            "transfer_mode": "push",
        }
        answer = await here.post(mode="push")
        assert answer.status_code == 200
        params = here.decode[0].legs[0].params
        assert (params["remote_host"], params["tp_size"]) == ("kv.host", 4)
        assert here.prefill[0].legs[0].header("x-data-parallel-rank") == "2"
        assert here.decode[0].legs[0].header("x-data-parallel-rank") is None
        assert answer.headers["x-kv-prefill"] == f"{here.prefill[0].url}#dp2"


async def test_pull_needs_no_coordinates_and_push_says_what_is_missing() -> None:
    def mute(fakes: list[FakeInstance]) -> None:
        for fake in fakes:
            fake.tells = False

    async with world(prepare=mute) as here, bounded():
        assert (await here.post(mode="pull")).status_code == 200
        refused = await here.post(mode="push")
        assert refused.status_code == 503
        message = refused.json()["error"]["message"]
        assert here.prefill[0].url in message
        assert "engine_id" in message
        assert len(here.prefill[0].legs) == 1


@pytest.mark.parametrize("side", [0, 1])
async def test_an_instance_of_the_other_mode_is_refused_before_any_leg(side: int) -> None:
    def pull_only(fakes: list[FakeInstance]) -> None:
        fakes[side].modes = ["pull"]

    async with world(prepare=pull_only) as here, bounded():
        fake = [*here.prefill, *here.decode][side]
        while not (await here.client.get("/kvcourier/instances")).json()[
            ("prefill", "decode")[side]
        ][0]["modes"]:
            await fake.asked.wait()
        answer = await here.post(mode="push")
        assert answer.status_code == 503
        assert "takes part in push" in answer.json()["error"]["message"]
        assert not here.prefill[0].legs and not here.decode[0].legs
        assert (await here.post(mode="pull")).status_code == 200


@both_modes
async def test_decode_is_told_of_the_prefill_instance_that_got_the_prompt(mode: str) -> None:
    async with world(2, 2) as here, bounded():
        prompts = [f"prompt {index}" for index in range(8)]
        answers = await asyncio.gather(*(here.post(prompt(prompt=p), mode) for p in prompts))
        assert [answer.status_code for answer in answers] == [200] * 8
        computed = {
            leg.body["prompt"]: fake.engine_id for fake in here.prefill for leg in fake.legs
        }
        told = {
            leg.body["prompt"]: leg.params["remote_engine_id"]
            for fake in here.decode
            for leg in fake.legs
        }
        assert computed.keys() == set(prompts)
        assert told == computed
        for side in (here.prefill, here.decode):
            assert [len(fake.legs) for fake in side] == [4, 4]
        for answer, text in zip(answers, prompts, strict=True):
            by_url = {fake.url: fake.engine_id for fake in here.prefill}
            assert by_url[answer.headers["x-kv-prefill"]] == computed[text]


@both_modes
async def test_every_dispatch_has_a_transfer_id_of_its_own(mode: str) -> None:
    async with world() as here, bounded():
        answers = await asyncio.gather(*(here.post(mode=mode) for _ in range(32)))
        ids = {answer.headers["x-kv-transfer-id"] for answer in answers}
        assert len(ids) == 32
        for fake in (here.prefill[0], here.decode[0]):
            assert {leg.params["transfer_id"] for leg in fake.legs} == ids
        request_ids = {answer.headers["x-request-id"] for answer in answers}
        assert len(request_ids) == 32
        assert {answer.json()["id"] for answer in answers} == request_ids
        assert here.count("kvcourier_router_in_flight") == 0


async def test_a_mad_request_id_is_replaced() -> None:
    async with world() as here, bounded():
        answer = await here.post(x_request_id="a b\tc")
        minted = answer.headers["x-request-id"]
        assert minted != "a b\tc"
        assert here.prefill[0].legs[0].header("x-request-id") == minted


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
async def test_several_sub_requests_are_refused_before_prefill(
    fields: dict[str, object], names: str
) -> None:
    async with world() as here, bounded():
        answer = await here.post(prompt(**fields))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == names
        assert error["type"] == "invalid_request_error"
        assert not here.prefill[0].legs and not here.decode[0].legs
        assert (await here.post(prompt(prompt=[1, 2, 3], n=1))).status_code == 200


async def test_bad_bodies_and_headers() -> None:
    async with world(limits=RouterLimits(max_body_bytes=1000)) as here, bounded():
        client = here.client
        path = "/v1/completions"
        assert (await client.post(path, content=b'{"model": ')).status_code == 400
        assert (await client.post(path, content=b"[1]")).status_code == 400
        assert (await client.post(path, content=b"\xff\xfe")).status_code == 400
        assert (await client.post(path, content=b"[" * 999)).status_code == 400
        large = b'{"prompt": "' + b"x" * 2000 + b'"}'
        assert (await client.post(path, content=large)).status_code == 413

        async def pieces():  # type: ignore[no-untyped-def]
            for _ in range(20):
                yield b" " * 100

        assert (await client.post(path, content=pieces())).status_code == 413
        wrong = await here.post(mode="shove")
        assert wrong.status_code == 400
        assert "pull, push" in wrong.json()["error"]["message"]
        assert (await client.get(path)).json()["error"]["message"] == "Method Not Allowed."
        assert (await client.get("/nowhere")).status_code == 404
        assert not here.prefill[0].legs
        assert (await here.post()).status_code == 200


async def test_too_many_calls_at_a_time_are_refused() -> None:
    async with world(limits=RouterLimits(max_in_flight=1)) as here, bounded():
        prefill = here.prefill[0]
        gate = asyncio.Event()
        prefill.script = holding_until(gate, prefill.serve)
        first = asyncio.create_task(here.post())
        await prefill.arrived.wait()
        assert (await here.post()).status_code == 503
        gate.set()
        assert (await first).status_code == 200
        assert (await here.post()).status_code == 200


async def test_health_needs_one_of_each_side() -> None:
    async with world(2, 1) as here, bounded():
        assert (await here.client.get("/health")).status_code == 200
        here.prefill[0].healthy = False
        partly = await here.client.get("/health")
        assert partly.status_code == 200
        assert partly.json()["prefill"][here.prefill[0].url] == "answered 503"
        await here.prefill[1].server.stop()
        broken = await here.client.get("/health")
        assert broken.status_code == 503
        assert "cannot be reached" in broken.json()["prefill"][here.prefill[1].url]
        assert broken.json()["decode"] == {here.decode[0].url: "ok"}


async def test_models_are_those_that_both_sides_serve() -> None:
    async with world() as here, bounded():
        here.prefill[0].models = ["tiny", "only-p"]
        here.decode[0].models = ["only-d", "tiny"]
        listed = (await here.client.get("/v1/models")).json()
        assert listed == {"object": "list", "data": [{"id": "tiny"}]}
        await here.decode[0].server.stop()
        gone = await here.client.get("/v1/models")
        assert gone.status_code == 503
        assert here.decode[0].url in gone.json()["error"]["message"]


async def test_metrics_are_prometheus_text() -> None:
    async with world() as here, bounded():
        await here.post(mode="pull")
        text = (await here.client.get("/metrics")).text
        assert 'kvcourier_router_requests_total{mode="pull",outcome="ok"} 1.0' in text
        assert 'kvcourier_router_leg_seconds_count{leg="prefill",mode="pull"} 1.0' in text
        assert 'kvcourier_router_leg_seconds_count{leg="decode",mode="pull"} 1.0' in text
