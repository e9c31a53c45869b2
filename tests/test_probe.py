"""The probe against a real server on loopback, and its arithmetic."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvcourier.config import TransferMode
from kvcourier.errors import ConfigError
from kvcourier.probe.run import (
    ProbeConfig,
    ProbeError,
    PromptKind,
    make_prompt,
    measure,
    quantile,
    render,
    run_probe,
    words_for,
)


class Endpoint(ThreadingHTTPServer):
    """An OpenAI endpoint that counts three tokens a word and remembers what it got."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.models = ["tiny", "other"]
        self.bodies: list[dict[str, Any]] = []
        self.modes: list[str | None] = []
        self.status = 200
        self.usage = True
        self.last_event = b"data: [DONE]\n\n"
        self.chunks = True
        self.together: threading.Barrier | None = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is no news here."""


class Handler(BaseHTTPRequestHandler):
    """Speaks just enough of the API."""

    server: Endpoint

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer({"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.modes.append(self.headers["x-kv-mode"])
        if self.server.together is not None and len(self.server.bodies) > 1:
            self.server.together.wait(60)
        if self.server.status != 200:
            self.answer({"error": {"message": "prompt too long"}}, self.server.status)
            return
        prompt = body["prompt"]
        count = 3 * len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for _ in range(body["max_tokens"] if self.server.chunks else 0):
            self.event({"choices": [{"text": "x"}]})
        if self.server.usage:
            usage = {"prompt_tokens": count, "completion_tokens": body["max_tokens"]}
            self.event({"choices": [], "usage": usage})
        self.wfile.write(self.server.last_event)

    def event(self, content: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def answer(self, content: Any, status: int = 200) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_what_is_asked_and_what_is_told() -> None:
    with endpoint() as server:
        result = run_probe(
            ProbeConfig(server.url, tokens=300, count=4, max_tokens=3, mode=TransferMode.PUSH)
        )
        assert result.model == "tiny"
        assert len(result.samples) == 4
        # The first call found three tokens a word; the measured ones are as long as asked for.
        assert result.prompt_tokens == 300
        assert {sample.prompt_tokens for sample in result.samples} == {300}
        assert server.modes == ["push"] * 5
        prompts = [body["prompt"] for body in server.bodies]
        assert len(set(prompts)) == 5
        assert all(body["stream"] and body["max_tokens"] == 3 for body in server.bodies)
        for sample in result.samples:
            assert sample.ttft_ms > 0
            assert sample.tpot_ms is not None and sample.tpot_ms >= 0
        ttft = result.ttft_ms
        assert ttft.min <= ttft.p10 <= ttft.median <= ttft.p90 <= ttft.max
        again = json.loads(json.dumps(result.as_dict()))
        assert again["ttft_ms"]["median"] == ttft.median
        assert len(again["samples"]) == 4


def test_token_ids_are_exactly_as_many() -> None:
    with endpoint() as server:
        config = ProbeConfig(
            server.url, tokens=77, count=2, prompt=PromptKind.TOKEN_IDS, vocab_size=20, seed=3
        )
        result = run_probe(config)
        assert [len(body["prompt"]) for body in server.bodies] == [77] * 3
        assert all(16 <= token < 20 for body in server.bodies for token in body["prompt"])
        assert result.prompt_tokens == 77
        first = [body["prompt"] for body in server.bodies]
        server.bodies.clear()
        run_probe(config)
        assert [body["prompt"] for body in server.bodies] == first


def test_calls_run_at_the_same_time() -> None:
    with endpoint() as server:
        # Three calls meet in the server, or the barrier breaks and with it the call.
        server.together = threading.Barrier(3)
        result = run_probe(ProbeConfig(server.url, tokens=8, count=6, concurrency=3))
        assert len(result.samples) == 6
        assert not server.together.broken


def test_one_token_has_no_tpot_and_usage_may_be_missing() -> None:
    with endpoint() as server:
        server.usage = False
        result = run_probe(ProbeConfig(server.url, tokens=8, count=2, max_tokens=1))
        assert result.tpot_ms is None
        assert result.prompt_tokens is None


def test_progress_and_table() -> None:
    with endpoint() as server:
        console = Console(width=120, record=True, force_terminal=False)
        result = run_probe(ProbeConfig(server.url, tokens=8, count=2), console)
        console.print(render(result))
        text = console.export_text()
        assert "time to first token" in text
        assert f"{result.ttft_ms.median:.1f}" in text
        assert "tiny" in text


def fails(config: ProbeConfig) -> str:
    with pytest.raises(ProbeError) as caught:
        run_probe(config)
    return str(caught.value)


def test_nothing_listens() -> None:
    with endpoint() as server:
        url = server.url
    message = fails(ProbeConfig(url))
    assert f"Nothing listens at {url}" in message


def test_the_model_is_missing() -> None:
    with endpoint() as server:
        message = fails(ProbeConfig(server.url, model="huge"))
        assert "huge" in message and "tiny, other" in message
        server.models = []
        assert "serves no model" in fails(ProbeConfig(server.url))


def test_a_call_is_refused() -> None:
    with endpoint() as server:
        server.status = 400
        assert "400: prompt too long" in fails(ProbeConfig(server.url))


def test_a_stream_ends_in_an_error() -> None:
    with endpoint() as server:
        server.last_event = b'data: {"error": {"message": "KV lost"}}\n\n'
        assert "KV lost" in fails(ProbeConfig(server.url))


def test_a_stream_has_no_token() -> None:
    with endpoint() as server:
        server.chunks = False
        assert "without a token" in fails(ProbeConfig(server.url))


def test_a_failure_among_many_calls_ends_the_probe() -> None:
    with endpoint() as server:

        async def run() -> None:
            def break_it(_sample: object) -> None:
                server.status = 503

            await measure(ProbeConfig(server.url, tokens=4, count=50, concurrency=4), break_it)

        with pytest.raises(ProbeError, match="503"):
            asyncio.run(run())
        assert len(server.bodies) < 51


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 0),
        ("count", 0),
        ("max_tokens", 0),
        ("concurrency", 0),
        ("timeout_s", 0.0),
        ("vocab_size", 16),
        ("url", "127.0.0.1:8192"),
    ],
)
def test_bad_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        ProbeConfig(**{field: value})


def test_text_is_made_of_number_words() -> None:
    prompt = make_prompt(ProbeConfig(), random.Random(1), 5)
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 5
    assert make_prompt(ProbeConfig(), random.Random(1), 5) == prompt


@pytest.mark.parametrize(
    ("tokens", "words", "counted", "expected"),
    [(1000, 64, 64, 1000), (1000, 64, 128, 500), (1, 1, 4, 1), (10, 10, None, 10)],
)
def test_words_for(tokens: int, words: int, counted: int | None, expected: int) -> None:
    assert words_for(tokens, words, counted) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_lies_among_the_values(values: list[float], share: float) -> None:
    assert min(values) <= quantile(values, share) <= max(values)
    assert quantile(values, 0) == min(values)
    assert quantile(values, 1) == max(values)


def test_the_median_is_the_middle() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([4, 1, 2, 3], 0.5) == 2.5
