"""Clients that call, in a thread of their own, and what came of each call.

Decides how a call is sent, read and broken off. Refuses to judge: that is `verdict`.
"""

import asyncio
import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import httpx

from e2e.cluster import body_of
from soak.plan import Call, calls

LONGEST_CALL_S = 60.0
"""A call without an end by then hangs: no deadline of a transfer, and no queue, is as long."""
_PAUSE_S = 0.05
"""Between calls of a client whose call has failed: who is refused at once must not spin."""


@dataclasses.dataclass
class Outcome:
    """What a client got.

    Attributes:
        began, ended: by `time.monotonic`.
        end: `answered`, `left` (the client did), `failed`, or `hung`.
        tokens: what has come for each prompt, also of calls that failed or were left.
        reason: of a failure.
    """

    call: Call
    began: float
    ended: float = 0.0
    end: str = "failed"
    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    reason: str = ""


class Traffic(threading.Thread):
    """All clients; after `stop` they call no more, and the thread ends with their last answer.

    Args:
        urls: where `Call.whom` listens.
        prompts: the pool.
    """

    def __init__(
        self, urls: Mapping[str, str], prompts: Sequence[Sequence[int]], seed: int, num_clients: int
    ) -> None:
        super().__init__(name="traffic", daemon=True)
        self.outcomes: list[Outcome] = []
        self.in_flight = 0
        self.error: BaseException | None = None
        self._urls = urls
        self._prompts = prompts
        self._plans = [calls(seed, client, len(prompts)) for client in range(num_clients)]
        self._is_stopping = threading.Event()

    def stop(self) -> None:
        """No further calls."""
        self._is_stopping.set()

    def counts(self) -> Counter[str]:
        """Calls so far by how they ended."""
        return Counter(outcome.end for outcome in list(self.outcomes))

    def run(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # the soak asks for it and fails
            self.error = error

    async def _run(self) -> None:
        # A connection a call: one that a killed server has closed would fail the next call.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as client:
            await asyncio.gather(*(self._ask_all(client, plan) for plan in self._plans))

    async def _ask_all(self, client: httpx.AsyncClient, plan: Iterator[Call]) -> None:
        while not self._is_stopping.is_set():
            self.in_flight += 1
            outcome = await self.ask(client, next(plan))
            self.in_flight -= 1
            self.outcomes.append(outcome)
            if outcome.end == "failed":
                await asyncio.sleep(_PAUSE_S)

    async def ask(self, client: httpx.AsyncClient, call: Call) -> Outcome:
        """Make one call and read what comes, to its end or until the client leaves."""
        outcome = Outcome(call, time.monotonic(), tokens=[[] for _ in call.prompts])
        patience_s = LONGEST_CALL_S if call.leaves_after_s is None else call.leaves_after_s
        try:
            async with asyncio.timeout(patience_s):
                await self._read(client, call, outcome)
        except TimeoutError:
            outcome.end = "hung" if call.leaves_after_s is None else "left"
        except httpx.HTTPError as error:
            outcome.reason = f"torn: {type(error).__name__}"
        outcome.ended = time.monotonic()
        return outcome

    async def _read(self, client: httpx.AsyncClient, call: Call, outcome: Outcome) -> None:
        prompts = [list(self._prompts[index]) for index in call.prompts]
        prompt = prompts[0] if len(prompts) == 1 else prompts
        body = body_of(prompt, call.num_tokens, stream=call.streams)
        headers = {"X-KV-Mode": call.mode}
        if call.binding is not None:
            headers["X-KV-Binding"] = call.binding
        url = f"{self._urls[call.whom]}/v1/completions"
        async with client.stream("POST", url, json=body, headers=headers) as response:
            if response.status_code != 200:
                outcome.reason = _reason(response.status_code, json.loads(await response.aread()))
            elif call.streams:
                await _read_stream(response, call, outcome)
            else:
                _take(json.loads(await response.aread()), outcome)
                outcome.end = "answered"


async def _read_stream(response: httpx.Response, call: Call, outcome: Outcome) -> None:
    outcome.reason = "torn: the stream ended without a word"
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            if outcome.reason.startswith("torn"):
                outcome.end, outcome.reason = "answered", ""
        elif data:
            event = json.loads(data)
            if "error" in event:
                outcome.reason = "in its stream: " + _reason(200, event)
            _take(event, outcome)
            enough = call.leaves_after_tokens
            if enough is not None and sum(map(len, outcome.tokens)) >= enough:
                outcome.end, outcome.reason = "left", ""
                return


def _take(answer: Mapping[str, object], outcome: Outcome) -> None:
    choices = answer.get("choices", ())
    assert isinstance(choices, (list, tuple))
    for choice in choices:
        outcome.tokens[choice["index"]] += choice.get("token_ids") or ()


def _reason(status: int, body: Mapping[str, Mapping[str, str]]) -> str:
    error = body["error"]
    return f"{status} {error.get('code') or error['message'][:80]}"
