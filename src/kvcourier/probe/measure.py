"""A probe of one server: find the right prompt length, warm up, measure.

Decides which requests are sent, one after the other. Refuses to know how a stream is read and how
times are summed up.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvcourier.probe.client import Answer, RequestFailed, complete
from kvcourier.probe.prompts import better_guess, first_guess, number_prompt
from kvcourier.probe.summary import Summary, summarize

_CALIBRATIONS = 4
_CLOSE_ENOUGH = 0.01


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What is asked of whom.

    Attributes:
        url: address of the server, without a path.
        model: None asks the server for the first one that it serves.
        num_tokens: wanted length of the prompts, in the server's tokens.
        num_requests: requests that are measured.
        seed: makes the prompts repeatable; None draws new ones, which no cache has seen.
        headers: sent along with every request.
    """

    url: str
    model: str | None
    num_tokens: int
    num_requests: int
    seed: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`summary` is None if no request was answered; `failures` has one sentence per other one."""

    summary: Summary | None
    failures: tuple[str, ...]


def probe(
    settings: ProbeSettings,
    client: httpx.Client,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> ProbeResult:
    """Measure, one request at a time; blocks.

    Raises:
        RequestFailed: the server cannot be asked, or refuses such prompts at all.
    """
    return _Probe(settings, client).run(on_answer)


class _Probe:
    def __init__(self, settings: ProbeSettings, client: httpx.Client) -> None:
        self._settings = settings
        self._client = client
        self._random = random.Random(settings.seed)
        self._model = settings.model or _first_model(settings, client)

    def run(self, on_answer: Callable[[Answer], None]) -> ProbeResult:
        num_numbers = self._calibrate()
        answers: list[Answer] = []
        failures: list[str] = []
        for _ in range(self._settings.num_requests):
            try:
                answers.append(self._ask(num_numbers))
                on_answer(answers[-1])
            except RequestFailed as error:
                failures.append(str(error))
        if not answers:
            return ProbeResult(None, tuple(failures))
        counts = [
            answer.num_prompt_tokens for answer in answers if answer.num_prompt_tokens is not None
        ]
        return ProbeResult(
            summarize([answer.ttft_s for answer in answers], counts), tuple(failures)
        )

    def _calibrate(self) -> int:
        """How many numbers make the wanted prompt; these requests also warm the server up."""
        wanted = self._settings.num_tokens
        num_numbers = first_guess(wanted)
        for _ in range(_CALIBRATIONS):
            counted = self._ask(num_numbers).num_prompt_tokens
            if counted is None or abs(counted - wanted) <= _CLOSE_ENOUGH * wanted:
                break
            num_numbers = better_guess(num_numbers, counted, wanted)
        return num_numbers

    def _ask(self, num_numbers: int) -> Answer:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": number_prompt(self._random, num_numbers),
            "max_tokens": 1,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
        settings = self._settings
        return complete(self._client, settings.url, body, headers=settings.headers)


def _first_model(settings: ProbeSettings, client: httpx.Client) -> str:
    try:
        response = client.get(f"{settings.url}/v1/models", headers=settings.headers)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RequestFailed(
            f"cannot learn which model {settings.url} serves ({type(error).__name__}: {error}); "
            "is the server up? Otherwise name one with --model"
        ) from error
