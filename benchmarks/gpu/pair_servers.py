"""A prefill and a decode server of vLLM on one host, from start to the last process gone.

Decides flags, environment, ports and GPUs, and how the end of a server is noticed and shown.
Refuses to know what is asked of them.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HOST = "127.0.0.1"
MODEL_NAME = "m"
PREFILL_ENGINE_ID, DECODE_ENGINE_ID = "p", "d"

_POLL_S = 1.0
_STOP_S = 15.0
_LOG_TAIL_LINES = 25
_ENVIRONMENT = {
    # No network on the host, and nothing to report to.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # A kernel library that the host may lack.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
}


class ServerFailed(Exception):
    """A server ended, or is not healthy in time; the text has the end of the logs."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server of the pair.

    Attributes:
        gpu: as in CUDA_VISIBLE_DEVICES; several with a comma between.
        cpus: the cores it may run on; all if empty.
        flags: further flags of this one.
    """

    name: str
    engine_id: str
    gpu: str
    port: int
    side_channel_port: int
    kv_transfer_config: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    cpus: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PairSpec:
    """What both servers have in common.

    Attributes:
        command: how vLLM's server is started, before its flags.
        flags: further flags of both.
        log_name: beginning of the names of both logs.
    """

    model_folder: Path
    max_model_len: int
    servers: tuple[ServerSpec, ServerSpec]
    log_folder: Path
    log_name: str
    start_timeout_s: float
    flags: tuple[str, ...] = ()
    command: tuple[str, ...] = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")


class ServerPair:
    """Starts both servers on entering and stops them on leaving, whatever happened between.

    Raises:
        ServerFailed: a port is taken.
    """

    def __init__(self, spec: PairSpec) -> None:
        self._spec = spec
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def __aenter__(self) -> Self:
        _refuse_taken_ports(self._spec.servers)
        self._spec.log_folder.mkdir(parents=True, exist_ok=True)
        try:
            for server in self._spec.servers:
                self._running[server.name] = await self._start(server)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._stop()

    def pause(self) -> None:
        """Stop both servers where they are: pairs that wait take nothing from the one measured."""
        for process in self._running.values():
            _signal_group(process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again."""
        for process in self._running.values():
            _signal_group(process.pid, signal.SIGCONT)

    def check(self) -> None:
        """Go on only if both servers run.

        Raises:
            ServerFailed: one ended.
        """
        if any(process.returncode is not None for process in self._running.values()):
            raise self._failure("a server ended")

    async def until_failed(self) -> None:
        """Wait until a server ends.

        Raises:
            ServerFailed: always, in the end.
        """
        ends = [asyncio.create_task(process.wait()) for process in self._running.values()]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        raise self._failure("a server ended")

    def log_of(self, server: ServerSpec) -> Path:
        """Where a server's output goes."""
        return self._spec.log_folder / f"{self._spec.log_name}-{server.name}.log"

    async def _start(self, server: ServerSpec) -> asyncio.subprocess.Process:
        config = {**server.kv_transfer_config, "engine_id": server.engine_id}
        length = str(self._spec.max_model_len)
        flags = [
            *("--model", str(self._spec.model_folder), "--served-model-name", MODEL_NAME),
            *("--host", HOST, "--port", str(server.port)),
            *("--load-format", "dummy", "--dtype", "bfloat16"),
            *("--no-enable-prefix-caching", "--max-model-len", length),
            # A whole prompt in one step, on every connector.
            *("--max-num-batched-tokens", length),
            *("--kv-transfer-config", json.dumps(config)),
            *self._spec.flags,
            *server.flags,
        ]
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "CUDA_VISIBLE_DEVICES": server.gpu,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(server.side_channel_port),
        }
        cpus = server.cpus or os.sched_getaffinity(0)
        with self.log_of(server).open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *self._spec.command,
                *flags,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # A group of its own, which the engine's processes are in too and may outlive it in.
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            )

    async def until_healthy(self) -> None:
        """Wait until both serve.

        Raises:
            ServerFailed: one ended, or it takes too long.
        """
        deadline = time.monotonic() + self._spec.start_timeout_s
        waiting = list(self._spec.servers)
        while waiting:
            if any(process.returncode is not None for process in self._running.values()):
                raise self._failure("a server ended while starting")
            if time.monotonic() > deadline:
                names = ", ".join(server.name for server in waiting)
                raise self._failure(f"{names} not healthy in {self._spec.start_timeout_s:g} s")
            healthy = await asyncio.gather(
                *(asyncio.to_thread(_is_healthy, server.port) for server in waiting)
            )
            waiting = [s for s, well in zip(waiting, healthy, strict=True) if not well]
            if waiting:
                await asyncio.sleep(_POLL_S)

    async def _stop(self) -> None:
        """End both process groups: politely, then not; bounded."""
        self.resume()
        processes = list(self._running.values())
        for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            for process in processes:
                _signal_group(process.pid, number)
            deadline = time.monotonic() + patience_s
            while any(_group_lives(process.pid) for process in processes):
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.1)
            else:
                break
        for process in processes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _STOP_S)
        self._running.clear()

    def _failure(self, what: str) -> ServerFailed:
        states = ", ".join(
            f"{name} " + ("runs" if process.returncode is None else f"has {process.returncode}")
            for name, process in self._running.items()
        )
        parts = [f"{what} (exit status: {states})"]
        for server in self._spec.servers:
            path = self.log_of(server)
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
                parts.append("\n".join([f"--- end of {path}", *lines]))
        return ServerFailed("\n".join(parts))


def _refuse_taken_ports(servers: Sequence[ServerSpec]) -> None:
    for server in servers:
        for port in (server.port, server.side_channel_port):
            with socket.socket() as attempt:
                attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    attempt.bind((HOST, port))
                except OSError as error:
                    raise ServerFailed(
                        f"port {port} of the {server.name} server cannot be used: "
                        f"{error.strerror}; end what listens there, perhaps servers of a run that "
                        "was killed"
                    ) from error


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_lives(group: int) -> bool:
    """Whether a process of the group still runs; one that only waits to be reaped does not."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                # "pid (name) state parent group ...", and the name may hold anything.
                state, _parent, found = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(found) == group and state != "Z":
                    return True
    return False
