"""Many requests in flight, in both modes at once, disturb neither each other nor the books."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from e2e.cluster import MODES, NUM_TOKENS, Cluster
from engine.rig import generate, random_prompt
from kvcourier.engine.engine import Engine

NUM_REQUESTS = 32


def test_32_requests_in_flight(cluster: Cluster, single: Engine) -> None:
    source = random.Random("lengths")
    lengths = [source.randint(2, 250) for _ in range(NUM_REQUESTS)]
    prompts = [random_prompt(length, seed=f"many-{i}") for i, length in enumerate(lengths)]
    expected = generate(single, prompts, max_tokens=NUM_TOKENS)
    servers = (cluster.prefill, cluster.decode)
    failures = [server.failures() for server in servers]
    log_lengths = [len(server.log()) for server in servers]
    counters = ("kvcourier:kv_received_total", "kvcourier:kv_sent_total")
    before = [[server.metric(name) for name in counters] for server in servers]
    together = threading.Barrier(NUM_REQUESTS, timeout=60)

    def ask(index: int) -> list[int]:
        together.wait()
        return cluster.router.ask(prompts[index], MODES[index % 2]).token_ids

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        assert list(pool.map(ask, range(NUM_REQUESTS))) == expected

    cluster.wait_idle()
    assert cluster.router.metric("kvcourier_router_in_flight") == 0
    assert [server.failures() for server in servers] == failures
    logs = [server.log()[start:] for server, start in zip(servers, log_lengths, strict=True)]
    assert not [text for text in logs if "WARNING" in text or "ERROR" in text]
    after = [[server.metric(name) for name in counters] for server in servers]
    (_, sent), (received, _) = [
        [new - old for new, old in zip(*pair, strict=True)]
        for pair in zip(after, before, strict=True)
    ]
    assert sent == received == NUM_REQUESTS
