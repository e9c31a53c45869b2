"""Instances of real vLLM for tests, and every way to send a request through a pair of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from kvcourier.http_server import HttpServer, bind
from kvcourier.router.app import create_app
from kvcourier.router.config import RouterConfig, parse_instance_spec
from ports import free_port

from .proxies import Prefill, pull_proxy, push_proxy

VENV = Path(os.environ.get("KVCOURIER_VLLM_VENV", Path(__file__).parents[2] / ".venv-vllm"))
START_S = 480.0
"""Three that start at once on a busy machine of two cores have needed more than four minutes."""
ANSWER_S = 120.0
DOCTOR_S = 300.0

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (VENV / "bin/vllm").exists(),
        reason=f"no vLLM at {VENV}: run `make test-vllm`, or set KVCOURIER_VLLM_VENV",
    ),
]
"""Marks of a module that runs vLLM."""


class Vllm:
    """One `vllm serve`, in a process group of its own.

    Args:
        arguments: further flags; the last of a kind wins.
        policy: its `kv_load_failure_policy`.
        extra: its `kv_connector_extra_config`.
        own: vLLM's own connector of this name instead of ours.
    """

    def __init__(
        self,
        engine_id: str,
        role: str,
        model: Path,
        folder: Path,
        *arguments: str,
        policy: str = "fail",
        extra: Mapping[str, object] | None = None,
        own: str | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.port, self.kv_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{engine_id}.log"
        ours = {
            "kv_connector": "CourierConnector",
            "kv_connector_module_path": "kvcourier.vllm_connector",
        }
        transfer = (ours if own is None else {"kv_connector": own, "kv_buffer_device": "cpu"}) | {
            "kv_role": role,
            "engine_id": engine_id,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"num_threads": 0, **(extra or {})},
        }
        self._command = (
            *(VENV / "bin/vllm", "serve", model, "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "1024"),
            *("--kv-transfer-config", json.dumps(transfer)),
            *arguments,
        )
        self._environment = os.environ | {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.kv_port),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.start()

    def start(self) -> None:
        """Begin, or begin again: at the same ports, with a log that goes on."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
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

        wait_until(healthy, START_S, lambda: self.log.read_text()[-4000:])

    def stop(self) -> None:
        """End the whole group, the server in order."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()

    def kill(self) -> None:
        """End the whole group as a machine that dies does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples on vLLM's own /metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


@contextlib.contextmanager
def started(*servers: Vllm) -> Iterator[tuple[Vllm, ...]]:
    """All of them healthy; stopped in the end."""
    try:
        for server in servers:
            server.wait_healthy()
        yield servers
    finally:
        for server in servers:
            server.stop()


def spec_of(server: Vllm) -> str:
    """An instance as a router, or the doctor, is told of it."""
    return (
        f"{server.url},engine_id={server.engine_id},kv_host=127.0.0.1,kv_port={server.kv_port},"
        "tp_size=1"
    )


def visit(*flags: str) -> tuple[int, dict[tuple[str, str], list[str]]]:
    """What `kvcourier doctor` says: its exit code, and evidence by check and severity."""
    ended = subprocess.run(
        [sys.executable, "-m", "kvcourier", "doctor", *flags, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=DOCTOR_S,
    )
    assert ended.returncode in (0, 1, 3), ended.stderr
    found: dict[tuple[str, str], list[str]] = {}
    for each in json.loads(ended.stdout)["findings"]:
        found.setdefault((each["check"], each["severity"]), []).append(each["evidence"])
    return ended.returncode, found


def routers(pair: tuple[Vllm, Vllm]) -> dict[str, object]:
    """Every way through: two proxies that know only vLLM's keys, and our router."""
    prefill, decode = pair
    known = Prefill(prefill.url, prefill.engine_id, "127.0.0.1", prefill.kv_port)
    config = RouterConfig(
        prefill=(parse_instance_spec(spec_of(prefill)),),
        decode=(parse_instance_spec(decode.url),),
    )
    return {
        "pull proxy": pull_proxy(known, decode.url),
        "push proxy": push_proxy(known, decode.url),
        "push proxy without transfer ids": push_proxy(known, decode.url, send_transfer_id=False),
        "kvcourier route, pull": create_app(config),
        "kvcourier route, push": create_app(config),
    }


def tokens(
    url: str, prompt: list[int], headers: dict[str, str] | None = None, num_tokens: int = 8
) -> list[int]:
    body = request_body(prompt) | {"max_tokens": num_tokens}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)
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


def wait_until(
    condition: Callable[[], bool], limit_s: float, otherwise: Callable[[], str] = lambda: ""
) -> None:
    """Look again and again; `otherwise` says more if it does not come to pass."""
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not after {limit_s:g} s. {otherwise()}"
        pause.wait(0.1)
