"""How long an OpenAI endpoint takes to the first token of prompts made of random numbers.

Decides the prompts, what is timed, and how the samples are summed up. Refuses to know what serves
the endpoint: a router, one instance, vLLM.

Prompts differ from their first word on, so that no prefix cache helps. With a seed given they are
the same in each run, and a second run may well find them cached.
"""

import asyncio
import dataclasses
import enum
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from kvcourier.config import TransferMode
from kvcourier.errors import ConfigError, KVCourierError

DEFAULT_URL = "http://127.0.0.1:8192"
_CALIBRATION_WORDS = 64
_SPECIAL_IDS = 16  # the lowest token ids are often special: padding, end of text
_WORDS = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"),
    *("hundred", "thousand", "million"),
)


class ProbeError(KVCourierError):
    """The endpoint cannot be measured; the message says why and what to do."""


class PromptKind(enum.StrEnum):
    """Words for numbers, close to the number of tokens; or token ids, exactly that many."""

    TEXT = "text"
    TOKEN_IDS = "token_ids"


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """What to measure.

    Attributes:
        url: the endpoint, without `/v1`.
        tokens: length of each prompt.
        count: prompts to measure.
        max_tokens: tokens to generate for each; from 2 on there is a TPOT.
        seed: of the prompts; None draws one, which the result tells.
        mode: sent as `X-KV-Mode`; None leaves the choice to the router.
        concurrency: calls at a time.
        model: name of the model; None takes the first that the endpoint lists.
        prompt: text or token ids.
        vocab_size: token ids are drawn below it.
        timeout_s: for one call.
    """

    url: str = DEFAULT_URL
    tokens: int = 1000
    count: int = 10
    max_tokens: int = 16
    seed: int | None = None
    mode: TransferMode | None = None
    concurrency: int = 1
    model: str | None = None
    prompt: PromptKind = PromptKind.TEXT
    vocab_size: int = 1024
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("tokens", "count", "max_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected 1 or more, found {getattr(self, name)}")
        if self.vocab_size <= _SPECIAL_IDS:
            raise ConfigError(
                f"vocab_size: expected more than {_SPECIAL_IDS}, found {self.vocab_size}"
            )
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"timeout_s: expected seconds above 0, found {self.timeout_s}")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url: expected http://host:port, found {self.url!r}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One call. `tpot_ms` is None if fewer than two tokens came."""

    ttft_ms: float
    tpot_ms: float | None
    prompt_tokens: int | None
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How the samples of one quantity lie, in milliseconds."""

    median: float
    min: float
    max: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was measured. `prompt_tokens` is the median of what the endpoint counted."""

    url: str
    model: str
    mode: str | None
    tokens: int
    prompt_tokens: int | None
    max_tokens: int
    concurrency: int
    seed: int
    ttft_ms: Spread
    tpot_ms: Spread | None
    samples: tuple[Sample, ...]

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-ready values."""
        return dataclasses.asdict(self)


def run_probe(config: ProbeConfig, console: Console | None = None) -> ProbeResult:
    """Measure, and show progress on `console` if one is given. Blocks until all calls are done.

    Raises:
        ProbeError: nothing listens, the model is missing, or a call failed.
    """
    if console is None:
        return asyncio.run(measure(config))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"probing {config.url}", total=config.count)

        def on_sample(sample: Sample) -> None:
            progress.update(
                task, advance=1, description=f"last time to first token {sample.ttft_ms:.0f} ms"
            )

        return asyncio.run(measure(config, on_sample))


async def measure(
    config: ProbeConfig, on_sample: Callable[[Sample], None] = lambda sample: None
) -> ProbeResult:
    """Measure; `on_sample` is called after each call.

    Raises:
        ProbeError: as `run_probe`.
    """
    seed = random.randrange(1 << 31) if config.seed is None else config.seed
    draw = random.Random(seed)
    async with httpx.AsyncClient(
        base_url=config.url.rstrip("/"), timeout=config.timeout_s, trust_env=False
    ) as client:
        endpoint = _Endpoint(client, config, await _model(client, config))
        # One call that does not count opens the connection and warms what runs for the first time.
        words = min(config.tokens, _CALIBRATION_WORDS)
        first = await endpoint.call(make_prompt(config, draw, words))
        words = words_for(config.tokens, words, first.prompt_tokens)
        prompts = iter([make_prompt(config, draw, words) for _ in range(config.count)])
        samples: list[Sample] = []

        async def worker() -> None:
            for prompt in prompts:
                samples.append(await endpoint.call(prompt))
                on_sample(samples[-1])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(config.concurrency, config.count)):
                    group.create_task(worker())
        except* ProbeError as errors:
            raise errors.exceptions[0] from None
    return _sum_up(config, endpoint.model, seed, samples)


def make_prompt(config: ProbeConfig, draw: random.Random, words: int) -> str | list[int]:
    """A prompt of `words` number words, or of exactly `config.tokens` token ids."""
    if config.prompt is PromptKind.TOKEN_IDS:
        return [draw.randrange(_SPECIAL_IDS, config.vocab_size) for _ in range(config.tokens)]
    return " ".join(draw.choices(_WORDS, k=words))


def words_for(tokens: int, words: int, counted_tokens: int | None) -> int:
    """How many words make `tokens` tokens, if `words` of them made `counted_tokens`."""
    return max(1, round(words * tokens / counted_tokens)) if counted_tokens else tokens


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    between = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return min(between, ordered[high])  # rounding may overshoot


def render(result: ProbeResult) -> Table:
    """The result as a table for a terminal."""
    length = f"{result.tokens} tokens"
    if result.prompt_tokens not in (None, result.tokens):
        length = f"about {result.tokens} (counted: {result.prompt_tokens}) tokens"
    mode = result.mode or "as the endpoint chooses"
    title = f"{len(result.samples)} prompts of {length}, {result.model}, mode: {mode}"
    table = Table("ms", "median", "min", "p10", "p90", "max", title=title)
    rows = {"time to first token": result.ttft_ms, "time per output token": result.tpot_ms}
    for name, spread in rows.items():
        if spread is not None:
            numbers = (spread.median, spread.min, spread.p10, spread.p90, spread.max)
            table.add_row(name, *(f"{number:.1f}" for number in numbers))
    return table


class _Endpoint:
    """Times one call at a time-line of its own."""

    def __init__(self, client: httpx.AsyncClient, config: ProbeConfig, model: str) -> None:
        self._client = client
        self._config = config
        self.model = model

    async def call(self, prompt: str | list[int]) -> Sample:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self._config.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        mode = self._config.mode
        headers = {} if mode is None else {"x-kv-mode": mode}
        began_s = time.perf_counter()
        times_s: list[float] = []
        usage: Mapping[str, Any] = {}
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                self._client.stream(
                    "POST", "/v1/completions", json=body, headers=headers
                ) as answer,
            ):
                if answer.status_code != 200:
                    raise ProbeError(_refusal(answer.status_code, await answer.aread()))
                async for event in _events(answer):
                    if event.get("error"):
                        raise ProbeError(f"The stream ended in an error: {_message(event)}")
                    if event.get("choices"):
                        times_s.append(time.perf_counter())
                    usage = event.get("usage") or usage
        except (httpx.HTTPError, TimeoutError) as error:
            raise _unreachable(self._config, error) from error
        if not times_s:
            raise ProbeError(f"{self._config.url} ended its answer without a token.")
        return _sample(began_s, times_s, usage)


def _sample(began_s: float, times_s: Sequence[float], usage: Mapping[str, Any]) -> Sample:
    tokens = usage.get("completion_tokens") or len(times_s)
    tpot_s = (times_s[-1] - times_s[0]) / (tokens - 1) if tokens > 1 else None
    return Sample(
        ttft_ms=(times_s[0] - began_s) * 1000,
        tpot_ms=None if tpot_s is None else tpot_s * 1000,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=tokens,
    )


async def _events(answer: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    async for line in answer.aiter_lines():
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or payload == "[DONE]":
            continue
        try:
            event = json.loads(payload)
        except ValueError:
            raise ProbeError(f"The stream holds an event that is not JSON: {payload!r}") from None
        if isinstance(event, dict):
            yield event


async def _model(client: httpx.AsyncClient, config: ProbeConfig) -> str:
    try:
        answer = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise _unreachable(config, error) from error
    if answer.status_code != 200:
        raise ProbeError(_refusal(answer.status_code, answer.content))
    try:
        names = [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, TypeError, KeyError):
        message = f"{config.url}/v1/models is no list of models; is it an OpenAI endpoint?"
        raise ProbeError(message) from None
    if not names:
        raise ProbeError(f"{config.url} serves no model yet.")
    if config.model not in (None, *names):
        raise ProbeError(
            f"{config.url} does not serve the model {config.model!r}; it serves {', '.join(names)}."
        )
    return config.model or names[0]


def _unreachable(config: ProbeConfig, error: Exception) -> ProbeError:
    if isinstance(error, httpx.ConnectError):
        return ProbeError(
            f"Nothing listens at {config.url}; start a router there (kvcourier route), or name "
            "another address."
        )
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return ProbeError(f"{config.url} did not answer within {config.timeout_s:g} s.")
    return ProbeError(f"The connection to {config.url} failed: {error}")


def _refusal(status: int, content: bytes) -> str:
    try:
        message = _message(json.loads(content))
    except ValueError:
        message = content[:200].decode(errors="replace")
    return f"The endpoint answered {status}: {message}"


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or body)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(
        median=quantile(values, 0.5),
        min=min(values),
        max=max(values),
        p10=quantile(values, 0.1),
        p90=quantile(values, 0.9),
    )


def _sum_up(config: ProbeConfig, model: str, seed: int, samples: Sequence[Sample]) -> ProbeResult:
    counted = [sample.prompt_tokens for sample in samples if sample.prompt_tokens is not None]
    tpots = [sample.tpot_ms for sample in samples if sample.tpot_ms is not None]
    return ProbeResult(
        url=config.url,
        model=model,
        mode=None if config.mode is None else str(config.mode),
        tokens=config.tokens,
        prompt_tokens=round(quantile(counted, 0.5)) if counted else None,
        max_tokens=config.max_tokens,
        concurrency=config.concurrency,
        seed=seed,
        ttft_ms=_spread([sample.ttft_ms for sample in samples]),
        tpot_ms=_spread(tpots) if tpots else None,
        samples=tuple(samples),
    )
