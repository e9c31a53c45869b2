"""Conversations of several turns on real vLLM: P fetches from D what D has of the turns before."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvcourier.router.app import create_app
from kvcourier.router.config import RouterConfig, parse_instance_spec

from .models import write_qwen3
from .servers import (
    ANSWER_S,
    Vllm,
    needs_vllm,
    request_body,
    routers,
    served,
    spec_of,
    started,
    tokens,
    wait_until,
)

NUM_NEW, NUM_ANSWER, NUM_TURNS = 90, 20, 4
MODES = ("pull", "push")
EXTRA = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 60}
VLLMS_KEYS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
)

pytestmark = [*needs_vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_qwen3(folder / "model")
    servers = (
        # What P has computed itself it would not fetch, and much of a history it has.
        Vllm("p", "kv_both", model, folder, "--no-enable-prefix-caching", extra=EXTRA),
        Vllm("d", "kv_consumer", model, folder, extra=EXTRA),
    )
    with started(*servers):
        yield servers


def new_tokens(name: str, length: int = NUM_NEW) -> list[int]:
    start = sum(name.encode())
    return [(start * 31 + 17 * at * at + 7 * at) % 500 + 5 for at in range(length)]


def ask(url: str, prompt: list[int], name: str, mode: str) -> dict[str, Any]:
    body = request_body(prompt) | {"max_tokens": NUM_ANSWER}
    headers = {"X-Conversation-Id": name, "X-KV-Mode": mode}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask_streaming(url: str, prompt: list[int], name: str, mode: str) -> list[int]:
    """The tokens of an answer that comes in chunks, none of which tells of the KV."""
    body = request_body(prompt) | {"max_tokens": NUM_ANSWER, "stream": True}
    headers = {"X-Conversation-Id": name, "X-KV-Mode": mode}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    *events, done = (line.removeprefix("data: ") for line in answer.text.splitlines() if line)
    assert done == "[DONE]" and "kv_transfer_params" not in answer.text
    chunks = [choice for event in events for choice in json.loads(event)["choices"]]
    return [token for choice in chunks for token in choice.get("token_ids") or ()]


def count(server: Vllm, name: str) -> float:
    return server.metric(f"kvcourier:{name}_total")


@pytest.mark.parametrize("mode", MODES)
def test_the_history_is_fetched_and_the_tokens_are_right(
    pair: tuple[Vllm, Vllm], mode: str
) -> None:
    prefill, decode = pair
    before = count(prefill, "histories_fetched"), count(decode, "histories_collected")
    computed = prefill.metric("vllm:prompt_tokens_by_source_total")
    said: list[int] = []
    with served(routers(pair)[f"kvcourier route, {mode}"]) as url:
        for turn in range(NUM_TURNS):
            prompt = [*said, *new_tokens(f"{mode}-{turn}")]
            answer = ask(url, prompt, f"talk-{mode}", mode)
            assert "kv_transfer_params" not in answer
            found = answer["choices"][0]["token_ids"]
            assert found == tokens(decode.url, prompt, num_tokens=NUM_ANSWER), f"turn {turn}"
            said = [*prompt, *found]
    wait_until(lambda: count(prefill, "histories_fetched") == before[0] + NUM_TURNS - 1, 30)
    wait_until(lambda: count(decode, "histories_collected") == before[1] + NUM_TURNS - 1, 30)
    assert count(decode, "histories_kept") >= NUM_TURNS
    for server in pair:
        assert server.metric("vllm:nixl_num_failed_transfers_total") == 0
        assert server.process.poll() is None
    assert computed >= 0


@pytest.mark.parametrize("mode", MODES)
def test_a_streamed_turn_is_fetched_as_well(pair: tuple[Vllm, Vllm], mode: str) -> None:
    prefill, decode = pair
    before = count(prefill, "histories_fetched"), count(decode, "histories_collected")
    config = RouterConfig(
        prefill=(parse_instance_spec(spec_of(prefill)),),
        decode=(parse_instance_spec(spec_of(decode)),),
    )
    said: list[int] = []
    app = create_app(config)

    def states_told() -> float:
        registry = app.state.services.metrics.registry
        named = {"outcome": "told"}
        return registry.get_sample_value("kvcourier_router_states_asked_total", named) or 0.0

    with served(app) as url:
        for turn in range(NUM_TURNS):
            prompt = [*said, *new_tokens(f"streamed-{mode}-{turn}")]
            found = ask_streaming(url, prompt, f"streamed-{mode}", mode)
            assert found == tokens(decode.url, prompt, num_tokens=NUM_ANSWER), f"turn {turn}"
            # The client does not wait for this, and loses nothing but time by being early.
            wait_until(lambda turn=turn: states_told() == turn + 1, 30)
            said = [*prompt, *found]
    wait_until(lambda: count(prefill, "histories_fetched") == before[0] + NUM_TURNS - 1, 30)
    wait_until(lambda: count(decode, "histories_collected") == before[1] + NUM_TURNS - 1, 30)
    for server in pair:
        assert server.metric("vllm:nixl_num_failed_transfers_total") == 0
        assert server.process.poll() is None


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_to_be_had_is_computed(pair: tuple[Vllm, Vllm], mode: str) -> None:
    """A state is used twice, one is told in vLLM's own keys only, one is of other words."""
    prefill, decode = pair
    first = new_tokens(f"first-{mode}")
    state = turn_by_hand(pair, first, None, mode)
    said = [*first, *tokens(decode.url, first, num_tokens=NUM_ANSWER)]
    prompt = [*said, *new_tokens("second")]
    expected = tokens(decode.url, prompt, num_tokens=1)
    fetched = count(prefill, "histories_fetched")
    missed = {
        reason: count(prefill, f"history_misses_{reason}")
        for reason in ("not_held", "unproven", "rewritten")
    }
    assert prefill_leg(prefill, prompt, state, mode) == expected
    wait_until(lambda: count(prefill, "histories_fetched") == fetched + 1, 30)
    assert prefill_leg(prefill, prompt, state, mode) == expected
    own = {key: state[key] for key in VLLMS_KEYS}
    assert prefill_leg(prefill, prompt, own, mode) == expected
    other = [first[0] + 1, *prompt[1:]]
    assert prefill_leg(prefill, other, state, mode) == tokens(decode.url, other, num_tokens=1)
    for reason, before in missed.items():
        name = f"history_misses_{reason}"
        wait_until(lambda name=name, before=before: count(prefill, name) == before + 1, 30)
    assert count(prefill, "histories_fetched") == fetched + 1


def turn_by_hand(
    pair: tuple[Vllm, Vllm], prompt: list[int], state: dict[str, Any] | None, mode: str
) -> dict[str, Any]:
    """A pull through both, without a router; D's state."""
    prefill, decode = pair
    hold = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": uuid.uuid4().hex}
    body = request_body(prompt) | {"max_tokens": 1, "kv_transfer_params": {**(state or {}), **hold}}
    answer = httpx.post(f"{prefill.url}/v1/completions", json=body, timeout=ANSWER_S).json()
    params = answer["kv_transfer_params"]
    body = request_body(prompt) | {"max_tokens": NUM_ANSWER, "kv_transfer_params": params}
    answer = httpx.post(f"{decode.url}/v1/completions", json=body, timeout=ANSWER_S).json()
    told: dict[str, Any] = answer["kv_transfer_params"]
    assert told["do_remote_decode"] is True and told["do_remote_prefill"] is False
    return told


def prefill_leg(server: Vllm, prompt: list[int], state: dict[str, Any], mode: str) -> list[int]:
    """P's token for a prompt that comes with this state."""
    params = {**state, "transfer_id": uuid.uuid4().hex, "transfer_mode": mode}
    body = request_body(prompt) | {"max_tokens": 1, "kv_transfer_params": params}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found
