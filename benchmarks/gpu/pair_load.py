"""Open-loop load on a prefill and a decode server, and what each request took.

Decides prompts, arrival times, what a router would send, and what is measured from where to where.
Refuses to know how the servers were started and which connector they run.
"""

import asyncio
import enum
import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from http_stream import Answer, BadAnswer, post

PATH = "/v1/completions"
# Ids below are special tokens of the model folders.
FIRST_TOKEN_ID = 2


class Way(enum.StrEnum):
    """How a request goes through the pair; SINGLE is the decode server alone."""

    PULL = "pull"
    PUSH = "push"
    SINGLE = "single"


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: prompt length, mean arrivals a second, number of requests."""

    input_tokens: int
    qps: float
    requests: int

    def __str__(self) -> str:
        return f"{self.input_tokens}:{self.qps:g}:{self.requests}"


def parse_cells(text: str) -> list[Cell]:
    """Read `TOKENS:QPS:REQUESTS,...`.

    Raises:
        ValueError: a cell has another form, or a number that is not above 0.
    """
    cells = []
    for item in text.split(","):
        try:
            tokens, qps, requests = item.split(":")
            cell = Cell(int(tokens), float(qps), int(requests))
        except ValueError:
            raise ValueError(f"cell: expected TOKENS:QPS:REQUESTS, found {item!r}") from None
        if not (cell.input_tokens > 0 and 0 < cell.qps < float("inf") and cell.requests > 0):
            raise ValueError(f"cell: expected numbers above 0, found {item!r}")
        cells.append(cell)
    return cells


@dataclass(frozen=True, slots=True)
class Target:
    """Where the two servers listen, and what a router knows of the prefill server beforehand."""

    model: str
    vocab_size: int
    host: str
    prefill_port: int
    decode_port: int
    engine_id: str
    side_channel_port: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts as JSON lists of token ids, and when each is sent, in seconds from the start."""

    prompts: tuple[str, ...]
    arrivals_s: tuple[float, ...]


def make_traffic(cell: Cell, vocab_size: int, seed: int, purpose: str) -> Traffic:
    """Draw a cell's traffic.

    Arrival times depend on the seed and the cell alone, so all connectors meet the same bursts.
    Prompts also depend on the purpose: what runs on the same servers twice, does so with others.
    """
    clock = random.Random(f"{seed} {cell}")
    now, arrivals = 0.0, []
    for _ in range(cell.requests):
        arrivals.append(now)
        now += clock.expovariate(cell.qps)
    words = random.Random(f"{seed} {cell} {purpose}")
    ids = range(FIRST_TOKEN_ID, vocab_size)
    prompts = tuple(
        json.dumps(words.choices(ids, k=cell.input_tokens)) for _ in range(cell.requests)
    )
    return Traffic(prompts, tuple(arrivals))


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request.

    Attributes:
        ttft_ms: from the client's request to the first token from the decode server.
        after_prefill_ms: from the prefill server's answer to that token; None without one.
        tpot_ms: mean per token after the first.
        latency_ms: from the client's request to the last token.
        sent_at_s: when it was sent, on the client's clock.
    """

    ttft_ms: float
    after_prefill_ms: float | None
    tpot_ms: float
    latency_ms: float = 0.0
    sent_at_s: float = 0.0


class RequestFailed(Exception):
    """A request that a client would not call answered; the text says what came instead."""


Outcomes = Sequence[Sample | RequestFailed]
"""What became of each request of a load, in its order."""


async def run(
    target: Target, way: Way, traffic: Traffic, output_tokens: int, timeout_s: float
) -> Outcomes:
    """Send all of the traffic at its times, whether or not earlier requests were answered."""
    start = time.perf_counter()

    async def one(prompt: str, arrival_s: float) -> Sample | RequestFailed:
        await asyncio.sleep(start + arrival_s - time.perf_counter())
        request = _Request(target, prompt, output_tokens)
        try:
            async with asyncio.timeout(timeout_s):
                return await request.go(way)
        except RequestFailed as failure:
            return failure
        except TimeoutError:
            return RequestFailed(f"not answered in {timeout_s:g} s")
        except (OSError, BadAnswer) as error:
            return RequestFailed(repr(error))

    each = zip(traffic.prompts, traffic.arrivals_s, strict=True)
    return list(await asyncio.gather(*(one(prompt, arrival) for prompt, arrival in each)))


class _Request:
    """One client's request and its two legs."""

    def __init__(self, target: Target, prompt: str, output_tokens: int) -> None:
        self._target = target
        self._prompt = prompt
        self._output_tokens = output_tokens
        self._id = uuid.uuid4().hex
        self._transfer_id = uuid.uuid4().hex
        self._prefilled_at: float | None = None

    async def go(self, way: Way) -> Sample:
        start = time.perf_counter()
        match way:
            case Way.SINGLE:
                token_times = await self._decode(None)
            case Way.PULL:
                token_times = await self._decode(await self._prefill({}))
            case Way.PUSH:
                named = {"transfer_id": self._transfer_id}
                try:
                    async with asyncio.TaskGroup() as legs:
                        legs.create_task(self._prefill(named))
                        decode = legs.create_task(self._decode(self._push_params() | named))
                except ExceptionGroup as group:
                    raise group.exceptions[0] from None
                token_times = decode.result()
        first, last = token_times
        after = None if self._prefilled_at is None else (first - self._prefilled_at) * 1e3
        tpot_ms = (last - first) / max(1, self._output_tokens - 1) * 1e3
        return Sample((first - start) * 1e3, after, tpot_ms, (last - start) * 1e3, start)

    async def _prefill(self, named: dict[str, Any]) -> dict[str, Any]:
        """Send the prefill leg; returns P's `kv_transfer_params`."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        body = self._body(max_tokens=1, stream=False, kv_transfer_params=params | named)
        async with self._post(self._target.prefill_port, body) as answer:
            content = await self._content(answer, "prefill")
            self._prefilled_at = time.perf_counter()
        handoff = json.loads(content).get("kv_transfer_params")
        if not isinstance(handoff, dict) or not handoff:
            # Without it the decode server would compute the prompt itself, as if all were well.
            raise RequestFailed("the prefill server answered without kv_transfer_params")
        return handoff

    async def _decode(self, params: dict[str, Any] | None) -> tuple[float, float]:
        """Send the decode leg; returns when its first and its last token came."""
        fields: dict[str, Any] = {
            "max_tokens": self._output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params is not None:
            fields["kv_transfer_params"] = params
        times: list[float] = []
        num_tokens, reason = 0, None
        async with self._post(self._target.decode_port, self._body(**fields)) as answer:
            if answer.status != 200:
                await self._content(answer, "decode")
            rest = b""
            async for piece in answer.pieces:
                now = time.perf_counter()
                *events, rest = (rest + piece).split(b"\n\n")
                for text in events:
                    data = text.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise RequestFailed(f"the decode server broke off: {event['error']}")
                    if event["choices"]:
                        times.append(now)
                        reason = event["choices"][0].get("finish_reason") or reason
                    num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        if num_tokens != self._output_tokens or reason != "length" or not times:
            raise RequestFailed(
                f"expected {self._output_tokens} tokens that end by length, "
                f"found {num_tokens} that end by {reason}"
            )
        return times[0], times[-1]

    def _push_params(self) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._target.engine_id,
            "remote_host": self._target.host,
            "remote_port": self._target.side_channel_port,
            "tp_size": 1,
            "pp_size": 1,
            # What vLLM makes of the X-Request-Id of a completion with one prompt.
            "remote_request_id": f"cmpl-{self._id}-0",
        }

    def _body(self, **fields: Any) -> bytes:
        fields |= {"model": self._target.model, "temperature": 0, "ignore_eos": True}
        # The prompt was turned into JSON beforehand: 16000 ids take milliseconds.
        return f'{json.dumps(fields)[:-1]}, "prompt": {self._prompt}}}'.encode()

    def _post(self, port: int, body: bytes) -> Any:
        return post(self._target.host, port, PATH, body, {"X-Request-Id": self._id})

    async def _content(self, answer: Answer, leg: str) -> bytes:
        content = await answer.read()
        if answer.status != 200:
            text = content[:300].decode(errors="replace")
            raise RequestFailed(f"the {leg} server answered {answer.status}: {text}")
        return content


def mean_decoding(samples: Sequence[Sample]) -> float | None:
    """How many requests D decodes at a time, on average while it decodes any; None without samples.

    The more, the longer a step takes: a connector that delivers sooner, or evenly, has more of
    them at once.
    """
    spans = [
        (each.sent_at_s + each.ttft_ms / 1e3, each.sent_at_s + each.latency_ms / 1e3)
        for each in samples
    ]
    edges = sorted({edge for span in spans for edge in span})
    total = busy = 0.0
    for start, stop in pairwise(edges):
        decoding = sum(first <= start and stop <= last for first, last in spans)
        total += decoding * (stop - start)
        busy += (stop - start) * (decoding > 0)
    return total / busy if busy else None


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, mean and 90th percentile (interpolated); None of each without values."""
    if not values:
        return {"p50": None, "mean": None, "p90": None}
    ordered = sorted(values)
    return {
        "p50": _quantile(ordered, 0.5),
        "mean": sum(ordered) / len(ordered),
        "p90": _quantile(ordered, 0.9),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
