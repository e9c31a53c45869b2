"""What is asked of targets, and which answers to requests count, over a transport in memory."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from kvcourier.bench.client import make_ask, send
from kvcourier.bench.load import run_load
from kvcourier.bench.plan import Way
from kvcourier.bench.samples import Answered, CacheCounts, Collected, Failed, Outcome, Turn
from kvcourier.bench.target import (
    Endpoint,
    Target,
    TargetFailed,
    look,
    parse_endpoint,
    read_cache_counts,
    read_counts,
    read_samples,
)
from kvcourier.errors import ConfigError

ROUTER, P, D = "http://router:1", "http://p:1", "http://d:1"


def instance(url: str, **changed: Any) -> dict[str, Any]:
    known = {"url": url, "reachable": True, "incarnation": f"life of {url}"}
    return known | {"modes": ["pull", "push"]} | changed


def router(**changed: Any) -> dict[str, Any]:
    """Pages of a router and its instances."""
    table = {"prefill": [instance(P)], "decode": [instance(D)]} | changed
    models = {"data": [{"id": "m"}]}
    return {
        f"{ROUTER}/kvcourier/instances": table,
        **{f"{url}/v1/models": models for url in (ROUTER, P, D)},
    }


def client_of(pages: Mapping[str, Any]) -> httpx.AsyncClient:
    def answer(request: httpx.Request) -> httpx.Response:
        found = pages.get(str(request.url))
        if found is None:
            return httpx.Response(404)
        if isinstance(found, Exception):
            raise found
        return httpx.Response(200, text=found if isinstance(found, str) else json.dumps(found))

    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


def looked(pages: Mapping[str, Any], url: str, way: Way, model: str | None = None) -> Target:
    return asyncio.run(look(client_of(pages), url, way, model))


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("http://h:1", Endpoint("http://h:1", None)),
        ("http://h:1/#push", Endpoint("http://h:1", Way.PUSH)),
        ("https://[::1]:8#single", Endpoint("https://[::1]:8", Way.SINGLE)),
    ],
)
def test_an_endpoint_is_an_address_with_a_mode(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text, "A") == endpoint


@pytest.mark.parametrize(
    "text", ["h:1", "ftp://h:1", "http://", "http://h:x", "http://h:1/v1", "http://h:1#shove"]
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="A: expected"):
        parse_endpoint(text, "A")


@pytest.mark.parametrize("way", [Way.PULL, Way.PUSH, Way.DEFAULT])
def test_a_router_is_asked_for_its_instances(way: Way) -> None:
    target = looked(router(), ROUTER, way)
    assert (target.url, target.model) == (ROUTER, "m")
    assert (target.prefill_urls, target.decode_urls) == ((P,), (D,))
    assert target.processes == {f"life of {P}", f"life of {D}"}


def test_single_is_the_decode_instance_of_a_router_and_else_the_server_itself() -> None:
    through = looked(router(), ROUTER, Way.SINGLE)
    assert (through.url, through.prefill_urls) == (D, ())
    alone = looked(router(), D, Way.SINGLE)
    assert (alone.url, alone.prefill_urls) == (D, ())


def test_a_target_without_the_mode_is_refused_with_what_it_offers() -> None:
    pages = router(decode=[instance(D, modes=["pull"])])
    with pytest.raises(ConfigError, match=r"mode push is not offered by any decode .* offer pull"):
        looked(pages, ROUTER, Way.PUSH)
    assert looked(pages, ROUTER, Way.PULL).way is Way.PULL
    # An engine that is not ours does not tell.
    unknown = router(decode=[instance(D, modes=None)], prefill=[instance(P, modes=None)])
    assert looked(unknown, ROUTER, Way.PUSH).way is Way.PUSH


def test_what_is_no_router_has_no_modes() -> None:
    with pytest.raises(ConfigError, match="expected a kvcourier router for mode push"):
        looked(router(), D, Way.PUSH)


def test_nobody_there_and_no_such_model_are_sentences() -> None:
    nobody = {f"{ROUTER}/kvcourier/instances": httpx.ConnectError("refused")}
    with pytest.raises(TargetFailed, match=f"Nothing answers at {ROUTER}"):
        looked(nobody, ROUTER, Way.PULL)
    with pytest.raises(ConfigError, match="does not serve 'other'; it serves m"):
        looked(router(), ROUTER, Way.PULL, "other")
    with pytest.raises(TargetFailed, match="no list of models"):
        looked({f"{D}/v1/models": {"x": 1}}, D, Way.DEFAULT)


def test_a_router_that_never_reaches_an_instance_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcourier.bench.target._KNOWN_TIMEOUT_S", 0.0)
    pages = router(prefill=[instance(P, reachable=False, problem="cannot be reached")])
    with pytest.raises(TargetFailed, match=f"does not reach {P} \\(cannot be reached\\)"):
        looked(pages, ROUTER, Way.PULL)


def test_counters_of_ours_and_of_vllm_are_read() -> None:
    ours = (
        "# TYPE kvcourier:prefix_cache_hits_total counter\n"
        'kvcourier:prefix_cache_queries_total{model_name="m"} 100.0\n'
        'kvcourier:prefix_cache_hits_total{model_name="m"} 25.0\n'
    )
    vllm = (
        'vllm:prefix_cache_queries_total{engine="0"} 4e2\n'
        'vllm:prefix_cache_queries_total{engine="1"} 100\n'
        'vllm:prefix_cache_hits_total{engine="0"} 0.0\n'
    )
    assert read_counts(ours) == CacheCounts(100, 25)
    assert read_counts(vllm) == CacheCounts(500, 0)
    assert read_counts("up 1\n") is None
    pages = router() | {f"{P}/metrics": ours}

    async def counts() -> Mapping[str, CacheCounts]:
        client = client_of(pages)
        return await read_cache_counts(client, await look(client, ROUTER, Way.PUSH))

    assert asyncio.run(counts()) == {"P": CacheCounts(100, 25)}


def test_hit_rates_are_of_all_turns_and_survive_a_restart() -> None:
    counts = [CacheCounts(100, 10), CacheCounts(100, 30)]
    collected = Collected([Turn((), (), {"P": each}) for each in counts])
    assert collected.hit_rates == {"P": 0.2}
    assert CacheCounts(5, 1).since(CacheCounts(100, 10)) == CacheCounts(0, 0)
    assert CacheCounts(150, 30).since(CacheCounts(100, 10)) == CacheCounts(50, 20)


def test_stories_are_asked_of_both_sides() -> None:
    answer = Answered(1000.0, 0.0, (0.4, 0.5), "t-1")
    pages = router() | {
        f"{P}/kvcourier/story/t-1": [{"what": "prefill_finished", "at_unix_s": 1000.3}],
        f"{D}/kvcourier/story/t-1": [{"what": "received", "at_unix_s": 1000.35}],
    }

    async def samples() -> list[Any]:
        client = client_of(pages)
        target = await look(client, ROUTER, Way.PUSH)
        unknown = Answered(1000.0, 0.0, (0.4,), "t-2")
        return list(await read_samples(client, target, [answer, unknown]))

    told, untold = asyncio.run(samples())
    assert told.after_prefill_ms == pytest.approx(100)
    assert untold.timeline is None


# Requests.


def events(*contents: Any) -> str:
    made = [each if isinstance(each, str) else json.dumps(each) for each in contents]
    return "".join(f"data: {each}\n\n" for each in made)


def token(*ids: int, text: str = "") -> dict[str, Any]:
    return {"choices": [{"text": text, "token_ids": list(ids)}]}


def sent(handler: Callable[[httpx.Request], httpx.Response], num_tokens: int = 3) -> Outcome:
    async def go() -> Outcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
            ask = make_ask(ROUTER, Way.PUSH, "m", [16, 17], num_tokens)
            return await send(client, ask, timeout_s=5)

    return asyncio.run(go())


def test_a_request_names_its_mode_and_its_answer_its_transfer() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        usage = {"choices": [], "usage": {"completion_tokens": 3}}
        text = events(token(1), token(2, 3), usage, "[DONE]")
        return httpx.Response(200, text=text, headers={"X-KV-Transfer-Id": "t-1"})

    outcome = sent(answer)
    assert isinstance(outcome, Answered)
    assert (len(outcome.token_s), outcome.transfer_id) == (3, "t-1")
    assert list(outcome.token_s) == sorted(outcome.token_s)
    assert seen[0].headers["X-KV-Mode"] == "push"
    body = json.loads(seen[0].content)
    assert (body["prompt"], body["max_tokens"], body["stream"]) == ([16, 17], 3, True)


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (503, json.dumps({"error": {"message": "KV did not come"}}), "HTTP 503: KV did not come"),
        (500, "", r"HTTP 500: \(no body\)"),
        (200, events(token(1), "[DONE]"), "expected 3 tokens, found 1"),
        (200, events("[DONE]"), "expected 3 tokens, found 0"),
        (200, events(token(1), token(2), token(3)), r"ended before \[DONE\]"),
        (200, events(token(1), {"error": {"message": "lost"}}), "lost"),
        (200, events("{"), "no JSON object"),
        (200, events({"choices": [7]}, "[DONE]"), "found 0"),
    ],
)
def test_anything_less_than_all_tokens_is_a_failure(status: int, text: str, reason: str) -> None:
    outcome = sent(lambda request: httpx.Response(status, text=text))
    assert isinstance(outcome, Failed)
    assert re.search(reason, outcome.reason)


def test_a_broken_connection_is_a_failure() -> None:
    def breaks(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset")

    assert sent(breaks) == Failed("ReadError: reset")


def test_a_load_keeps_the_order_of_its_requests_and_tells_each() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        count = json.loads(request.content)["max_tokens"]
        if count == 2:
            return httpx.Response(500)
        return httpx.Response(200, text=events(*[token(1)] * count, "[DONE]"))

    told: list[Outcome] = []

    async def go() -> list[Outcome]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            asks = [make_ask(ROUTER, Way.DEFAULT, "m", [16], count) for count in (3, 2, 1)]
            # The last is due first.
            return await run_load(client, asks, (0.02, 0.01, 0.0), 5, told.append)

    outcomes = asyncio.run(go())
    lengths = [len(each.token_s) if isinstance(each, Answered) else None for each in outcomes]
    assert lengths == [3, None, 1]
    assert sorted(map(id, told)) == sorted(map(id, outcomes))
    assert all(each.lag_s >= 0 for each in outcomes if isinstance(each, Answered))
