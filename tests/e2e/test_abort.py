"""A client that leaves takes everything with it, whatever stands in whose queue."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from e2e.cluster import MODES, NUM_TOKENS, Cluster, Server, short_of_blocks, until
from engine.rig import generate, random_prompt
from kvcourier.engine.engine import Engine

LONG = 2700
"""Tokens; a hundred chunks, and two thirds of a cache."""

EXPIRY_COUNTERS = (
    "kvcourier_leases_expired_total",
    "kvcourier_registrations_expired_total",
    "kvcourier_quarantines_expired_total",
)


@contextlib.contextmanager
def queued(cluster: Cluster, mode: str) -> Iterator[None]:
    """P has no blocks for it."""
    with short_of_blocks(cluster.prefill), leaving(cluster, mode):
        wait_for(cluster.prefill, "kvcourier:num_requests_waiting")
        if mode == "push":
            wait_for(cluster.decode, "kvcourier_wants")
        yield


@contextlib.contextmanager
def prefill_running(cluster: Cluster, mode: str) -> Iterator[None]:
    """P computes its chunks."""
    with leaving(cluster, mode):
        wait_for(cluster.prefill, "kvcourier:num_requests_running")
        yield


@contextlib.contextmanager
def decode_queued(cluster: Cluster, mode: str) -> Iterator[None]:
    """P has computed it, and D has no blocks for it."""
    with short_of_blocks(cluster.decode), leaving(cluster, mode):
        wait_for(cluster.decode, "kvcourier:num_requests_waiting_remote")
        wait_for(cluster.prefill, "kvcourier:kv_loans")
        yield


@contextlib.contextmanager
def prefill_hanging(cluster: Cluster, mode: str) -> Iterator[None]:
    """P has stopped to answer; in push D waits for it with blocks of its own."""
    cluster.router.ask(random_prompt(40, seed=f"known-{mode}"), mode)
    cluster.wait_idle()
    with cluster.prefill.stopped(), leaving(cluster, mode):
        if mode == "push":
            wait_for(cluster.decode, "kvcourier:kv_loans")
        else:
            wait_for(cluster.router, "kvcourier_router_in_flight")
        yield


@contextlib.contextmanager
def streaming(cluster: Cluster, mode: str) -> Iterator[None]:
    """The client has seen some tokens."""
    prompt = random_prompt(100, seed=f"streaming-{mode}")
    with cluster.router.streaming(prompt, mode, num_tokens=3000) as stream:
        stream.read(2)
        assert not stream.is_done
        yield


PHASES: tuple[Callable[[Cluster, str], contextlib.AbstractContextManager[None]], ...] = (
    queued,
    prefill_running,
    decode_queued,
    prefill_hanging,
    streaming,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_client_leaves(
    cluster: Cluster,
    single: Engine,
    phase: Callable[[Cluster, str], contextlib.AbstractContextManager[None]],
    mode: str,
) -> None:
    servers = (cluster.prefill, cluster.decode)
    expired = [[server.metric(name) for name in EXPIRY_COUNTERS] for server in servers]
    with phase(cluster, mode):
        answered = cluster.decode.metric("kvcourier:request_success_total")
    cluster.wait_idle()
    until(
        lambda: cluster.router.metric("kvcourier_router_in_flight") == 0,
        "the router still has a call",
    )
    # It was given up, not served to an end that nobody sees.
    assert cluster.decode.metric("kvcourier:request_success_total") == answered
    # At once, not when some time had passed.
    assert [[server.metric(name) for name in EXPIRY_COUNTERS] for server in servers] == expired
    for next_mode in MODES:
        prompt = random_prompt(90, seed=f"{phase.__name__}-{mode}-{next_mode}")
        (expected,) = generate(single, [prompt], max_tokens=NUM_TOKENS)
        assert cluster.router.ask(prompt, next_mode).token_ids == expected
    cluster.wait_idle()


def leaving(cluster: Cluster, mode: str) -> contextlib.AbstractContextManager[object]:
    """A client of the router that does not wait for its long prompt."""
    number = next(_NUMBERS)
    prompt = random_prompt(LONG, seed=f"leaving-{number}")
    return cluster.router.sent(prompt, mode, num_tokens=1000)


_NUMBERS = iter(range(1_000_000))


def wait_for(server: Server, name: str) -> None:
    """Until a gauge shows that something is there."""
    until(lambda: server.metric(name) >= 1, f"{server.name}: {name} stays 0")
