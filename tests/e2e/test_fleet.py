"""Two prefill and four decode instances: one refuses all, one dies, and no client notices."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.cluster import CHUNK_TOKENS, NUM_TOKENS, body_of
from e2e.fleet import Fleet, refusing_instance, running_fleet
from engine.rig import generate, random_prompt
from kvcourier.engine.engine import Engine

pytestmark = pytest.mark.timeout(300)
FLAGS = (
    *("--mode=push", "--binding=near", "--rebinds=3", "--retries=3"),
    *("--prefill-policy=prefix_aware", "--decode-policy=least_loaded", "--load-interval=0.2"),
    "--breaker-failures=0",  # or the one that refuses would soon be asked no more
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with (
        refusing_instance() as refusing,
        running_fleet(folder, 2, 3, FLAGS, more_decode=[refusing]) as ready,
    ):
        yield ready


def prompts_of(name: str, count: int) -> list[tuple[int, ...]]:
    return [
        random_prompt((2 + number % 5) * CHUNK_TOKENS + number, seed=f"{name}-{number}")
        for number in range(count)
    ]


def ask_all(
    fleet: Fleet, single: Engine, prompts: list[tuple[int, ...]], **headers: str
) -> list[str]:
    """All at once; each answer is right. Returns who gave them."""
    expected = generate(single, prompts, max_tokens=NUM_TOKENS)

    def ask(prompt: tuple[int, ...]) -> tuple[list[int], str]:
        response = fleet.router.post(body_of(prompt), headers=headers)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"], response.headers["x-kv-decode"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, prompts))
    assert [tokens for tokens, _ in answers] == expected
    return [decode for _, decode in answers]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_decode_instance_that_refuses_costs_no_second_prefill(
    fleet: Fleet, single: Engine, mode: str
) -> None:
    rebinds = fleet.router.metric("kvcourier_router_rebinds_total", kind="status")
    computed = sum(each.metric("kvcourier:prompt_tokens_total") for each in fleet.prefill)
    prompts = prompts_of(f"refused-{mode}", 16)
    used = ask_all(fleet, single, prompts, **{"x-kv-mode": mode})
    assert set(used) == {each.url for each in fleet.decode}
    assert fleet.router.metric("kvcourier_router_rebinds_total", kind="status") > rebinds
    after = sum(each.metric("kvcourier:prompt_tokens_total") for each in fleet.prefill)
    assert after - computed == sum(map(len, prompts)), "a prompt was computed twice"
    assert fleet.router.metric("kvcourier_router_retries_total") == 0
    for server in fleet.instances:
        server.wait_idle()


def test_no_call_fails_when_a_decode_instance_dies(fleet: Fleet, single: Engine) -> None:
    dying = fleet.decode[0]
    prompts = prompts_of("dying", 32)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_all, fleet, single, prompts)
        while not dying.metric("kvcourier:num_requests_waiting_remote") and not asking.done():
            pass  # until a request of it waits for KV
        dying.send_signal(signal.SIGKILL)
        used = asking.result()
    dying.wait_end()
    assert used.count(dying.url) < len(used)
    moved = fleet.router.metric("kvcourier_router_rebinds_total") + fleet.router.metric(
        "kvcourier_router_retries_total"
    )
    assert moved >= 1
    for server in fleet.instances:
        if server is not dying:
            server.wait_idle()
    # Nobody is sent there any more.
    assert dying.url not in ask_all(fleet, single, prompts_of("after", 8))
