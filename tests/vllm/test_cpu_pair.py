"""Real vLLM on this machine's CPU, a prefill and a decode instance with `CourierConnector`.

Needs an environment that `tests/vllm/install.py` makes; `make test-vllm` does both. What one
instance generates by itself is the reference.
"""

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvcourier.engine.random_model import byte_tokenizer
from kvcourier.http_server import HttpServer, bind
from kvcourier.router.app import create_app
from kvcourier.router.config import RouterConfig, parse_instance_spec

from .proxies import Prefill, pull_proxy, push_proxy

VENV = Path(os.environ.get("KVCOURIER_VLLM_VENV", Path(__file__).parents[2] / ".venv-vllm"))
START_S = 240.0
ANSWER_S = 120.0
LENGTHS = (1, 15, 16, 17, 33, 200)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (VENV / "bin/vllm").exists(),
        reason=f"no vLLM at {VENV}: run `make test-vllm`, or set KVCOURIER_VLLM_VENV",
    ),
]


class Vllm:
    """One `vllm serve`, in a process group of its own."""

    def __init__(self, engine_id: str, role: str, model: Path, folder: Path) -> None:
        self.engine_id = engine_id
        self.port, self.kv_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{engine_id}.log"
        transfer = {
            "kv_connector": "CourierConnector",
            "kv_connector_module_path": "kvcourier.vllm_connector",
            "kv_role": role,
            "engine_id": engine_id,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"num_threads": 0},
        }
        settings = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.kv_port),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(VENV / "bin/vllm", "serve", model, "--served-model-name", "tiny"),
                    *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16"),
                    *("--enforce-eager", "--max-model-len", "1024"),
                    *("--kv-transfer-config", json.dumps(transfer)),
                ],
                env=os.environ | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_healthy(self) -> None:
        """Until it serves; fails with the end of its log."""

        def healthy() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
            return False

        wait_until(healthy, START_S)

    def stop(self) -> None:
        """End the whole group."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait(30)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples on vLLM's own /metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    servers = [
        Vllm("p", "kv_producer", model, folder),
        Vllm("d", "kv_consumer", model, folder),
    ]
    try:
        for server in servers:
            server.wait_healthy()
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.stop()


def routers(pair: tuple[Vllm, Vllm]) -> dict[str, object]:
    """Every way through: two proxies that know only vLLM's keys, and our router."""
    prefill, decode = pair
    known = Prefill(prefill.url, prefill.engine_id, "127.0.0.1", prefill.kv_port)
    spec = f"{prefill.url},engine_id=p,kv_host=127.0.0.1,kv_port={prefill.kv_port},tp_size=1"
    config = RouterConfig(
        prefill=(parse_instance_spec(spec),), decode=(parse_instance_spec(decode.url),)
    )
    return {
        "pull proxy": pull_proxy(known, decode.url),
        "push proxy": push_proxy(known, decode.url),
        "push proxy without transfer ids": push_proxy(known, decode.url, send_transfer_id=False),
        "kvcourier route, pull": create_app(config),
        "kvcourier route, push": create_app(config),
    }


@pytest.mark.parametrize(
    "way",
    [
        "pull proxy",
        "push proxy",
        "push proxy without transfer ids",
        "kvcourier route, pull",
        "kvcourier route, push",
    ],
)
def test_tokens_equal_one_instances(pair: tuple[Vllm, Vllm], way: str) -> None:
    prefill, decode = pair
    headers = {"X-KV-Mode": way.split(", ")[1]} if ", " in way else {}
    with served(routers(pair)[way]) as url:
        for length in LENGTHS:
            prompt = [(7 * length + 13 * i) % 500 + 5 for i in range(length)]
            expected = tokens(prefill.url, prompt)
            # Twice: the second time most of the prompt is in D's prefix cache.
            assert tokens(url, prompt, headers) == expected, f"{length} tokens"
            assert tokens(url, prompt, headers) == expected, f"{length} tokens, cached"
    for server in pair:
        assert server.metric("vllm:nixl_num_failed_transfers_total") == 0
        assert server.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
    moved = [server.metric("vllm:nixl_bytes_transferred_sum") for server in pair]
    assert sum(moved) > 0
    assert decode.process.poll() is None


def test_many_at_once_in_both_modes(pair: tuple[Vllm, Vllm]) -> None:
    prompts = [[(31 * n + 17 * i) % 500 + 5 for i in range(20 + 11 * n)] for n in range(8)]
    expected = [tokens(pair[0].url, prompt) for prompt in prompts]
    found: dict[int, list[int]] = {}
    with served(routers(pair)["kvcourier route, pull"]) as url:

        def ask(index: int) -> None:
            headers = {"X-KV-Mode": ("pull", "push")[index % 2]}
            found[index] = tokens(url, prompts[index], headers)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ANSWER_S)
    assert [found.get(index) for index in range(len(prompts))] == expected


BROKEN_PARAMS = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "127.0.0.1"},
    {"do_remote_prefill": True, "remote_engine_id": 7, "remote_host": [], "remote_port": "x"},
    {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 10**9,
        "remote_request_id": "x",
    },
    {"do_remote_decode": "yes"},
]


@pytest.mark.parametrize("params", BROKEN_PARAMS, ids=str)
def test_broken_params_are_no_end_of_the_engine(
    pair: tuple[Vllm, Vllm], params: dict[str, object]
) -> None:
    prompt = list(range(40, 80))
    expected = tokens(pair[0].url, prompt)
    body = request_body(prompt) | {"kv_transfer_params": params}
    answer = httpx.post(f"{pair[1].url}/v1/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["token_ids"] == expected


def test_a_client_that_leaves_before_prefill_began(pair: tuple[Vllm, Vllm]) -> None:
    prefill, decode = pair
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": prefill.kv_port,
        "tp_size": 1,
        "pp_size": 1,
        "remote_request_id": "nobody",
        "transfer_id": "never-sent-to-prefill",
    }
    body = request_body(list(range(5, 105))) | {"kv_transfer_params": params}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{decode.url}/v1/completions", json=body, timeout=2.0)
    wait_until(lambda: decode.metric("vllm:num_requests_waiting") == 0, ANSWER_S)
    wait_until(lambda: decode.metric("vllm:kv_cache_usage_perc") == 0, ANSWER_S)
    with served(routers(pair)["push proxy"]) as url:
        prompt = list(range(100, 160))
        assert tokens(url, prompt) == tokens(prefill.url, prompt)


def tokens(url: str, prompt: list[int], headers: dict[str, str] | None = None) -> list[int]:
    answer = httpx.post(
        f"{url}/v1/completions", json=request_body(prompt), headers=headers, timeout=ANSWER_S
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def request_body(prompt: list[int]) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@contextlib.contextmanager
def served(app: object) -> Iterator[str]:
    """An ASGI application on a loopback port."""
    ready = threading.Event()
    urls: list[str] = []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = HttpServer(app, bind("127.0.0.1", 0), on_ready)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield urls[0]
    finally:
        server.stop()
        thread.join(30)


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        pause.wait(0.5)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
