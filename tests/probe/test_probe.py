"""Prompts of the wanted length for any tokenizer, and the figures made of what was measured."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvcourier.cli.app import app
from kvcourier.probe import measure
from kvcourier.probe.client import RequestFailed
from kvcourier.probe.measure import ProbeSettings, probe
from kvcourier.probe.prompts import number_prompt
from kvcourier.probe.summary import summarize
from probe_servers import chunk, client_of, stream


class Server:
    """Counts tokens its own way; fails the requests whose numbers are in `bad`."""

    def __init__(
        self,
        tokens_per_number: int = 2,
        extra_tokens: int = 1,
        bad: frozenset[int] = frozenset(),
        counts: bool = True,
    ) -> None:
        self.tokens_per_number = tokens_per_number
        self.extra_tokens = extra_tokens
        self.bad = bad
        self.counts = counts
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "its-own"}, {"id": "another"}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        if len(self.bodies) in self.bad:
            return httpx.Response(503, json={"error": {"message": "no room"}})
        count = len(body["prompt"].split()) * self.tokens_per_number + self.extra_tokens
        usage = {"choices": [], "usage": {"prompt_tokens": count}}
        return stream(chunk("7", 7), *([usage] if self.counts else []))


def settings(**changes: Any) -> ProbeSettings:
    values = {"url": "http://r", "model": "m", "num_tokens": 500, "num_requests": 5}
    return ProbeSettings(**{**values, **changes})


@given(
    tokens_per_number=st.integers(1, 6),
    extra_tokens=st.integers(0, 30),
    num_tokens=st.integers(1, 3000),
)
def test_prompts_have_the_wanted_length(
    tokens_per_number: int, extra_tokens: int, num_tokens: int
) -> None:
    server = Server(tokens_per_number, extra_tokens)
    result = probe(settings(num_tokens=num_tokens, num_requests=1), client_of(server))
    assert result.summary is not None
    found = result.summary.num_prompt_tokens
    assert found is not None
    # Whole numbers only, and at least one of them.
    shortest = tokens_per_number + extra_tokens
    slack = max(tokens_per_number, 0.01 * num_tokens) + 1
    assert abs(found - max(num_tokens, shortest)) <= slack


def test_no_two_prompts_begin_alike() -> None:
    server = Server()
    probe(settings(num_requests=20), client_of(server))
    beginnings = {body["prompt"][:40] for body in server.bodies}
    assert len(beginnings) == len(server.bodies)
    assert {body["max_tokens"] for body in server.bodies} == {1}


def test_a_seed_repeats_the_prompts() -> None:
    first, second = Server(), Server()
    for server in (first, second):
        probe(settings(seed=3), client_of(server))
    assert first.bodies == second.bodies
    assert number_prompt(random.Random(3), 2) == number_prompt(random.Random(3), 2)


def test_the_first_model_is_asked_for() -> None:
    server = Server()
    probe(settings(model=None, headers={"X-KV-Mode": "push"}), client_of(server))
    assert {body["model"] for body in server.bodies} == {"its-own"}
    assert all(headers["X-KV-Mode"] == "push" for headers in server.headers)


@pytest.mark.parametrize("content", [{}, {"data": []}, []])
def test_a_server_without_models_is_named(content: Any) -> None:
    with pytest.raises(RequestFailed, match="which model http://r serves"):
        probe(settings(model=None), client_of(lambda request: httpx.Response(200, json=content)))


def test_a_server_that_does_not_count() -> None:
    result = probe(settings(), client_of(Server(counts=False)))
    assert result.summary is not None
    assert result.summary.num_prompt_tokens is None


def test_failures_are_kept_and_the_rest_is_measured() -> None:
    exact = Server(bad=frozenset({3, 5}), extra_tokens=0)  # the first guess is right: 1 request
    result = probe(settings(), client_of(exact))
    assert result.failures == ("HTTP 503: no room",) * 2
    assert result.summary is not None
    assert result.summary.num_requests == 3


def test_nothing_answered_is_no_summary() -> None:
    server = Server(bad=frozenset(range(2, 100)), extra_tokens=0)
    result = probe(settings(), client_of(server))
    assert result.summary is None
    assert len(result.failures) == 5


def test_the_summary_in_figures() -> None:
    summary = summarize([0.005, 0.001, 0.002, 0.004, 0.003], [10, 12, 11])
    assert (summary.median_ms, summary.lower_ms, summary.upper_ms) == (3.0, 2.0, 4.0)
    assert (summary.lowest_ms, summary.highest_ms) == (1.0, 5.0)
    assert (summary.num_requests, summary.num_prompt_tokens) == (5, 11)
    alone = summarize([0.25], [])
    assert alone.lower_ms == alone.upper_ms == alone.median_ms == 250.0
    assert alone.as_json()["ttft_ms"]["range"] == [250.0, 250.0]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    real = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **options: real(transport=httpx.MockTransport(server), **options)
    )
    return server


def test_the_command_shows_and_writes_the_result(served: Server, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["probe", "--tokens", "200", "--requests", "3", "--mode", "push"]
    arguments += ["--url", "http://r/v1/", "--json", str(path), "--api-key", "secret"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "TTFT of 3 prompts of 2" in result.stdout
    content = json.loads(path.read_text())
    assert (content["requests"], content["failures"]) == (3, 0)
    assert served.headers[0]["Authorization"] == "Bearer secret"
    assert served.headers[0]["X-KV-Mode"] == "push"


def test_the_command_fails_with_any_request(served: Server) -> None:
    served.bad = frozenset(range(3, 100))
    result = CliRunner().invoke(app, ["probe", "--requests", "4", "--tokens", "100"])
    assert result.exit_code == 1
    assert "failed: HTTP 503: no room" in result.stdout


def test_nobody_there_is_one_sentence() -> None:
    result = CliRunner().invoke(app, ["probe", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "cannot learn which model http://127.0.0.1:1 serves" in result.stderr


def test_the_measured_requests_come_after_the_calibration() -> None:
    # A first request that costs more than the rest must not be in the figures.
    server = Server()
    shown: list[float] = []
    probe(settings(), client_of(server), lambda answer: shown.append(answer.ttft_s))
    assert len(shown) == 5
    assert 1 <= len(server.bodies) - len(shown) <= measure._CALIBRATIONS
