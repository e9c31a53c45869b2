"""vLLM's own connectors and kvcourier on one pair of GPUs: the same load on each, side by side.

Decides which servers run when, and in which order cells are measured. How it is run and what the
numbers mean is in README.md beside this file.

All pairs of a model are up at the same time, and in each cell the connectors take turns while the
processes of the other pairs are stopped: what the machine does meanwhile hits all alike.

    python3 benchmarks/gpu/vllm_pairs.py --models 0.6b,8b --cells 2000:2:24,16000:6:24
"""

import asyncio
import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Container, Sequence
from dataclasses import dataclass

from model_folders import VOCAB_SIZE, kv_bytes_per_token, write_model_folder
from pair_load import Cell, Outcomes, RequestFailed, Target, Way, make_traffic, run
from pair_results import (
    FRESH,
    USED,
    ResultFile,
    ResultsError,
    make_row,
    of_vllm,
    show_row,
)
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
    COUNTERPARTS,
    DECODE_GRAPHS,
    EAGER,
    PAIR_PORTS,
    Settings,
    make_header,
    parse_arguments,
)

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_CELLS_LEFT = 0, 1, 2, 3

WARM_UP_REQUESTS = 4
# What a start, or the end of a round, may take beyond its arrivals, before time is seen to be up.
_START_S = 150.0
_TAIL_S = 12.0
_SETTLE_S = 5.0
# Prompts of both lengths at once leave a cache in which blocks are given out in no order.
_USE_UP_LENGTHS = (1.0, 0.13)


class TimeUp(Exception):
    """What is next would not end within the time limit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One cell, and in which state it finds the caches."""

    cell: Cell
    cache: str


class Benchmark:
    """One run of all models, connectors and cells that the result file does not hold yet."""

    def __init__(self, settings: Settings, results: ResultFile) -> None:
        self._settings = settings
        self._results = results
        self._ends_at = time.monotonic() + settings.time_limit_s
        self._failed = False
        self._plans = [
            *(Plan(cell, FRESH) for cell in settings.fresh_cells),
            *(Plan(cell, USED) for cell in settings.cells),
        ]

    async def run(self) -> int:
        """Measure; returns the exit status."""
        kinds = dict.fromkeys(servers for servers, _ in self._settings.connectors.values())
        groups = [(each,) for each in kinds] if self._settings.one_at_a_time else [tuple(kinds)]
        try:
            for model, group in itertools.product(self._settings.models, groups):
                await self._measure_group(model, group)
        except TimeUp as reason:
            say(f"stopped early: {reason}; run again with --resume for what is left")
            return EXIT_CELLS_LEFT
        return EXIT_FAILED if self._failed else EXIT_DONE

    def _todo(self, model: str, plan: Plan, pairs: Container[str]) -> list[str]:
        """The connectors that a cell is still to be measured with, on these pairs."""
        return [
            name
            for name in self._on(pairs)
            if not self._results.has(model, name, plan.cell, plan.cache)
        ]

    async def _measure_group(self, model: str, group: tuple[str, ...]) -> None:
        """Start these pairs and measure all cells, the connectors by turns."""
        todo = [plan for plan in self._plans if self._todo(model, plan, group)]
        if not todo:
            return
        self._need(_START_S, f"starting the pairs of {model}")
        say(f"starting {', '.join(group)} of {model} for {len(todo)} cells")
        began = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            pairs: dict[str, ServerPair] = {}
            for name in group:
                pair = ServerPair(self._spec(model, name))
                try:
                    pairs[name] = await stack.enter_async_context(pair)
                except ServerFailed as failure:
                    self._fail(model, name, failure)
            for name, pair in list(pairs.items()):
                try:
                    await pair.until_healthy()
                except ServerFailed as failure:
                    self._fail(model, name, failure)
                    del pairs[name]
            say(f"healthy after {time.monotonic() - began:.0f} s")
            for pair in pairs.values():
                pair.pause()
            await self._measure_cells(model, pairs, todo)

    def _fail(self, model: str, name: str, failure: ServerFailed) -> None:
        self._failed = True
        say(f"the {name} pair of {model} failed: {failure}")

    async def _measure_cells(
        self, model: str, pairs: dict[str, ServerPair], todo: list[Plan]
    ) -> None:
        warm: set[tuple[str, int]] = set()
        used_up = False
        for plan in todo:
            if plan.cache == USED and not used_up:
                used_up = True
                for name in self._on(pairs):
                    async with self._turn(model, name, pairs) as pair:
                        await self._use_up(pair, model, name)
            outcomes: dict[str, list[Outcomes]] = {}
            for round_number in range(self._settings.rounds):
                # Each round begins with another connector, so that none is always first.
                names = self._todo(model, plan, pairs)
                shift = round_number % max(1, len(names))
                for name in names[shift:] + names[:shift]:
                    if self._settings.connectors[name][0] not in pairs:
                        continue
                    self._need(self._round_s(plan.cell), f"cell {plan.cell} of {name}")
                    async with self._turn(model, name, pairs) as pair:
                        # In a fresh cache, as little as connects the pair.
                        length = plan.cell.input_tokens if plan.cache == USED else 16
                        if (name, length) not in warm:
                            warm.add((name, length))
                            await self._warm_up(pair, name, length)
                        rows = outcomes.setdefault(name, [])
                        await self._measure(pair, name, plan, round_number, rows)
            rows = {
                name: make_row(model, name, plan.cell, plan.cache, rounds)
                for name, rounds in outcomes.items()
            }
            for name, row in rows.items():
                theirs = rows.get(COUNTERPARTS.get(name.partition("@")[0], ""))
                if theirs is not None and len(theirs["samples"]) == len(row["samples"]):
                    row["of_vllm"] = of_vllm(row, theirs)
                self._results.add(row)
                say(show_row(row))

    def _on(self, pairs: Container[str]) -> list[str]:
        connectors = self._settings.connectors.items()
        return [name for name, (servers, _) in connectors if servers in pairs]

    @contextlib.asynccontextmanager
    async def _turn(
        self, model: str, connector: str, pairs: dict[str, ServerPair]
    ) -> AsyncIterator[ServerPair]:
        """A connector's pair runs and the others wait; a pair that fails is out."""
        name = self._settings.connectors[connector][0]
        pair = pairs[name]
        pair.resume()
        try:
            pair.check()
            yield pair
        except ServerFailed as failure:
            del pairs[name]
            self._fail(model, name, failure)
        else:
            pair.pause()

    async def _measure(
        self,
        pair: ServerPair,
        connector: str,
        plan: Plan,
        round_number: int,
        rounds: list[Outcomes],
    ) -> None:
        """Measure one round; a server that ends under the load is a result as well.

        Raises:
            ServerFailed: a server ended.
        """
        cell = self._part(plan.cell, round_number)
        # Both connectors of a way meet the same prompts.
        purpose = f"{self._settings.connectors[connector][1].value} {plan.cache} {round_number}"
        try:
            rounds.append(await self._load(pair, connector, cell, purpose))
        except ServerFailed:
            rounds.append([RequestFailed("a server ended")] * cell.requests)
            raise
        if any(isinstance(each, RequestFailed) for each in rounds[-1]):
            # Connections break before the process that had them is gone; the next cell is not to
            # blame for it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await pair.until_failed()

    def _part(self, cell: Cell, round_number: int) -> Cell:
        """The requests of one round."""
        each, more = divmod(cell.requests, self._settings.rounds)
        return Cell(cell.input_tokens, cell.qps, each + (round_number < more))

    def _round_s(self, cell: Cell) -> float:
        return self._part(cell, 0).requests / cell.qps + _TAIL_S

    async def _warm_up(self, pair: ServerPair, connector: str, input_tokens: int) -> None:
        """First one alone, which also connects the pair, then some at once."""
        for requests in (1, WARM_UP_REQUESTS - 1):
            warm_up = Cell(input_tokens, 1000.0, requests)
            await self._prepare(pair, connector, warm_up, f"warm-up {connector}")

    async def _use_up(self, pair: ServerPair, model: str, connector: str) -> None:
        """Hand out every block of both caches once, to prompts of different lengths."""
        servers, way = self._settings.connectors[connector]
        if way is Way.SINGLE:
            return
        sharing = [each for each in self._settings.connectors.values() if each[0] == servers]
        ways = sum(each is not Way.SINGLE for _, each in sharing)
        tokens = self._settings.kv_cache_gib[model] * (1 << 30) / kv_bytes_per_token(model) / ways
        longest = max(cell.input_tokens for cell in self._settings.cells)
        lengths = [max(1, int(longest * share)) for share in _USE_UP_LENGTHS]
        cells = [
            Cell(length, 1000.0, math.ceil(tokens / len(lengths) / length)) for length in lengths
        ]
        began = time.monotonic()
        await asyncio.gather(
            *(self._prepare(pair, connector, cell, f"use up {connector}") for cell in cells)
        )
        say(f"{connector}: every block was used once after {time.monotonic() - began:.1f} s")

    async def _prepare(self, pair: ServerPair, connector: str, cell: Cell, purpose: str) -> None:
        for failure in await self._load(pair, connector, cell, purpose):
            if isinstance(failure, RequestFailed):
                say(f"{purpose} at {cell.input_tokens} tokens: {failure}")

    async def _load(self, pair: ServerPair, connector: str, cell: Cell, purpose: str) -> Outcomes:
        """The outcomes of a cell; a server that ends is the end of it.

        Raises:
            ServerFailed: a server ended.
        """
        settings = self._settings
        ports, side_channel_ports = self._ports(self._settings.connectors[connector][0])
        target = Target(
            model=MODEL_NAME,
            vocab_size=VOCAB_SIZE,
            host=HOST,
            prefill_port=ports[0],
            decode_port=ports[1],
            engine_id=PREFILL_ENGINE_ID,
            side_channel_port=side_channel_ports[0],
        )
        traffic = make_traffic(cell, VOCAB_SIZE, settings.seed, purpose)
        way = self._settings.connectors[connector][1]
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

    def _ports(self, servers: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """HTTP and side channel ports of a pair: P's and D's."""
        step = PAIR_PORTS * list(self._settings.servers).index(servers)
        (p, d), (side_p, side_d) = self._settings.ports, self._settings.side_channel_ports
        return (p + step, d + step), (side_p + step, side_d + step)

    def _need(self, seconds: float, what: str) -> None:
        left = self._ends_at - time.monotonic()
        if seconds > left:
            raise TimeUp(f"{what} may take {seconds:.0f} s, {left:.0f} s are left")

    def _spec(self, model: str, servers: str) -> PairSpec:
        settings = self._settings
        configs = settings.servers[servers]
        cells = settings.cells + settings.fresh_cells
        longest = max(cell.input_tokens for cell in cells) + settings.output_tokens
        specs = [
            ServerSpec(name, engine_id, gpu, port, side_channel_port, config, flags, cpus)
            for name, engine_id, gpu, port, side_channel_port, config, flags, cpus in zip(
                ("prefill", "decode"),
                (PREFILL_ENGINE_ID, DECODE_ENGINE_ID),
                settings.gpus,
                *self._ports(servers),
                configs,
                (EAGER, EAGER if settings.decode_eager else DECODE_GRAPHS),
                _halves(os.sched_getaffinity(0)),
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
            flags=(
                # vLLM's own measure of free memory is wrong while its neighbours start.
                *("--kv-cache-memory-bytes", str(int(settings.kv_cache_gib[model] * (1 << 30)))),
                *("--gpu-memory-utilization", "0.2"),
                *settings.server_flags,
            ),
            **command,
        )


def _halves(cpus: set[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Cores for P and for D, the same in every pair, so that no pair is luckier than another."""
    ordered = sorted(cpus)
    middle = len(ordered) // 2
    return frozenset(ordered[:middle]), frozenset(ordered[middle:])


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


if __name__ == "__main__":
    sys.exit(main())
