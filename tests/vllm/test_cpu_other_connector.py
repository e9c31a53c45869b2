"""Real vLLM on this machine's CPU: one instance with vLLM's own connector and one with ours, as
while a fleet is switched over. They cannot serve each other, and must not harm each other.

See `test_cpu_pair` for what it needs.
"""

from collections.abc import Iterator

import httpx
import msgspec
import pytest
import zmq

from .models import write_qwen3
from .servers import ANSWER_S, Vllm, needs_vllm, request_body, routers, served, started, tokens

pytestmark = [*needs_vllm, pytest.mark.slow]

PROMPT = [7 * i % 500 + 5 for i in range(100)]


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    """One with vLLM's own connector, one with ours."""
    folder = tmp_path_factory.mktemp("vllm")
    model = write_qwen3(folder / "model")
    with started(
        Vllm("theirs", "kv_both", model, folder, own="NixlConnector"),
        Vllm("ours", "kv_both", model, folder),
    ) as servers:
        theirs, ours = servers
        yield theirs, ours


@pytest.mark.parametrize("way", ["pull proxy", "push proxy"])
def test_ours_asks_theirs(instances: tuple[Vllm, Vllm], way: str) -> None:
    theirs, ours = instances
    with served(routers((theirs, ours))[way]) as url:
        answer = httpx.post(f"{url}/v1/completions", json=request_body(PROMPT), timeout=ANSWER_S)
    assert answer.status_code == 500
    listener = f"127.0.0.1:{theirs.kv_port}"
    assert f"{listener} is no instance of kvcourier" in ours.log.read_text()
    # Its listener goes on: it answers one of its own.
    with zmq.Context() as context, context.socket(zmq.REQ) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(f"tcp://{listener}")
        peer.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
        assert peer.poll(int(ANSWER_S * 1000))
    assert tokens(ours.url, PROMPT) == tokens(theirs.url, PROMPT)


def test_theirs_asks_ours(instances: tuple[Vllm, Vllm]) -> None:
    theirs, ours = instances
    with served(routers((ours, theirs))["pull proxy"]) as url:
        answer = httpx.post(f"{url}/v1/completions", json=request_body(PROMPT), timeout=ANSWER_S)
    assert answer.status_code == 500
    assert "no kvcourier handshake" in ours.log.read_text()
    assert "Resource temporarily unavailable" not in theirs.log.read_text()
    assert tokens(ours.url, PROMPT) == tokens(theirs.url, PROMPT)
