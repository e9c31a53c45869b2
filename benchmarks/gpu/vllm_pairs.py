"""vLLM's own connectors and kvcourier on one pair of GPUs: the same load on each, side by side.

Decides which servers run when, and in which order cells are measured. How it is run and what the
numbers mean is in README.md beside this file.

    python3 benchmarks/gpu/vllm_pairs.py --models 0.6b,8b --cells 2000:2:24,16000:6:24
"""

import asyncio
import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Sequence

from model_folders import VOCAB_SIZE, write_model_folder
from pair_load import Cell, RequestFailed, Sample, Target, make_traffic, run
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
from pair_settings import (
    CONNECTORS,
    DECODE_GRAPHS,
    EAGER,
    SERVERS,
    Settings,
    make_header,
    parse_arguments,
)

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_CELLS_LEFT = 0, 1, 2, 3

WARM_UP_REQUESTS = 4
# What a start, or the end of a cell, may take beyond its arrivals, before time is seen to be up.
_START_S = 110.0
_TAIL_S = 20.0
_SETTLE_S = 5.0


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
            for model, servers in itertools.product(self._settings.models, SERVERS):
                todo = self._todo(model, servers)
                if todo:
                    await self._measure_pair(model, servers, todo)
        except TimeUp as reason:
            say(f"stopped early: {reason}; run again with --resume for what is left")
            return EXIT_CELLS_LEFT
        return EXIT_FAILED if self._failed else EXIT_DONE

    def _todo(self, model: str, servers: str) -> list[tuple[Cell, str]]:
        """What is to be measured on a pair: all connectors of a cell before the next cell."""
        connectors = [name for name in self._settings.connectors if CONNECTORS[name][0] == servers]
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
        purpose = CONNECTORS[connector][1].value
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
        way = CONNECTORS[connector][1]
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
        configs = [dict(config) for config in SERVERS[servers]]
        if servers == "kvcourier" and settings.kvcourier_extra:
            for config in configs:
                config["kv_connector_extra_config"] = settings.kvcourier_extra
        longest = max(cell.input_tokens for cell in settings.cells) + settings.output_tokens
        specs = [
            ServerSpec(name, engine_id, gpu, port, side_channel_port, config, flags)
            for name, engine_id, gpu, port, side_channel_port, config, flags in zip(
                ("prefill", "decode"),
                (PREFILL_ENGINE_ID, DECODE_ENGINE_ID),
                settings.gpus,
                settings.ports,
                settings.side_channel_ports,
                configs,
                (EAGER, EAGER if settings.decode_eager else DECODE_GRAPHS),
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


if __name__ == "__main__":
    sys.exit(main())
