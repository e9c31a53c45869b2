"""One streamed completion: what is gathered, and each way in which it can fail."""

import json

import httpx
import pytest

from completion_streams import chunk, client_of, stream
from kvcourier.demo.client import RequestFailed, complete


def test_tokens_text_and_times_are_gathered() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        usage = {"choices": [], "usage": {"prompt_tokens": 9}}
        return stream(chunk("", 5), chunk("Hello", 6, 7), chunk(""), usage)

    pieces: list[str] = []
    found = complete(
        client_of(answer),
        "http://r",
        {"prompt": "Say"},
        headers={"X-KV-Mode": "push"},
        on_text=pieces.append,
    )
    assert (found.token_ids, found.text, pieces) == ((5, 6, 7), "Hello", ["Hello"])
    assert found.headers["X-KV-Transfer-Id"] == "t-1"
    assert found.num_prompt_tokens == 9
    assert 0 < found.ttft_s <= found.total_s
    assert found.tpot_s == (found.total_s - found.ttft_s) / 2
    assert seen[0].headers["X-KV-Mode"] == "push"
    assert seen[0].url.path == "/v1/completions"
    assert json.loads(seen[0].content) == {"prompt": "Say", "stream": True}


def test_a_server_that_tells_only_text() -> None:
    events = [{"choices": [{"index": 0, "text": text}]} for text in ("", "a", "b")]
    found = complete(client_of(lambda request: stream(*events)), "http://r", {})
    assert (found.text, found.token_ids, found.num_prompt_tokens) == ("ab", (), None)


@pytest.mark.parametrize(
    ("response", "sentence"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "HTTP 400: too long"),
        (httpx.Response(400, json={"error": "too long"}), "HTTP 400: too long"),
        (httpx.Response(502, text="bad gateway"), "HTTP 502: bad gateway"),
        (httpx.Response(503), r"HTTP 503: \(no body\)"),
        (stream(chunk("a", 1), {"error": {"message": "KV did not come"}}), "KV did not come"),
        (stream(chunk("a", 1), done=False), r"ended before \[DONE\]"),
        (stream(), "without a token"),
        (stream(chunk("")), "without a token"),
        (stream("{"), "no JSON object"),
        (stream("[]"), "no JSON object"),
    ],
)
def test_a_failed_request_says_why(response: httpx.Response, sentence: str) -> None:
    with pytest.raises(RequestFailed, match=sentence):
        complete(client_of(lambda request: response), "http://r", {})


def test_a_broken_connection_is_a_failed_request() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(RequestFailed, match="ConnectError: refused"):
        complete(client_of(refuse), "http://r", {})
