"""Who is chosen, on real sockets: by load, prompt, conversation, and by what went wrong before."""

import asyncio
from collections.abc import Callable

import pytest

from kvcourier.router.breaker import BreakerSettings
from kvcourier.router.config import Timeouts
from kvcourier.router.instances import Instance
from router.fake_instance import (
    MODES,
    FakeInstance,
    World,
    answering,
    bounded,
    die,
    hold,
    holding_until,
    prompt,
    world,
)

pytestmark = pytest.mark.anyio
both_modes = pytest.mark.parametrize("mode", MODES)
REFUSAL = b'{"error": {"message": "full", "code": "draining"}}'
OFTEN = Timeouts(load_s=0.01, refresh_s=0.01)


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop go on until it holds; the caller bounds it."""
    while not condition():
        await asyncio.sleep(0)


def known(here: World, fake: FakeInstance) -> Instance:
    """What the router knows of one."""
    for side in here.services.sides.values():
        found = side.get(fake.url)
        if found is not None:
            return found
    raise AssertionError(fake.url)


# By load.


@both_modes
async def test_the_least_loaded_decode_instance_by_its_own_metrics(mode: str) -> None:
    async with world(1, 3, decode_policy="least_loaded", timeouts=OFTEN) as here, bounded():
        for fake, load in zip(here.decode, [(5, 0.1), (1, 0.2), (0, 0.99)], strict=True):
            fake.load = load
        await until(lambda: all(known(here, fake).work.load for fake in here.decode))
        for _ in range(3):
            await here.post(mode=mode)
        assert [len(fake.legs) for fake in here.decode] == [0, 3, 0]


async def test_a_load_that_cannot_be_read_counts_as_none() -> None:
    async with world(1, 2, policy="least_loaded", timeouts=OFTEN) as here, bounded():
        await asyncio.gather(*(fake.asked_load.wait() for fake in here.decode))
        for _ in range(4):
            assert (await here.post()).status_code == 200
        assert [len(fake.legs) for fake in here.decode] == [2, 2]


async def test_in_pull_the_decode_instance_is_chosen_when_p_has_answered() -> None:
    async with world(1, 2, decode_policy="least_loaded", timeouts=OFTEN) as here, bounded():
        prefill = here.prefill[0]
        here.decode[0].load, here.decode[1].load = (0, 0.0), (1, 0.0)
        await until(lambda: all(known(here, fake).work.load for fake in here.decode))
        gate = asyncio.Event()
        prefill.script = holding_until(gate, prefill.serve)
        call = asyncio.create_task(here.post(mode="pull"))
        await prefill.arrived.wait()
        # While P computes, the one that was free gets something to do from elsewhere.
        here.decode[0].load = (9, 0.5)

        def is_seen() -> bool:
            load = known(here, here.decode[0]).work.load
            return load is not None and load.num_requests == 9

        await until(is_seen)
        gate.set()
        answer = await call
        assert answer.headers["x-kv-decode"] == here.decode[1].url


async def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    async with world(3, 1, prefill_policy="prefix_aware") as here, bounded():
        system = [list(range(number, number + 640)) for number in range(3)]
        homes = []
        for tail in range(4):
            for number, ids in enumerate(system):
                answer = await here.post(prompt(prompt=[*ids, tail]))
                home = answer.headers["x-kv-prefill"]
                if tail == 0:
                    homes.append(home)
                assert home == homes[number]
        assert len(set(homes)) == 3, "new beginnings went to whoever had least to do"


async def test_a_conversation_stays_on_its_decode_instance() -> None:
    async with world(1, 4, decode_policy="conversation") as here, bounded():
        homes = {}
        for turn in range(3):
            for name in ("a", "b", "c", "d", "e"):
                answer = await here.post(x_conversation_id=name)
                homes.setdefault(name, answer.headers["x-kv-decode"])
                assert answer.headers["x-kv-decode"] == homes[name], turn
        assert len(set(homes.values())) > 1
        long = await here.post(x_conversation_id="x" * 300)
        assert long.status_code == 400


# By what went wrong.


@both_modes
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_instance_that_is_full_is_tried_elsewhere(mode: str, leg: str) -> None:
    async with world(2, 2, retries=1) as here, bounded():
        failing = {"prefill": here.prefill, "decode": here.decode}[leg]
        if mode == "push" and leg == "prefill":
            here.decode[0].script = hold
        failing[0].script = answering(503, REFUSAL)
        answer = await here.post(prompt(stream=True), mode)
        assert answer.status_code == 200
        assert answer.headers[f"x-kv-{leg}"] == failing[1].url
        assert failing[0].legs[0].params["transfer_id"] != failing[1].legs[0].params["transfer_id"]


async def test_the_last_answer_reaches_the_client_when_all_are_full() -> None:
    async with world(1, 2, retries=5) as here, bounded():
        for fake in here.decode:
            fake.script = answering(503, REFUSAL)
        answer = await here.post()
        assert (answer.status_code, answer.content) == (503, REFUSAL)
        assert [len(fake.legs) for fake in here.decode] == [1, 1]
        assert here.calls("pull", "upstream_error") == 1


async def test_an_instance_that_keeps_failing_is_left_alone_and_probed() -> None:
    breaker = BreakerSettings(failures=3, open_s=1000.0, max_open_s=1000.0)
    async with world(1, 2, breaker=breaker, retries=1) as here, bounded():
        bad, good = here.decode
        bad.script = answering(500, REFUSAL)
        statuses = [(await here.post()).status_code for _ in range(12)]
        assert len(bad.legs) == 3 and statuses.count(500) == 3
        assert here.count(
            "kvcourier_router_breaker_opened_total", leg="decode", address=bad.url
        ) == (1)
        told = (await here.client.get("/kvcourier/instances")).json()["decode"][0]
        assert told["breaker"] == "open"
        # Time passes: one request goes there to see, and if it is well, others follow.
        known(here, bad).breaker._open_until = 0.0
        bad.script = bad.serve
        assert [(await here.post()).status_code for _ in range(6)] == [200] * 6
        assert len(bad.legs) > 4 and len(good.legs) > 9


async def test_when_all_keep_failing_they_are_tried_all_the_same() -> None:
    breaker = BreakerSettings(failures=1, open_s=1000.0, max_open_s=1000.0)
    async with world(1, 1, breaker=breaker) as here, bounded():
        here.decode[0].script = die
        for _ in range(3):
            assert (await here.post()).status_code == 502
        assert len(here.decode[0].legs) == 3


async def test_an_instance_that_says_it_is_drained_gets_nothing_new() -> None:
    async with world(2, 1, timeouts=OFTEN) as here, bounded():
        here.prefill[0].draining = True
        await until(lambda: known(here, here.prefill[0]).is_draining)
        for _ in range(4):
            assert (await here.post()).status_code == 200
        assert [len(fake.legs) for fake in here.prefill] == [0, 4]
        here.prefill[0].draining = False
        await until(lambda: not known(here, here.prefill[0]).is_draining)
        await here.post()
        await here.post()
        assert here.prefill[0].legs


# A time of its own.


async def test_a_call_may_ask_for_less_time() -> None:
    async with world() as here, bounded():
        here.decode[0].script = hold
        answer = await here.post(x_request_timeout="0.05")
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        here.decode[0].script = here.decode[0].serve
        assert (await here.post(x_request_timeout="1e9")).status_code == 200
        assert here.decode[0].legs[-1].header("x-request-timeout") is None
        for wrong in ("0", "-1", "soon", "nan"):
            assert (await here.post(x_request_timeout=wrong)).status_code == 400
