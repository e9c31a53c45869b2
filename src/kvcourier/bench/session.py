"""What all runs share: processes, connections, progress, and one turn of requests.

Decides how a turn is measured from its first request to its last story. Refuses to know which
turns there are and what they are compared with.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcourier.bench.client import make_ask, make_client
from kvcourier.bench.load import OnOutcome, run_load
from kvcourier.bench.pair import Pairs, PairSpec
from kvcourier.bench.plan import Burst, Planned, Prompts, Way
from kvcourier.bench.samples import Answered, Failed, Outcome, Turn
from kvcourier.bench.target import Target, look, read_cache_counts, read_samples
from kvcourier.demo.processes import Children

T = TypeVar("T")

# Connections, handshakes and first uses of code are paid by these. The first goes alone.
_WARM_UP_S = 0.05


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What every request has in common.

    Attributes:
        output_tokens: generated per request; from 2 on there is a TPOT.
        timeout_s: for one request.
        seed: of arrival times and prompts.
        vocab_size: token ids of prompts are drawn below it.
        shared_prefix: part of each prompt that all begin with.
        warm_up: requests per target and prompt length that do not count.
        model: name to ask for; None takes the target's first.

    Raises:
        ConfigError: no prompts can be drawn with these numbers.
    """

    output_tokens: int = 32
    timeout_s: float = 120.0
    seed: int = 0
    vocab_size: int = 256
    shared_prefix: float = 0.0
    warm_up: int = 2
    model: str | None = None

    def __post_init__(self) -> None:
        self.prompts(1, "")  # refuses what it cannot use, before anything is started

    def prompts(self, input_tokens: int, audience: str) -> Prompts:
        """The prompts of one audience. Raises ConfigError."""
        return Prompts(self.seed, input_tokens, audience, self.vocab_size, self.shared_prefix)


class Session:
    """Use it in a `with` block, in the main thread; nothing runs on after it."""

    def __init__(
        self, children: Children, log_dir: Path, console: Console, settings: LoadSettings
    ) -> None:
        self.console = console
        self.settings = settings
        self._pairs = Pairs(children, log_dir)
        self._children = children
        self._runner = asyncio.Runner()
        self._client: httpx.AsyncClient | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._client is not None:
            self._run(self._client.aclose())
        self._runner.close()

    def say(self, sentence: str) -> None:
        """A line above the progress."""
        self.console.print(sentence, markup=False, highlight=False)

    def start_pairs(self, specs: Iterable[PairSpec]) -> Mapping[PairSpec, str]:
        """See `pair.Pairs.start`; says how many there are and how long it took."""
        num_pairs = len(set(specs := tuple(specs)))
        if num_pairs:
            self._progress.update(self._task, description=f"starting pairs: {num_pairs}")
        began_s = time.monotonic()
        routers = self._pairs.start(specs)
        if num_pairs:
            self.say(f"pairs started: {num_pairs}, in {time.monotonic() - began_s:.0f} s")
        return routers

    def expect(self, num_requests: int) -> None:
        """How many requests are to come in all."""
        self._progress.update(self._task, total=num_requests)

    def look(self, url: str, way: Way) -> Target:
        """See `target.look`."""
        return self._run(look(self._connections(), url, way, self.settings.model))

    def warm_up(self, target: Target, input_tokens: int) -> list[str]:
        """Requests that do not count; returns what went wrong."""
        prompts = self.settings.prompts(input_tokens, f"warm-up {target.way}")
        failures: list[str] = []
        counts = [count for count in (1, self.settings.warm_up - 1) if count > 0]
        for part, count in enumerate(counts[: self.settings.warm_up]):
            burst = tuple(
                Planned(_WARM_UP_S * index, prompts, f"{part} {index}") for index in range(count)
            )
            outcomes = self._run(self._load(target, burst))
            failures += [each.reason for each in outcomes if isinstance(each, Failed)]
        self._children.check()
        return failures

    def take_turn(self, label: str, target: Target, burst: Burst) -> Turn:
        """Send a burst and read what became of it; `label` is shown meanwhile.

        Raises:
            ProcessFailed: a child has ended; the turn is lost.
        """
        self._progress.update(self._task, description=label)
        turn = self._run(self._take_turn(label, target, burst))
        self._children.check()
        return turn

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it to its end; Ctrl-C and SIGTERM cancel all of it and raise KeyboardInterrupt."""
        with _sigterm_as_sigint():
            return self._runner.run(work)

    async def _take_turn(self, label: str, target: Target, burst: Burst) -> Turn:
        client = self._connections()
        before = await read_cache_counts(client, target)

        def show(outcome: Outcome) -> None:
            said = "failed"
            if isinstance(outcome, Answered):
                said = f"TTFT {outcome.token_s[0] * 1e3:.0f} ms"
            self._progress.update(self._task, advance=1, description=f"{label}: {said}")

        outcomes = await self._load(target, burst, show)
        answers = [each for each in outcomes if isinstance(each, Answered)]
        samples = iter(await read_samples(client, target, answers))
        after = await read_cache_counts(client, target)
        return Turn(
            samples=tuple(next(samples) if isinstance(o, Answered) else None for o in outcomes),
            failures=tuple(each.reason for each in outcomes if isinstance(each, Failed)),
            cache={side: after[side].since(before[side]) for side in before if side in after},
        )

    async def _load(
        self, target: Target, burst: Burst, on_outcome: OnOutcome = lambda outcome: None
    ) -> list[Outcome]:
        asks = [
            make_ask(
                target.url,
                target.way,
                target.model,
                each.prompts.prompt(each.name),
                each.output_tokens or self.settings.output_tokens,
            )
            for each in burst
        ]
        arrivals_s = [each.arrival_s for each in burst]
        timeout_s = self.settings.timeout_s
        return await run_load(self._connections(), asks, arrivals_s, timeout_s, on_outcome)

    def _connections(self) -> httpx.AsyncClient:
        # Bound to the runner's loop, so not before it runs.
        if self._client is None:
            self._client = make_client()
        return self._client


@contextlib.contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    """The runner knows how to unwind tasks on SIGINT; an exception in one of them would not."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
