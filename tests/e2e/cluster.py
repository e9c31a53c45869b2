"""Real processes, a prefill and a decode instance and a router, and how tests talk to them.

Decides ports, flags and what counts as idle. Refuses to know what is tested. All waits end.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from e2e.client import Stream, streaming
from kvcourier.demo.processes import Child, Children
from ports import free_port

WAIT_S = 60.0
BLOCK_SIZE = 16
CHUNK_TOKENS = 32
NUM_BLOCKS = 256
"""4,096 tokens, half of the context: a prompt can be too long for the one and not the other."""

MODEL = "random-llama:layers=2,hidden=64,heads=4,kv_heads=2,head_dim=16,max_position=8192"
NUM_TOKENS = 8
MODES = ("pull", "push")

IDLE_GAUGES = (
    "kvcourier:num_requests_running",
    "kvcourier:num_requests_waiting",
    "kvcourier:num_requests_waiting_remote",
    "kvcourier:kv_blocks_used",
    "kvcourier:kv_loans",
    "kvcourier_holds",
    "kvcourier_wants",
    "kvcourier_waiting_registrations",
    "kvcourier_operations_in_flight",
    "kvcourier_quarantined_blocks",
    "kvcourier_staging_slots_used",
)
"""All zero on an instance that owes nobody anything and has all of its blocks."""

FAILURE_COUNTERS = (
    "kvcourier_leases_expired_total",
    "kvcourier_registrations_expired_total",
    "kvcourier_registrations_refused_total",
    "kvcourier_quarantines_expired_total",
    "kvcourier_peers_lost_total",
    "kvcourier_failed_transfers_total",
    "kvcourier_dropped_messages_total",
    "kvcourier:kv_receive_failures_total",
    "kvcourier:kv_send_failures_total",
)
"""None of these moves while all is well."""


def until(condition: Callable[[], object], what: str, wait_s: float = WAIT_S) -> None:
    """Look again and again until the condition holds."""
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, f"after {wait_s:g} s: {what}"
        time.sleep(0.005)


@dataclass(eq=False)
class Server:
    """One process with an HTTP API, which can be ended and started again at the same address."""

    name: str
    command: str
    flags: tuple[str, ...]
    children: Children
    client: httpx.Client
    module: str = "kvcourier"
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    child: Child = field(init=False)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start the process; `wait_ready` comes next."""
        program = (sys.executable, "-m", self.module, self.command, "--port", str(self.port))
        self.child = self.children.start(self.name, [*program, *self.flags], self.environment)

    def wait_ready(self) -> None:
        """Until it answers requests."""
        assert self.children.wait_ready(self.child) == self.url

    def send_signal(self, number: signal.Signals) -> None:
        """To the process itself, as `kill` does."""
        os.kill(self.child.process.pid, number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The process stands still meanwhile, as a hanging one would."""
        self.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send_signal(signal.SIGCONT)

    def wait_end(self) -> int:
        """Until the process has ended; its exit code. Fails if it left a process behind."""
        until(lambda: self.child.exit_code() is not None, f"{self.name} still runs")
        code = self.child.process.wait()
        try:
            os.killpg(self.child.process.pid, 0)
        except ProcessLookupError:
            pass
        else:
            raise AssertionError(f"{self.name} has ended and left a child behind")
        self.children.stop(self.child)
        return code

    def log(self) -> str:
        """Everything it has printed."""
        return self.child.log.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        """GET one of its pages."""
        return self.client.get(self.url + path)

    def let_go(self, transfer_id: str) -> None:
        """Tell it, as a router does, that nobody will fetch a prompt that it keeps."""
        answer = self.client.delete(f"{self.url}/kvcourier/transfers/{transfer_id}")
        assert answer.is_success, answer.text

    def post(self, body: Any, *, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """POST /v1/completions; `body` is JSON, or bytes that are sent as they are."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.client.post(f"{self.url}/v1/completions", headers=headers, **content)

    def ask(
        self,
        prompt: Sequence[int],
        mode: str | None = None,
        num_tokens: int = NUM_TOKENS,
        **fields: Any,
    ) -> Stream:
        """Have a prompt continued and read the answer to its good end."""
        with self.streaming(prompt, mode, num_tokens, **fields) as stream:
            stream.read()
        assert stream.response.status_code == 200, (stream.error, self.log())
        assert stream.is_done and stream.error is None, (stream.error, self.log())
        return stream

    def streaming(
        self,
        prompt: Sequence[int],
        mode: str | None = None,
        num_tokens: int = NUM_TOKENS,
        **fields: Any,
    ) -> AbstractContextManager[Stream]:
        """Have a prompt continued; the client leaves at the end of the block."""
        body = body_of(prompt, num_tokens, **fields)
        return streaming(self.client, self.url, body, mode_header(mode))

    @contextlib.contextmanager
    def sent(
        self,
        prompt: Sequence[int],
        mode: str | None = None,
        num_tokens: int = NUM_TOKENS,
        **fields: Any,
    ) -> Iterator[HTTPConnection]:
        """Send a request without waiting for anything; the client leaves at the block's end."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        content = json.dumps(body_of(prompt, num_tokens, **fields))
        headers = {"Content-Type": "application/json", **mode_header(mode)}
        try:
            connection.request("POST", "/v1/completions", content, headers)
            yield connection
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels; 0 if there are none."""
        return sum_samples(self.get("/metrics").text, name, labels)

    def busy(self) -> dict[str, float]:
        """The gauges that are not as on an idle instance."""
        text = self.get("/metrics").text
        sums = {name: sum_samples(text, name, {}) for name in IDLE_GAUGES}
        return {name: value for name, value in sums.items() if value}

    def failures(self) -> dict[str, float]:
        """Every counter of something that went wrong."""
        text = self.get("/metrics").text
        return {name: sum_samples(text, name, {}) for name in FAILURE_COUNTERS}

    def wait_idle(self) -> None:
        """Until all blocks are back and nothing is owed to anybody."""
        until(lambda: not self.busy(), f"{self.name} is not idle: {self.busy()}\n{self.log()}")

    def info(self) -> dict[str, Any]:
        """What an instance tells routers."""
        info: dict[str, Any] = self.get("/kvcourier/instance").json()
        return info

    def early_params(self, transfer_id: str) -> dict[str, Any]:
        """What a router sends D in push, where this is P."""
        info = self.info()
        return {
            "do_remote_prefill": True,
            "remote_engine_id": info["engine_id"],
            "remote_host": info["side_channel_host"],
            "remote_port": info["side_channel_port"],
            "tp_size": info["tp_size"],
            "pp_size": info["pp_size"],
            "transfer_id": transfer_id,
        }

    def story(self, key: str) -> list[dict[str, Any]]:
        """What happened to a transfer, as far as this instance knows."""
        response = self.get(f"/kvcourier/story/{key}")
        return [] if response.status_code == 404 else list(response.json())


@dataclass(frozen=True)
class Cluster:
    """One prefill instance, one decode instance, one router."""

    prefill: Server
    decode: Server
    router: Server

    @property
    def servers(self) -> tuple[Server, Server, Server]:
        """All processes."""
        return self.prefill, self.decode, self.router

    def wait_idle(self) -> None:
        """Until both instances have all of their blocks."""
        self.prefill.wait_idle()
        self.decode.wait_idle()


@contextlib.contextmanager
def running_servers(log_dir: Path) -> Iterator[Callable[..., Server]]:
    """A function that starts a process; all of them end with the block."""
    # A connection per request: one that a server is about to close would fail the next request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with (
        Children(log_dir) as children,
        httpx.Client(timeout=WAIT_S, trust_env=False, limits=limits) as client,
    ):

        def start(name: str, command: str, *flags: str, **options: Any) -> Server:
            return Server(name, command, flags, children, client, **options)

        yield start


def instance_flags(engine_id: str, role: str, *, model: str = MODEL) -> tuple[str, ...]:
    """Flags of a small instance that cuts prompts into small chunks."""
    return (
        f"--model={model}",
        "--served-model-name=tiny",
        "--dtype=float32",
        f"--engine-id={engine_id}",
        f"--role={role}",
        f"--side-channel-port={free_port()}",
        f"--block-size={BLOCK_SIZE}",
        f"--num-blocks={NUM_BLOCKS}",
        f"--max-batch-tokens={CHUNK_TOKENS}",
    )


@contextlib.contextmanager
def running_cluster(
    log_dir: Path,
    *flags: str,
    model: str = MODEL,
    module: str = "kvcourier",
    environments: Mapping[str, Mapping[str, str]] | None = None,
    flags_by_role: Mapping[str, tuple[str, ...]] | None = None,
) -> Iterator[Cluster]:
    """A whole cluster, ready; `flags` go to both instances, as does `module`, which stands for
    `kvcourier`; `environments` has further variables and `flags_by_role` further flags by role."""
    with running_servers(log_dir) as start:
        prefill, decode = (
            start(
                role,
                "serve",
                *instance_flags(role[0], role, model=model),
                *flags,
                *(flags_by_role or {}).get(role, ()),
                module=module,
                environment=(environments or {}).get(role, {}),
            )
            for role in ("prefill", "decode")
        )
        router = start(
            "router", "route", f"--prefill={prefill.url}", f"--decode={decode.url}", "--mode=pull"
        )
        cluster = Cluster(prefill, decode, router)
        for server in cluster.servers:
            server.wait_ready()
        wait_known(router)
        yield cluster


@contextlib.contextmanager
def short_of_blocks(instance: Server) -> Iterator[Stream]:
    """A request of the instance's own leaves too few blocks for a prompt of 2,700 tokens."""
    prompt = [index % 251 for index in range(1500)]
    with instance.streaming(prompt, num_tokens=2500) as blocker:
        blocker.read(1)
        yield blocker
        assert not blocker.is_done, "it did not last"


def wait_known(router: Server) -> None:
    """Until the router has learned where the KV of each prefill instance is found."""

    def known() -> bool:
        sides = router.get("/kvcourier/instances").json()
        return all(one["incarnation"] for side in ("prefill", "decode") for one in sides[side])

    until(known, "the router does not know its instances")


def body_of(prompt: Sequence[Any], num_tokens: int = NUM_TOKENS, **fields: Any) -> dict[str, Any]:
    """A greedy request that tells token ids; `prompt` is one, or a list of several."""
    return {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def mode_header(mode: str | None) -> dict[str, str]:
    """How a request asks the router for a mode."""
    return {} if mode is None else {"X-KV-Mode": mode}


def sum_samples(text: str, name: str, labels: Mapping[str, str]) -> float:
    """Sum over one name in a Prometheus text."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def error_of(connection: HTTPConnection) -> dict[str, Any]:
    """The error that ends the answer to a request that was `sent`.

    One with an empty message for a connection that breaks without a word or ends like a good one.
    """
    try:
        response = connection.getresponse()
        content = response.read()
    except (OSError, HTTPException) as error:
        return {"message": "", "torn": repr(error)}
    if response.status != 200:
        try:
            return {**json.loads(content)["error"], "status": response.status}
        except ValueError:
            return {"message": "", "status": response.status, "content": content[:200].decode()}
    last = [line for line in content.decode().splitlines() if line.startswith("data:")][-1:]
    event = json.loads(last[0].removeprefix("data:")) if last and "{" in last[0] else {}
    return event.get("error") or {"message": "", "content": content[-200:].decode()}
