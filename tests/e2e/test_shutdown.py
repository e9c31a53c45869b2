"""A process that is told to end ends, says so to its clients, and can be replaced under way."""

import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from e2e.cluster import (
    MODES,
    NUM_TOKENS,
    Cluster,
    Server,
    error_of,
    running_cluster,
    short_of_blocks,
    until,
    wait_known,
)
from engine.rig import generate, random_prompt
from kvcourier.engine.engine import Engine

EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGKILL: -9}
POLITE = [
    (name, number)
    for number in (signal.SIGTERM, signal.SIGINT)
    for name in ("prefill", "decode", "router")
]
RUDE = [("prefill", signal.SIGKILL), ("decode", signal.SIGKILL)]


def named(value: object) -> str:
    """How a test's parameter is shown."""
    return value.name if isinstance(value, signal.Signals) else str(value)


pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def mortals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose processes come and go. What nobody can confirm any more is freed soon."""
    flags = ("--kv-lease-duration=3", "--push-registration-timeout=20")
    with running_cluster(tmp_path_factory.mktemp("mortals"), *flags) as cluster:
        yield cluster


@pytest.fixture
def mortal(mortals: Cluster, single: Engine) -> Cluster:
    """The cluster, in good health: a test that failed must not fail the next one."""
    try:
        ask_both_modes(mortals, single, f"health-{next(_NUMBERS)}")
    except (AssertionError, httpx.TransportError):
        for server in mortals.servers:
            if server.child.exit_code() is None:
                server.send_signal(signal.SIGKILL)
            server.wait_end()
        for server in mortals.servers:
            server.start()
        for server in mortals.servers:
            server.wait_ready()
        wait_known(mortals.router)
        ask_both_modes(mortals, single, f"health-{next(_NUMBERS)}")
    return mortals


_NUMBERS = itertools.count()


@pytest.mark.parametrize(("name", "number"), POLITE, ids=named)
def test_at_idle(mortal: Cluster, single: Engine, name: str, number: signal.Signals) -> None:
    server: Server = getattr(mortal, name)
    server.send_signal(number)
    assert server.wait_end() == EXIT_CODES[number]
    replace(mortal, server)
    # Either mode may be the first to meet the new life.
    first_to_last = MODES if number is signal.SIGTERM else MODES[::-1]
    ask_both_modes(mortal, single, f"after-{name}-{number}", first_to_last)
    mortal.wait_idle()


@pytest.mark.parametrize(("name", "number"), POLITE + RUDE, ids=named)
def test_with_requests_in_flight(
    mortal: Cluster, single: Engine, name: str, number: signal.Signals
) -> None:
    server: Server = getattr(mortal, name)
    unique = f"in-flight-{name}-{number}"
    with ExitStack() as stack:
        blocker = stack.enter_context(short_of_blocks(mortal.prefill))
        streams = [
            stack.enter_context(
                mortal.router.streaming(random_prompt(60, f"{unique}-{mode}"), mode, 1000)
            )
            for mode in MODES
        ]
        for stream in streams:
            stream.read(2)
        queued: list[HTTPConnection] = [
            stack.enter_context(mortal.router.sent(random_prompt(2700, f"{unique}-q{mode}"), mode))
            for mode in MODES
        ]
        until(
            lambda: mortal.prefill.metric("kvcourier:num_requests_waiting") == len(MODES),
            "the prompts do not wait on P",
        )
        server.send_signal(number)
        assert server.wait_end() == EXIT_CODES[number]
        if name == "prefill":
            # A client of its own that is killed under it is told by the broken connection.
            error = blocker.read().error
            assert error is not None
            assert number is signal.SIGKILL or error["code"] == "shutting_down"
        blocker.response.close()
        for connection in queued:
            error = error_of(connection)
            assert error["message"], error
        for stream in streams:
            stream.read()
            if name == "prefill":
                # D has all it needs.
                assert stream.is_done and stream.error is None
            else:
                assert stream.error is not None and stream.error["message"], stream.error
    replace(mortal, server)
    ask_both_modes(mortal, single, f"{unique}-after")
    mortal.wait_idle()


def ask_both_modes(
    cluster: Cluster, single: Engine, name: str, modes: Sequence[str] = MODES
) -> None:
    """The next request of each mode is right."""
    prompts = {mode: random_prompt(75, f"{name}-{mode}") for mode in modes}
    expected = generate(single, list(prompts.values()), max_tokens=NUM_TOKENS)
    found: dict[str, Any] = {}
    for mode, prompt in prompts.items():
        with cluster.router.streaming(prompt, mode) as stream:
            stream.read()
        found[mode] = stream.error or stream.token_ids
    assert found == dict(zip(prompts, expected, strict=True))


def replace(cluster: Cluster, ended: Server) -> None:
    """Start a process that has ended again, at the same address; the others have lived on."""
    for server in cluster.servers:
        assert (server.child.exit_code() is None) == (server is not ended), server.log()
    incarnations = {} if ended is cluster.router else known_incarnations(cluster)
    ended.start()
    ended.wait_ready()
    wait_known(cluster.router)
    if ended is not cluster.router:
        until(
            lambda: known_incarnations(cluster)[ended.url] == ended.info()["incarnation"],
            "the router still knows the old incarnation",
        )
        assert ended.info()["incarnation"] != incarnations[ended.url]


def known_incarnations(cluster: Cluster) -> dict[str, str | None]:
    """By address, as the router knows them."""
    sides = cluster.router.get("/kvcourier/instances").json()
    return {one["url"]: one["incarnation"] for side in ("prefill", "decode") for one in sides[side]}
