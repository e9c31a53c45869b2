"""When D is bound, and bound anew, and when there is no P, on real sockets."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.router.config import Timeouts
from kvcourier.router.instances import Instance
from kvcourier.router.pace import Pace, Progress, bind_after_s, look_again_s
from kvcourier.router.policy import Candidate, Skipped, most_known, why_alone
from kvcourier.router.prompts import PART_TOKENS
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
    hold,
    holding_until,
    prompt,
    world,
)

both_modes = pytest.mark.parametrize("mode", MODES)
anyio = pytest.mark.anyio
FULL = b'{"error": {"message": "full"}}'
OFTEN = Timeouts(load_s=0.01, near_lead_s=0.01)
repeatable = settings(derandomize=True, deadline=None)


# The estimate, which is pure.


@repeatable
@given(st.floats(0.001, 10), st.lists(st.integers(1, 200), min_size=30, max_size=60))
def test_a_steady_pace_is_learned(part_s: float, prompts: list[int]) -> None:
    pace = Pace()
    assert pace.expected_s(10) is None
    for num_parts in prompts:
        pace.learn(num_parts, part_s * num_parts)
    expected = pace.expected_s(7)
    assert expected is not None and abs(expected - 7 * part_s) < 1e-6 * expected
    pace.learn(0, 1.0)
    pace.learn(5, 0.0)
    assert pace.expected_s(7) == expected


@repeatable
@given(st.one_of(st.none(), st.floats(0, 1e4)), st.floats(0.001, 10))
def test_d_is_bound_before_the_expected_end(expected_s: float | None, lead_s: float) -> None:
    wait_s = bind_after_s(expected_s, lead_s)
    assert wait_s >= 0
    assert wait_s == 0 or wait_s + lead_s <= (expected_s or 0)


@repeatable
@given(st.floats(0, 1e4), st.floats(0.001, 10))
def test_looking_again_comes_nearer_and_ends(left_s: float, lead_s: float) -> None:
    questions = 0
    while (wait_s := look_again_s(left_s, lead_s)) is not None:
        assert lead_s <= wait_s <= left_s - lead_s / 2
        left_s -= wait_s
        questions += 1
    # Each question takes most of what is left.
    assert questions <= 12
    assert look_again_s(None, lead_s) is None


def test_progress() -> None:
    assert Progress(25, 100).left == 0.75
    assert Progress(100, 100).left == Progress(120, 100).left == 0.0
    assert Progress(0, 0).left == 1.0


@repeatable
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 300))
def test_alone_only_what_is_little(num_tokens: int, known: int, below: int) -> None:
    why = why_alone(num_tokens, known, below)
    assert (why is not None) == (min(num_tokens, num_tokens - known) < below)
    assert (why is Skipped.SHORT) == (num_tokens < below)


def test_most_known_is_able() -> None:
    able = Candidate(num_known=2, num_requests=3)
    candidates = [
        Candidate(num_known=9, usable=False),
        Candidate(num_known=9, reachable=False),
        Candidate(num_known=9, trusted=False),
        Candidate(num_known=9, kv_used=1.0),
        able,
        Candidate(num_known=2, num_requests=4),
        Candidate(),
    ]
    assert most_known(candidates) == 4
    assert most_known([Candidate()]) is None


# Near.


def known(here: World, fake: FakeInstance) -> Instance:
    for side in here.services.sides.values():
        found = side.get(fake.url)
        if found is not None:
            return found
    raise AssertionError(fake.url)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


@anyio
@both_modes
async def test_near_d_is_chosen_by_the_load_of_the_moment_before_p_answers(mode: str) -> None:
    settings = {"decode_policy": "least_loaded", "binding": "near", "timeouts": OFTEN}
    async with world(1, 2, **settings) as here, bounded():
        prefill = here.prefill[0]
        here.decode[0].load, here.decode[1].load = (0, 0.0), (1, 0.0)
        await until(lambda: all(known(here, fake).work.load for fake in here.decode))
        known(here, prefill).work.pace.learn(1, 0.2)
        gate = asyncio.Event()
        prefill.script = holding_until(gate, prefill.serve)
        prefill.progress = (0, 100)
        call = asyncio.create_task(here.post(mode=mode))
        await until(lambda: prefill.questions)
        assert not any(fake.legs for fake in here.decode)
        here.decode[0].load = (9, 0.5)

        def is_seen() -> bool:
            load = known(here, here.decode[0]).work.load
            return load is not None and load.num_requests == 9

        await until(is_seen)
        prefill.progress = (98, 100)
        await here.decode[1].arrived.wait()  # while P is held
        transfer_id = here.decode[1].legs[0].params["transfer_id"]
        assert set(prefill.questions) == {transfer_id}
        gate.set()
        answer = await call
        assert answer.status_code == 200
        assert answer.headers["x-kv-binding"] == "near"
        assert not here.decode[0].legs


@anyio
async def test_near_p_may_be_quicker_than_expected() -> None:
    async with world(binding="near") as here, bounded():
        await until(lambda: known(here, here.prefill[0]).info)
        known(here, here.prefill[0]).work.pace.learn(1, 1000.0)
        answer = await here.post(prompt(stream=True), "push")
        assert answer.content == b"".join((*CHUNKS, DONE))
        (leg,) = here.decode[0].legs
        assert leg.params["remote_block_ids"] is None, "a push that is bound late"


@anyio
async def test_near_without_an_estimate_or_an_answer_is_early() -> None:
    async with world(binding="near") as here, bounded():
        prefill = here.prefill[0]
        gate = asyncio.Event()
        prefill.script = holding_until(gate, prefill.serve)
        call = asyncio.create_task(here.post(mode="push"))
        await here.decode[0].arrived.wait()  # while P is held
        gate.set()
        assert (await call).status_code == 200


@anyio
async def test_the_pace_of_p_is_learned_from_its_answers() -> None:
    async with world(binding="near") as here, bounded():
        await here.post(prompt(prompt=[1] * 640), "push")
        assert known(here, here.prefill[0]).work.pace.part_s


# Bound anew.

Script = Callable[[Received, Connection], Awaitable[None]]


@anyio
@both_modes
@pytest.mark.parametrize("binding", ["early", "near", "late"])
@pytest.mark.parametrize("fails", [die, answering(503, FULL)], ids=["dies", "full"])
async def test_another_d_gets_the_prompt_and_p_computes_it_once(
    mode: str, binding: str, fails: Script
) -> None:
    async with world(1, 2, rebinds=1, binding=binding) as here, bounded():
        prefill, (bad, good) = here.prefill[0], here.decode
        await until(lambda: known(here, prefill).info)
        bad.script = fails
        if binding != "late":
            # D fails while P computes.
            gate = asyncio.Event()
            prefill.script = holding_until(gate, prefill.serve)
            good.script = holding_until(prefill.arrived, good.serve)
        call = asyncio.create_task(here.post(prompt(stream=True), mode))
        await good.arrived.wait()
        if binding != "late":
            gate.set()
        answer = await call
        assert answer.status_code == 200, answer.text
        assert answer.content == b"".join((*CHUNKS, DONE))
        assert answer.headers["x-kv-decode"] == good.url
        (asked,) = prefill.legs
        assert asked.params["rebindable"] is True
        first, second = bad.legs[0].params, good.legs[0].params
        assert second == first | {"binding": 1} and first["binding"] == 0
        assert here.count("kvcourier_router_rebinds_total", kind="dropped") + here.count(
            "kvcourier_router_rebinds_total", kind="status"
        ) == (1)
        assert here.count("kvcourier_router_retries_total", leg="decode") == 0
        assert here.calls(mode, "ok") == 1


@anyio
@both_modes
async def test_a_d_that_stalls_is_left_for_one_that_is_less_busy(mode: str) -> None:
    quick = Timeouts(stall_s=0.05)
    async with world(1, 2, rebinds=1, timeouts=quick, policy="least_in_flight") as here, bounded():
        slow, good = here.decode
        slow.script = hold
        answer = await here.post(mode=mode)
        assert answer.status_code == 200
        assert answer.headers["x-kv-decode"] == good.url
        await slow.legs[0].gone.wait()
        assert here.failures("decode", "stalled") == 1


@anyio
async def test_nobody_better_means_waiting_on() -> None:
    quick = Timeouts(stall_s=0.01)
    async with world(1, 1, rebinds=1, timeouts=quick) as here, bounded():
        gate = asyncio.Event()
        here.decode[0].script = holding_until(gate, here.decode[0].serve)
        call = asyncio.create_task(here.post())
        await here.decode[0].arrived.wait()
        for _ in range(5):
            await here.client.get("/health")
        gate.set()
        assert (await call).status_code == 200
        assert here.failures("decode", "stalled") == 0


@anyio
@both_modes
async def test_when_all_fail_the_client_gets_the_last_answer_and_p_lets_go(mode: str) -> None:
    async with world(1, 2, rebinds=5) as here, bounded():
        for fake in here.decode:
            fake.script = answering(503, FULL)
        answer = await here.post(mode=mode)
        assert (answer.status_code, answer.content) == (503, FULL)
        assert [len(fake.legs) for fake in here.decode] == [1, 1]
        assert await here.prefill[0].let_go.get() == answer.headers["x-kv-transfer-id"]


@anyio
async def test_rebinds_come_before_retries() -> None:
    async with world(2, 3, rebinds=1, retries=1) as here, bounded():
        for fake in here.decode[:2]:
            fake.script = die
        answer = await here.post()
        assert answer.status_code == 200
        assert answer.headers["x-kv-decode"] == here.decode[2].url
        assert [len(fake.legs) for fake in here.prefill] == [1, 1], "computed anew the second time"


# Without P.


@anyio
@both_modes
@pytest.mark.parametrize("stream", [False, True])
async def test_a_short_prompt_goes_to_d_alone(mode: str, stream: bool) -> None:
    async with world(1, 1, skip_below=100) as here, bounded():
        sent = prompt(prompt=[1] * 99, stream=stream)
        answer = await here.post(sent, mode)
        assert answer.status_code == 200
        assert "x-kv-prefill" not in answer.headers
        assert answer.headers["x-kv-decode"] == here.decode[0].url
        assert here.decode[0].legs[0].body == sent
        assert not here.prefill[0].legs
        assert here.count("kvcourier_router_skipped_total", reason="short") == 1
        await here.post(prompt(prompt=[2] * 100), mode)
        assert len(here.prefill[0].legs) == 1


@anyio
async def test_a_prompt_that_d_has_goes_to_that_d_alone() -> None:
    async with world(1, 3, skip_below=100) as here, bounded():
        turn = list(range(640))
        first = await here.post(prompt(prompt=turn))
        assert "x-kv-prefill" in first.headers
        for _ in range(3):
            turn += [7] * PART_TOKENS
            again = await here.post(prompt(prompt=turn))
            assert "x-kv-prefill" not in again.headers
            assert again.headers["x-kv-decode"] == first.headers["x-kv-decode"]
        assert here.count("kvcourier_router_skipped_total", reason="cached") == 3
        other = await here.post(prompt(prompt=[*turn, *range(200)]))
        assert "x-kv-prefill" in other.headers


@anyio
async def test_alone_a_d_that_fails_is_followed_by_another_as_well() -> None:
    async with world(1, 2, skip_below=100, rebinds=1) as here, bounded():
        here.decode[0].script = die
        answer = await here.post(prompt(prompt=[1]))
        assert answer.status_code == 200
        assert answer.headers["x-kv-decode"] == here.decode[1].url
    async with world(1, 2, skip_below=100, retries=1) as here, bounded():
        here.decode[0].script = die
        assert (await here.post(prompt(prompt=[1]))).status_code == 200
        assert not here.prefill[0].legs
