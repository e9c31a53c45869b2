"""vLLM's own connectors and kvcourier on one pair of GPUs: the same load on each, side by side.

Decides which servers run when, and in which order cells are measured. How it is run and what the
numbers mean is in README.md beside this file.

    python3 benchmarks/gpu/vllm_pairs.py --models 0.6b,8b --cells 2000:2:24,16000:6:24
"""

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import itertools
import json
import platform
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from model_folders import SIZES, VOCAB_SIZE, write_model_folder
from pair_load import Cell, RequestFailed, Sample, Target, Way, make_traffic, parse_cells, run
from pair_results import ResultFile, ResultsError, make_row, show_row
from pair_servers import (
    DECODE_ENGINE_ID,
    HOST,
    MODEL_NAME,
    PREFILL_ENGINE_ID,
    PairSpec,
    ServerFailed,
    ServerPair,
    ServerSpec,
)

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_OUT = Path(__file__).with_name("results") / "vllm-pairs.json"
DEFAULT_CELLS = "2000:2:24,2000:6:24,16000:2:16,16000:6:24"

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_CELLS_LEFT = 0, 1, 2, 3

WARM_UP_REQUESTS = 4
# What a start, or the end of a cell, may take beyond its arrivals, before time is seen to be up.
_START_S = 110.0
_TAIL_S = 20.0
_SETTLE_S = 5.0

_COURIER = {
    "kv_connector": "CourierConnector",
    "kv_connector_module_path": "kvcourier.vllm_connector",
}
# Configurations of P and of D. One pair with our connector serves both modes.
_SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nixl-pull": ({"kv_connector": "NixlConnector", "kv_role": "kv_both"},) * 2,
    "kvcourier": (_COURIER | {"kv_role": "kv_producer"}, _COURIER | {"kv_role": "kv_consumer"}),
    "nixl-push": ({"kv_connector": "NixlPushConnector", "kv_role": "kv_both"},) * 2,
}
# Servers and way of each connector; "single" is a decode server whose connector has nothing to do.
_CONNECTORS = {
    "vllm-pull": ("nixl-pull", Way.PULL),
    "kvcourier-pull": ("kvcourier", Way.PULL),
    "kvcourier-push": ("kvcourier", Way.PUSH),
    "vllm-push": ("nixl-push", Way.PUSH),
    "single": ("nixl-pull", Way.SINGLE),
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a run is told."""

    models: tuple[str, ...]
    connectors: tuple[str, ...]
    cells: tuple[Cell, ...]
    out: Path
    resume: bool
    commit: str
    seed: int
    output_tokens: int
    gpus: tuple[str, str]
    time_limit_s: float
    request_timeout_s: float
    start_timeout_s: float
    work_folder: Path
    kvcourier_extra: dict[str, Any]
    server_flags: tuple[str, ...]
    server_command: tuple[str, ...] | None
    ports: tuple[int, int]
    side_channel_ports: tuple[int, int]


class TimeUp(Exception):
    """What is next would not end within the time limit."""


class Benchmark:
    """One run of all models, connectors and cells that the result file does not hold yet."""

    def __init__(self, settings: Settings, results: ResultFile) -> None:
        self._settings = settings
        self._results = results
        self._ends_at = time.monotonic() + settings.time_limit_s
        self._failed = False

    async def run(self) -> int:
        """Measure; returns the exit status."""
        try:
            for model, servers in itertools.product(self._settings.models, _SERVERS):
                todo = self._todo(model, servers)
                if todo:
                    await self._measure_pair(model, servers, todo)
        except TimeUp as reason:
            say(f"stopped early: {reason}; run again with --resume for what is left")
            return EXIT_CELLS_LEFT
        return EXIT_FAILED if self._failed else EXIT_DONE

    def _todo(self, model: str, servers: str) -> list[tuple[Cell, str]]:
        """What is to be measured on a pair: all connectors of a cell before the next cell."""
        connectors = [name for name in self._settings.connectors if _CONNECTORS[name][0] == servers]
        return [
            (cell, connector)
            for cell, connector in itertools.product(self._settings.cells, connectors)
            if not self._results.has(model, connector, cell)
        ]

    async def _measure_pair(self, model: str, servers: str, todo: list[tuple[Cell, str]]) -> None:
        self._need(_START_S + _duration_s(todo[0][0]), f"starting the {servers} pair of {model}")
        say(f"starting the {servers} pair of {model} for {len(todo)} measurements")
        began = time.monotonic()
        try:
            async with ServerPair(self._spec(model, servers)) as pair:
                say(f"healthy after {time.monotonic() - began:.0f} s")
                warm: set[tuple[str, int]] = set()
                for cell, connector in todo:
                    self._need(_duration_s(cell), f"cell {cell} of {connector}")
                    if (connector, cell.input_tokens) not in warm:
                        warm.add((connector, cell.input_tokens))
                        await self._warm_up(pair, connector, cell)
                    await self._measure(pair, model, connector, cell)
        except ServerFailed as failure:
            self._failed = True
            say(f"the {servers} pair of {model} failed: {failure}")

    async def _measure(self, pair: ServerPair, model: str, connector: str, cell: Cell) -> None:
        """Measure one row; a server that ends under the load is a result as well.

        Raises:
            ServerFailed: a server ended.
        """
        pair.check()
        # Both connectors of a way meet the same prompts.
        purpose = _CONNECTORS[connector][1].value
        ended: ServerFailed | None = None
        outcomes: Sequence[Sample | RequestFailed]
        try:
            outcomes = await self._load(pair, connector, cell, purpose)
        except ServerFailed as failure:
            ended = failure
            outcomes = [RequestFailed("a server ended")] * cell.requests
        row = make_row(model, connector, cell, outcomes)
        self._results.add(row)
        say(show_row(row))
        if ended is not None:
            raise ended
        if row["failures"]:
            # Connections break before the process that had them is gone; the next cell is not to
            # blame for it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await pair.until_failed()

    async def _warm_up(self, pair: ServerPair, connector: str, cell: Cell) -> None:
        """First one alone, which also connects the pair, then some at once."""
        for requests in (1, WARM_UP_REQUESTS - 1):
            warm_up = Cell(cell.input_tokens, 1000.0, requests)
            outcomes = await self._load(pair, connector, warm_up, f"warm-up {connector}")
            for failure in outcomes:
                if isinstance(failure, RequestFailed):
                    say(f"warm-up of {connector} at {cell.input_tokens} tokens: {failure}")

    async def _load(
        self, pair: ServerPair, connector: str, cell: Cell, purpose: str
    ) -> Sequence[Sample | RequestFailed]:
        """The outcomes of a cell; a server that ends is the end of it.

        Raises:
            ServerFailed: a server ended.
        """
        settings = self._settings
        target = Target(
            model=MODEL_NAME,
            vocab_size=VOCAB_SIZE,
            host=HOST,
            prefill_port=settings.ports[0],
            decode_port=settings.ports[1],
            engine_id=PREFILL_ENGINE_ID,
            side_channel_port=settings.side_channel_ports[0],
        )
        traffic = make_traffic(cell, VOCAB_SIZE, settings.seed, purpose)
        way = _CONNECTORS[connector][1]
        load = asyncio.create_task(
            run(target, way, traffic, settings.output_tokens, settings.request_timeout_s)
        )
        death = asyncio.create_task(pair.until_failed())
        try:
            await asyncio.wait({load, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                await death
            return await load
        finally:
            for task in (load, death):
                task.cancel()
            await asyncio.gather(load, death, return_exceptions=True)

    def _need(self, seconds: float, what: str) -> None:
        left = self._ends_at - time.monotonic()
        if seconds > left:
            raise TimeUp(f"{what} may take {seconds:.0f} s, {left:.0f} s are left")

    def _spec(self, model: str, servers: str) -> PairSpec:
        settings = self._settings
        configs = [dict(config) for config in _SERVERS[servers]]
        if servers == "kvcourier" and settings.kvcourier_extra:
            for config in configs:
                config["kv_connector_extra_config"] = settings.kvcourier_extra
        longest = max(cell.input_tokens for cell in settings.cells) + settings.output_tokens
        specs = [
            ServerSpec(name, engine_id, gpu, port, side_channel_port, config)
            for name, engine_id, gpu, port, side_channel_port, config in zip(
                ("prefill", "decode"),
                (PREFILL_ENGINE_ID, DECODE_ENGINE_ID),
                settings.gpus,
                settings.ports,
                settings.side_channel_ports,
                configs,
                strict=True,
            )
        ]
        command = {} if settings.server_command is None else {"command": settings.server_command}
        return PairSpec(
            model_folder=write_model_folder(settings.work_folder, model),
            # In whole blocks, with one to spare.
            max_model_len=(longest // 16 + 2) * 16,
            servers=(specs[0], specs[1]),
            log_folder=settings.work_folder,
            log_name=f"{model}-{servers}",
            start_timeout_s=settings.start_timeout_s,
            flags=settings.server_flags,
            **command,
        )


def say(text: str) -> None:
    """A line of progress, at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def make_header(settings: Settings) -> dict[str, Any]:
    """With what, on what and when the rows were made."""
    manifest = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return {
        "versions": {
            "vllm": _version("vllm"),
            "nixl": _version("nixl", "nixl-cu13", "nixl-cu12"),
            "torch": _version("torch"),
            "kvcourier": manifest["project"]["version"],
            "python": platform.python_version(),
        },
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
        "commit": settings.commit,
        "seed": settings.seed,
        "output_tokens": settings.output_tokens,
        "kvcourier_extra_config": settings.kvcourier_extra,
        "server_flags": list(settings.server_flags),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["vllm_pairs.py", *sys.argv[1:]]),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line; ends the process with a sentence if it cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", default=",".join(SIZES), help="of %(default)s, in this order")
    add("--connectors", default=",".join(_CONNECTORS), help="of %(default)s")
    add("--cells", default=DEFAULT_CELLS, help="TOKENS:QPS:REQUESTS,..., most important first")
    add("--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help="result file")
    add("--resume", action="store_true", help="go on with the result file")
    add("--commit", default=None, help="what is measured; git is asked if not given")
    add("--seed", type=int, default=7, help="of prompts and arrival times")
    add("--output-tokens", type=int, default=128)
    add("--gpus", default="0,1", help="of the prefill and of the decode server")
    add("--time-limit", type=float, default=float("inf"), metavar="S", help="begin nothing after")
    add("--request-timeout", type=float, default=90.0, metavar="S")
    add("--start-timeout", type=float, default=240.0, metavar="S")
    add("--work-folder", type=Path, default=Path("/tmp/kvcourier-vllm-pairs"), help="models, logs")
    add("--kvcourier-extra", default="{}", metavar="JSON", help="kv_connector_extra_config")
    add("--server-flags", default="", help="further flags of both servers, as one text")
    add("--server-command", default=None, help="instead of python -m vllm...api_server")
    add("--ports", default="8100,8200", help="HTTP: prefill, decode")
    add("--side-channel-ports", default="5600,5700", help="prefill, decode")
    given = parser.parse_args(arguments)
    try:
        command = shlex.split(given.server_command) if given.server_command else None
        extra = json.loads(given.kvcourier_extra)
        if not isinstance(extra, dict):
            raise ValueError(f"--kvcourier-extra: expected a JSON object, found {extra!r}")
        if given.output_tokens < 2:
            raise ValueError(
                f"--output-tokens: expected 2 or more, found {given.output_tokens}; "
                "one token has no TPOT"
            )
        return Settings(
            models=_some_of("--models", given.models, SIZES),
            connectors=_some_of("--connectors", given.connectors, tuple(_CONNECTORS)),
            cells=tuple(parse_cells(given.cells)),
            out=given.out,
            resume=given.resume,
            commit=given.commit or _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD"),
            seed=given.seed,
            output_tokens=given.output_tokens,
            gpus=_two("--gpus", given.gpus, str),
            time_limit_s=given.time_limit,
            request_timeout_s=given.request_timeout,
            start_timeout_s=given.start_timeout,
            work_folder=given.work_folder,
            kvcourier_extra=extra,
            server_flags=tuple(shlex.split(given.server_flags)),
            server_command=tuple(command) if command else None,
            ports=_two("--ports", given.ports, int),
            side_channel_ports=_two("--side-channel-ports", given.side_channel_ports, int),
        )
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit status."""
    settings = parse_arguments(arguments)
    try:
        results = ResultFile(settings.out, make_header(settings), resume=settings.resume)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE

    async def until_told_to_stop() -> int:
        # SIGINT unwinds by itself; with this SIGTERM does, too, and no server is left behind.
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await Benchmark(settings, results).run()

    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        return asyncio.run(until_told_to_stop())
    say("stopped")
    return EXIT_FAILED


def _duration_s(cell: Cell) -> float:
    return cell.requests / cell.qps + _TAIL_S


def _some_of(flag: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(text.split(","))
    for each in found:
        if each not in allowed:
            raise ValueError(f"{flag}: expected some of {', '.join(allowed)}, found {each!r}")
    return found


def _two(flag: str, text: str, read: Callable[[str], T]) -> tuple[T, T]:
    try:
        first, second = (read(each) for each in text.split(","))
    except ValueError:
        raise ValueError(f"{flag}: expected two, with a comma between, found {text!r}") from None
    return first, second


def _version(*names: str) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
