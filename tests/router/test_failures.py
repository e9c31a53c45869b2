"""The router when something goes wrong on either leg, or with the client (scenario O12)."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvcourier.router.config import InstanceSpec, RouterLimits, Timeouts
from kvcourier.router.instances import Instance
from ports import free_port
from router.fake_instance import (
    CHUNKS,
    DONE,
    MODES,
    Connection,
    FakeInstance,
    Received,
    World,
    answering,
    bounded,
    die,
    event,
    hold,
    holding_until,
    prompt,
    world,
)

pytestmark = pytest.mark.anyio
both_modes = pytest.mark.parametrize("mode", MODES)
REFUSAL = b'{"error": {"message": "no such thing",  "type": "x"}}'


@asynccontextmanager
async def streaming(here: World, mode: str) -> AsyncIterator[httpx.Response]:
    request = here.client.build_request(
        "POST", "/v1/completions", json=prompt(stream=True), headers={"x-kv-mode": mode}
    )
    answer = await here.client.send(request, stream=True)
    try:
        yield answer
    finally:
        await answer.aclose()


async def serves_again(here: World, mode: str) -> None:
    """The next good request works, and nothing of the last one is left."""
    for fake in (*here.prefill, *here.decode):
        fake.script = fake.serve
    assert (await here.post(mode=mode)).status_code == 200
    # In push P may answer after D is done.
    await asyncio.gather(*here.services.background)
    instances = (await here.client.get("/kvcourier/instances")).json()
    in_flight = [one["in_flight"] for side in ("prefill", "decode") for one in instances[side]]
    assert set(in_flight) == {0}


# (a) D refuses before it streams.


@both_modes
@pytest.mark.parametrize("status", [400, 503])
async def test_d_refuses_before_streaming(mode: str, status: int) -> None:
    async with world() as here, bounded():
        here.decode[0].script = answering(status, REFUSAL, "application/json; v=1")
        answer = await here.post(prompt(stream=True), mode)
        assert (answer.status_code, answer.content) == (status, REFUSAL)
        assert answer.headers["content-type"] == "application/json; v=1"
        assert answer.headers["x-kv-decode"] == here.decode[0].url
        assert here.failures("decode", "status") == 1
        assert here.calls(mode, "upstream_error") == 1
        await serves_again(here, mode)


async def test_d_refuses_a_push_while_p_computes() -> None:
    async with world() as here, bounded():
        prefill = here.prefill[0]
        prefill.script = hold
        here.decode[0].script = holding_until(prefill.arrived, answering(400, REFUSAL))
        answer = await here.post(mode="push")
        assert (answer.status_code, answer.content) == (400, REFUSAL)
        await prefill.legs[0].gone.wait()
        await serves_again(here, "push")


# (b) P refuses.


@both_modes
@pytest.mark.parametrize("status", [400, 500])
async def test_p_refuses(mode: str, status: int) -> None:
    async with world() as here, bounded():
        decode = here.decode[0]
        decode.script = hold
        refuse = answering(status, REFUSAL)
        here.prefill[0].script = refuse if mode == "pull" else holding_until(decode.arrived, refuse)
        answer = await here.post(mode=mode)
        assert (answer.status_code, answer.content) == (status, REFUSAL)
        assert here.failures("prefill", "status") == 1
        if mode == "push":
            await decode.legs[0].gone.wait()
        else:
            assert not decode.legs
        await serves_again(here, mode)


async def test_p_refuses_after_d_has_sent_a_head_without_a_body() -> None:
    """Servers send a stream's head before there is a token; the status is still ours to give."""
    async with world() as here, bounded():
        decode = here.decode[0]
        headed = asyncio.Event()

        async def script(_leg: Received, connection: Connection) -> None:
            await connection.head()
            headed.set()
            await connection.until_gone()

        decode.script = script
        here.prefill[0].script = holding_until(headed, answering(422, REFUSAL))
        answer = await here.post(prompt(stream=True), "push")
        assert (answer.status_code, answer.content) == (422, REFUSAL)
        await decode.legs[0].gone.wait()


async def test_p_fails_after_d_has_streamed_and_the_stream_goes_on() -> None:
    async with world() as here, bounded():
        failed = asyncio.Event()

        async def torn(_leg: Received, connection: Connection) -> None:
            await connection.head()
            await connection.chunk(CHUNKS[0])
            await failed.wait()
            await connection.chunk(DONE)
            await connection.end()

        here.decode[0].script = torn
        begun = asyncio.Event()
        here.prefill[0].script = holding_until(begun, answering(500, REFUSAL))
        async with streaming(here, "push") as answer:
            chunks = answer.aiter_raw()
            got = [await anext(chunks)]
            begun.set()
            # P's failure is counted while the stream is open.
            while not here.failures("prefill", "status"):
                await here.client.get("/health")
            failed.set()
            got += [chunk async for chunk in chunks]
        assert b"".join(got) == CHUNKS[0] + DONE
        assert here.calls("push", "ok") == 1


async def test_p_may_answer_after_d_is_done() -> None:
    async with world() as here, bounded():
        prefill = here.prefill[0]
        late = asyncio.Event()
        prefill.script = holding_until(late, prefill.serve)
        answer = await here.post(mode="push")
        assert answer.status_code == 200
        await prefill.arrived.wait()
        assert not prefill.legs[0].gone.is_set()
        (rest,) = here.services.background
        late.set()
        await rest
        assert not here.services.background
        assert here.failures("prefill", "dropped") == 0


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"choices": []}', "no_handoff"),
        (b'{"kv_transfer_params": null}', "no_handoff"),
        (b'{"kv_transfer_params": {}}', "no_handoff"),
        (b"<html>", "unreadable"),
        (b"[]", "unreadable"),
        (b"[" * 100_000, "unreadable"),
    ],
)
@both_modes
async def test_p_answers_without_a_handoff(mode: str, content: bytes, kind: str) -> None:
    async with world() as here, bounded():
        decode = here.decode[0]
        decode.script = hold
        answer_ = answering(200, content)
        here.prefill[0].script = (
            answer_ if mode == "pull" else holding_until(decode.arrived, answer_)
        )
        answer = await here.post(mode=mode)
        assert answer.status_code == 502
        error = answer.json()["error"]
        assert error["code"] == kind
        assert here.prefill[0].url in error["message"]
        assert here.failures("prefill", kind) == 1
        assert len(decode.legs) == (mode == "push")
        await serves_again(here, mode)


async def test_a_handoff_without_one_of_its_keys_is_named() -> None:
    async with world() as here, bounded():
        prefill = here.prefill[0]

        async def script(leg: Received, connection: Connection) -> None:
            handoff = prefill.handoff(leg) | {"remote_host": None}
            await connection.answer(json.dumps({"kv_transfer_params": handoff}).encode())

        prefill.script = script
        answer = await here.post(mode="pull")
        assert answer.status_code == 502
        assert "remote_host" in answer.json()["error"]["message"]
        assert not here.decode[0].legs


# (c) P or D cannot be reached, or drops.


@both_modes
async def test_p_dies_in_the_middle_of_prefill(mode: str) -> None:
    async with world() as here, bounded():
        decode = here.decode[0]
        decode.script = hold
        here.prefill[0].script = die if mode == "pull" else holding_until(decode.arrived, die)
        answer = await here.post(mode=mode)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "dropped"
        assert here.failures("prefill", "dropped") == 1
        if mode == "push":
            await decode.legs[0].gone.wait()
        await serves_again(here, mode)


@both_modes
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_instance_is_not_there(mode: str, leg: str) -> None:
    async with world() as here, bounded():
        fake = {"prefill": here.prefill, "decode": here.decode}[leg][0]
        await here.post(mode=mode)
        await fake.server.stop()
        # As a real instance would: in push D has nothing to say without P.
        here.decode[0].script = hold
        answer = await here.post(mode=mode)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert fake.url in error["message"]
        again = await here.post(mode=mode)
        assert again.status_code == 503
        assert fake.url in again.json()["error"]["message"]


@both_modes
async def test_d_dies_before_its_first_byte(mode: str) -> None:
    async with world() as here, bounded():
        if mode == "push":
            here.prefill[0].script = hold
            here.decode[0].script = holding_until(here.prefill[0].arrived, die)
        else:
            here.decode[0].script = die
        answer = await here.post(prompt(stream=True), mode)
        assert answer.status_code == 502
        assert here.failures("decode", "dropped") == 1
        if mode == "push":
            await here.prefill[0].legs[0].gone.wait()
        await serves_again(here, mode)


@both_modes
async def test_an_empty_stream_is_an_error(mode: str) -> None:
    async with world() as here, bounded():

        async def script(_leg: Received, connection: Connection) -> None:
            await connection.head()
            await connection.end()

        here.decode[0].script = script
        answer = await here.post(prompt(stream=True), mode)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "incomplete"


@both_modes
async def test_d_dies_in_a_whole_answer(mode: str) -> None:
    async with world() as here, bounded():

        async def script(_leg: Received, connection: Connection) -> None:
            await connection.head(200, "application/json", 100)
            await connection.chunk(b'{"half": ')
            connection.die()

        here.decode[0].script = script
        assert (await here.post(mode=mode)).status_code == 502
        assert here.failures("decode", "dropped") == 1


async def test_an_answer_beyond_the_limit() -> None:
    async with world(limits=RouterLimits(max_answer_bytes=5000)) as here, bounded():
        here.decode[0].script = answering(200, b"x" * 6000)
        answer = await here.post()
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "too_large"


@pytest.mark.parametrize(
    ("timeouts", "held", "leg"),
    [
        (Timeouts(prefill_s=0.05), "prefill", "prefill"),
        (Timeouts(first_byte_s=0.05), "decode", "decode"),
        (Timeouts(total_s=0.05), "prefill", None),
        (Timeouts(total_s=0.05), "decode", None),
    ],
)
@both_modes
async def test_deadlines(mode: str, timeouts: Timeouts, held: str, leg: str | None) -> None:
    async with world(timeouts=timeouts) as here, bounded():
        fake = {"prefill": here.prefill, "decode": here.decode}[held][0]
        fake.script = hold
        if held == "prefill":
            here.decode[0].script = hold
        answer = await here.post(prompt(stream=True), mode)
        assert answer.status_code == 504
        if leg is not None:
            assert here.failures(leg, "timeout") == 1
        for one in (*here.prefill[0].legs, *here.decode[0].legs):
            if one.params["do_remote_decode"] == (held == "prefill"):
                await one.gone.wait()


async def let_go(here: World) -> str:
    """The transfer that P was told to let go of."""
    async with bounded():
        return await here.prefill[0].let_go.get()


@both_modes
async def test_p_lets_go_of_what_d_never_heard_of(mode: str) -> None:
    """D dies with its leg: only the router knows that nobody will collect P's KV."""
    async with world() as here, bounded():
        await here.post(mode=mode)
        await asyncio.gather(*here.services.background)
        assert here.prefill[0].let_go.empty(), "all went well"
        here.decode[0].script = die
        answer = await here.post(mode=mode)
        assert answer.status_code == 502
        assert await let_go(here) == answer.headers["x-kv-transfer-id"]
        await serves_again(here, mode)
        assert here.prefill[0].let_go.empty()


@both_modes
async def test_p_lets_go_when_the_client_leaves(mode: str) -> None:
    async with world() as here, bounded():
        here.decode[0].script = hold
        call = asyncio.create_task(here.post(mode=mode))
        await here.decode[0].arrived.wait()
        await leave(call)
        (leg,) = here.decode[0].legs
        assert await let_go(here) == leg.params["transfer_id"]
        await serves_again(here, mode)


async def test_an_instance_that_told_nothing_of_itself_is_not_told_to_let_go() -> None:
    def prepare(fakes: list[FakeInstance]) -> None:
        for fake in fakes:
            fake.tells = False

    async with world(prepare=prepare) as here, bounded():
        here.decode[0].script = die
        assert (await here.post(mode="pull")).status_code == 502
        await asyncio.gather(*here.services.background)
        assert here.prefill[0].let_go.empty()


async def test_an_instance_that_tells_nonsense_is_asked_again() -> None:
    """Nested so deeply that it cannot be read, it once ended what keeps asking."""

    def nonsense(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b"[" * 100_000)

    async with httpx.AsyncClient(transport=httpx.MockTransport(nonsense)) as client:
        instance = Instance(InstanceSpec("http://p:1"), client)
        await instance.learn()
    assert instance.info is None and "unusable: nested too deeply" in instance.problem


# (d) The client leaves.


async def leave(task: asyncio.Task[httpx.Response]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@both_modes
async def test_the_client_leaves_during_prefill(mode: str) -> None:
    async with world() as here, bounded():
        prefill, decode = here.prefill[0], here.decode[0]
        prefill.script = decode.script = hold
        call = asyncio.create_task(here.post(prompt(stream=True), mode))
        await prefill.arrived.wait()
        if mode == "push":
            await decode.arrived.wait()
        await leave(call)
        await prefill.legs[0].gone.wait()
        if mode == "push":
            await decode.legs[0].gone.wait()
        await serves_again(here, mode)
        assert here.calls(mode, "client_left") == 1
        assert len(decode.legs) == (2 if mode == "push" else 1)


@both_modes
@pytest.mark.parametrize("stream", [True, False])
async def test_the_client_leaves_while_d_computes(mode: str, stream: bool) -> None:
    async with world() as here, bounded():
        decode = here.decode[0]
        decode.script = hold
        call = asyncio.create_task(here.post(prompt(stream=stream), mode))
        await decode.arrived.wait()
        await leave(call)
        await decode.legs[0].gone.wait()
        await serves_again(here, mode)
        assert here.calls(mode, "client_left") == 1


@both_modes
async def test_the_client_leaves_in_the_middle_of_the_stream(mode: str) -> None:
    async with world() as here, bounded():
        decode = here.decode[0]

        async def script(_leg: Received, connection: Connection) -> None:
            await connection.head()
            await connection.chunk(CHUNKS[0])
            await connection.until_gone()

        decode.script = script
        if mode == "push":
            here.prefill[0].script = hold
        async with streaming(here, mode) as answer:
            assert await anext(answer.aiter_raw()) == CHUNKS[0]
        await decode.legs[0].gone.wait()
        if mode == "push":
            await here.prefill[0].legs[0].gone.wait()
        await serves_again(here, mode)
        assert here.calls(mode, "client_left") == 1


# (e) D dies after some chunks.


@both_modes
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("orderly", [False, True])
async def test_d_ends_in_the_middle_of_the_stream(mode: str, torn: bool, orderly: bool) -> None:
    async with world() as here, bounded():
        sent = b"".join(CHUNKS) + (b'data: {"cho' if torn else b"")
        last = asyncio.Event()

        async def script(_leg: Received, connection: Connection) -> None:
            await connection.head()
            await connection.chunk(sent)
            await last.wait()
            if orderly:
                await connection.end()
            else:
                connection.die()

        here.decode[0].script = script
        async with streaming(here, mode) as answer:
            assert answer.status_code == 200
            chunks = answer.aiter_raw()
            got = await anext(chunks)
            last.set()
            async for chunk in chunks:
                got += chunk
        assert got.startswith(sent)
        events = got.removesuffix(b"\n\n").split(b"\n\n")
        error = json.loads(events[-1].removeprefix(b"data: "))["error"]
        assert here.decode[0].url in error["message"]
        assert error["code"] == ("incomplete" if orderly else "dropped")
        assert events[:3] == b"".join(CHUNKS).removesuffix(b"\n\n").split(b"\n\n")
        assert here.calls(mode, "broken_stream") == 1
        await serves_again(here, mode)


@pytest.mark.parametrize("after", [b"", DONE])
async def test_an_error_that_d_tells_in_its_stream_is_not_doubled(after: bytes) -> None:
    async with world() as here, bounded():
        told = event("a") + b'data: {"error": {"message": "KV lost"}}\n\n' + after

        async def script(_leg: Received, connection: Connection) -> None:
            await connection.head()
            await connection.chunk(told)
            await connection.end()

        here.decode[0].script = script
        assert (await here.post(prompt(stream=True))).content == told
        assert here.calls("pull", "broken_stream") == 1
        assert here.failures("decode", "error_told") == 1


@both_modes
async def test_total_time_ends_a_stream_with_an_error_event(mode: str) -> None:
    async with world(timeouts=Timeouts(total_s=1.0)) as here, bounded():

        async def script(_leg: Received, connection: Connection) -> None:
            await connection.head()
            await connection.chunk(CHUNKS[0])
            await connection.until_gone()

        here.decode[0].script = script
        answer = await here.post(prompt(stream=True), mode)
        assert answer.content.startswith(CHUNKS[0] + b'data: {"error":')
        await here.decode[0].legs[0].gone.wait()


# Retries.


@both_modes
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_retry_goes_elsewhere_under_a_new_transfer_id(mode: str, leg: str) -> None:
    async with world(2, 2, retries=1) as here, bounded():
        failing = {"prefill": here.prefill, "decode": here.decode}[leg]
        if mode == "push":
            here.decode[0].script = hold  # or it would be done before P's end is seen
        failing[0].script = die
        answer = await here.post(prompt(stream=True), mode, x_request_id="same")
        assert answer.status_code == 200
        assert answer.content == b"".join((*CHUNKS, DONE))
        assert answer.headers[f"x-kv-{leg}"] == failing[1].url
        first, second = failing[0].legs[0], failing[1].legs[0]
        assert first.params["transfer_id"] != second.params["transfer_id"]
        assert answer.headers["x-kv-transfer-id"] == second.params["transfer_id"]
        assert first.header("x-request-id") == second.header("x-request-id") == "same"
        assert here.count("kvcourier_router_retries_total", leg=leg) == 1
        told = {one.params["transfer_id"] for fake in here.decode for one in fake.legs}
        asked = {one.params["transfer_id"] for fake in here.prefill for one in fake.legs}
        assert told <= asked


@pytest.mark.parametrize(
    "script", [answering(500, REFUSAL), answering(200, b"{}")], ids=["status", "no handoff"]
)
async def test_only_connections_are_retried(script: object) -> None:
    async with world(2, 2, retries=3) as here, bounded():
        here.prefill[0].script = script  # type: ignore[assignment]
        assert (await here.post(mode="pull")).status_code >= 500
        assert not here.prefill[1].legs


async def test_retries_end_with_the_instances() -> None:
    async with world(2, 1, retries=9) as here, bounded():
        for fake in here.prefill:
            fake.script = die
        assert (await here.post(mode="pull")).status_code == 502
        assert [len(fake.legs) for fake in here.prefill] == [1, 1]


async def test_nothing_is_retried_by_default() -> None:
    async with world(2, 2) as here, bounded():
        here.prefill[0].script = die
        assert (await here.post(mode="pull")).status_code == 502
        assert not here.prefill[1].legs


# Instances that come, go and change.


async def test_a_restarted_instance_is_asked_again() -> None:
    """The old life's coordinates are not used once its connection has failed."""
    async with world(prefill_port=free_port()) as here, bounded():
        prefill = here.prefill[0]
        assert (await here.post(mode="push")).status_code == 200
        await prefill.server.stop()
        here.decode[0].script = hold
        assert (await here.post(mode="push")).status_code == 503
        here.decode[0].script = here.decode[0].serve
        reborn = FakeInstance("p-new", prefill.server.port)
        reborn.side_channel_port = 5700
        await reborn.server.start()
        try:
            assert (await here.post(mode="push")).status_code == 200
            params = here.decode[0].legs[-1].params
            assert (params["remote_engine_id"], params["remote_port"]) == ("p-new", 5700)
        finally:
            await reborn.server.stop()


@pytest.mark.parametrize("change", ["incarnation", "engine_id"])
async def test_another_incarnation_in_an_answer_makes_the_router_ask(change: str) -> None:
    async with world(timeouts=Timeouts(refresh_s=1000)) as here, bounded():
        prefill = here.prefill[0]
        assert (await here.post(mode="push")).status_code == 200
        # The same address, but the process behind it has changed, unseen by the router.
        prefill.incarnation = "life-2"
        if change == "engine_id":
            prefill.engine_id = "p-new"
            here.decode[0].script = hold
            refused = await here.post(mode="push")
            assert refused.status_code == 502
            assert refused.json()["error"]["code"] == "stale_coordinates"
            here.decode[0].script = here.decode[0].serve
        known = None
        while known != "life-2":
            assert (await here.post(mode="push")).status_code == 200
            await asyncio.gather(*here.services.background)
            (told,) = (await here.client.get("/kvcourier/instances")).json()["prefill"]
            known = told["incarnation"]
        assert (await here.post(mode="push")).status_code == 200
        assert here.decode[0].legs[-1].params["remote_engine_id"] == prefill.engine_id


async def test_an_instance_that_is_not_up_yet_is_learned_later() -> None:
    timeouts = Timeouts(backoff_s=0.01, backoff_max_s=0.02)
    async with world(prefill_port=free_port(), timeouts=timeouts) as here, bounded():
        prefill = here.prefill[0]
        await prefill.server.stop()
        assert (await here.post(mode="push")).status_code == 503
        late = FakeInstance("p-late", prefill.server.port)
        await late.server.start()
        try:
            await late.asked.wait()  # by the router, without a request of a client
            assert (await here.post(mode="push")).status_code == 200
            assert here.decode[0].legs[-1].params["remote_engine_id"] == "p-late"
        finally:
            await late.server.stop()


async def test_shutting_down_ends_running_legs() -> None:
    async with world() as here:
        here.prefill[0].script = here.decode[0].script = hold
        call = asyncio.create_task(here.post(mode="push"))
        async with bounded():
            await here.prefill[0].arrived.wait()
            await here.decode[0].arrived.wait()
        prefill, decode = here.prefill[0].legs[0], here.decode[0].legs[0]
    async with bounded():
        await asyncio.gather(call, return_exceptions=True)
        await prefill.gone.wait()
        await decode.gone.wait()
