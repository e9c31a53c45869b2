"""What an engine refuses, and what it survives."""

import re
import threading
from typing import Any

import pytest
import torch

from engine.fake_endpoint import FakeEndpoint, FakeWire
from engine.rig import (
    LLAMA,
    generate,
    random_prompt,
    reference,
    running_engine,
    submit,
    tiny_model,
)
from kvcourier.core.params import HolderAddress, HoldIntent, PullIntent
from kvcourier.engine.api import (
    FinishReason,
    GenerationRequest,
    RequestRejected,
    SamplingParams,
    TokenEvent,
)
from kvcourier.engine.config import EngineConfig
from kvcourier.engine.engine import Engine
from kvcourier.engine.inbox import EngineStopped
from kvcourier.errors import ConfigError
from kvcourier.ids import BlockId, EngineId, RequestId, TransferId
from kvcourier.runtime.reports import Outcome

HOLD = HoldIntent(TransferId("t"))
HOLDER = HolderAddress(EngineId("p"), "localhost", 5600, 1, 1)


def pull_intent(block_ids: tuple[tuple[int, ...], ...], num_tokens: int | None) -> PullIntent:
    groups = tuple(tuple(map(BlockId, group)) for group in block_ids)
    return PullIntent(HOLDER, RequestId("p/a"), groups, num_tokens, None, None, None)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ((), {}, "at least 1 token"),
        ((1, 258), {}, "from 0 to 257, found 258"),
        ((1, -1), {}, "found -1"),
        ((1,) * 256, {}, "256 tokens and at least 1 .* context of 256 tokens"),
        ((1,) * 161, {}, "161 tokens need 11 blocks, .* has 10 blocks of 16"),
        ((1,), {"max_tokens": 0}, "max_tokens: expected at least 1, found 0"),
        ((1,), {"min_tokens": 9}, r"min_tokens: expected 0 to max_tokens \(8\), found 9"),
        ((1,), {"temperature": -0.5}, "temperature"),
        ((1,), {"temperature": float("nan")}, "temperature"),
        ((1,), {"top_p": 0.0}, "top_p"),
        ((1,), {"top_k": -2}, "top_k"),
        ((1,), {"temperature": 1.0, "seed": 2**64}, "seed"),
        ((1,), {"intent": HOLD}, "without KV transfer"),
    ],
)
def test_requests_that_can_never_be_served(
    prompt: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with running_engine(max_model_len=256, num_blocks=10) as engine:
        with pytest.raises(RequestRejected, match=message):
            submit(engine, "bad", prompt, **options)
        assert submit(engine, "bad", (1,)).finish().finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("intent", "message"),
    [
        (pull_intent(((0,), (1,)), None), "expected 1 list"),
        (pull_intent(((),), None), "at least 1 block"),
        (pull_intent(((0,),), 3), "at least the prompt's 5 tokens, found 3"),
    ],
)
def test_pull_intents_that_do_not_fit(intent: PullIntent, message: str) -> None:
    endpoint = FakeEndpoint(FakeWire())
    with (
        running_engine(endpoint=endpoint) as engine,
        pytest.raises(RequestRejected, match=message),
    ):
        submit(engine, "d/a", random_prompt(5), intent=intent)


def test_a_request_id_is_free_again_after_its_last_event() -> None:
    with running_engine() as engine:
        gate = threading.Event()
        original = engine._runner.run

        def wait_and_run(batch: Any) -> torch.Tensor:
            assert gate.wait(30)
            return original(batch)

        engine._runner.run = wait_and_run  # type: ignore[method-assign]
        first = submit(engine, "a", (1, 2))
        with pytest.raises(RequestRejected, match="'a' is in use"):
            submit(engine, "a", (1, 2))
        gate.set()
        first.finish()
        submit(engine, "a", (1, 2)).finish()


def test_an_answer_ends_where_the_context_or_the_cache_ends() -> None:
    with running_engine(max_model_len=20) as engine:
        assert len(generate(engine, [random_prompt(15)], max_tokens=100)[0]) == 5
    with running_engine(num_blocks=2) as engine:
        prompt = random_prompt(32)
        answer = generate(engine, [prompt], max_tokens=100)
        assert answer == [list(reference(LLAMA, prompt, 1))]
        assert len(generate(engine, [random_prompt(30)], max_tokens=100)[0]) == 3


def test_abort_frees_the_blocks() -> None:
    with running_engine() as engine:
        listener = submit(engine, "a", random_prompt(40), max_tokens=400)
        listener.next()
        engine.abort(RequestId("a"))
        engine.abort(RequestId("unknown"))
        assert listener.finish().finish_reason is FinishReason.ABORT
        assert 1 <= len(listener.tokens) < 400
        generate(engine, [(1,)])
        assert engine.stats()["kv_blocks_used"] == 0


def test_cached_tokens_are_reported() -> None:
    with running_engine() as engine:
        assert submit(engine, "a", random_prompt(40)).finish().num_cached_tokens == 0
        assert submit(engine, "b", random_prompt(40)).finish().num_cached_tokens == 32


def test_a_failing_step_fails_its_requests_and_nothing_else() -> None:
    with running_engine() as engine:
        original = engine._runner.run

        def fail_once(*_: Any) -> torch.Tensor:
            engine._runner.run = original  # type: ignore[method-assign]
            raise RuntimeError("out of memory")

        engine._runner.run = fail_once  # type: ignore[method-assign]
        last = submit(engine, "a", random_prompt(40)).finish()
        assert last.finish_reason is FinishReason.ERROR
        assert "out of memory" in last.error
        prompt = random_prompt(40)
        assert generate(engine, [prompt], max_tokens=8) == [list(reference(LLAMA, prompt, 8))]
        assert engine.stats()["kv_blocks_used"] == 0


def test_a_listener_that_fails_ends_its_request_only() -> None:
    with running_engine() as engine:
        ended = threading.Event()

        def listen(event: TokenEvent) -> None:
            if event.finish_reason is not None:
                assert event.finish_reason is FinishReason.ABORT
                ended.set()
            raise ValueError("broken listener")

        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        engine.submit(GenerationRequest(RequestId("a"), (1, 2), sampling, listen))
        assert ended.wait(30)
        generate(engine, [(1,)])
        assert engine.stats()["kv_blocks_used"] == 0


def test_a_dead_loop_is_seen_and_nobody_waits_for_ever() -> None:
    endpoint = FakeEndpoint(FakeWire())
    engine = Engine(tiny_model(), EngineConfig(num_blocks=8), endpoint)
    assert not engine.is_alive
    engine.start()
    listener = submit(engine, "a", (1,), max_tokens=100)
    listener.next()
    endpoint.failure = RuntimeError("the courier is gone")
    endpoint.report(RequestId("x"), Outcome.RELEASED)
    last = listener.finish()
    assert last.finish_reason is FinishReason.ERROR
    assert "the courier is gone" in last.error
    assert not engine.is_alive
    assert "the courier is gone" in str(engine.error)
    with pytest.raises(EngineStopped, match=re.escape("the courier is gone")):
        submit(engine, "b", (1,))
    engine.close()
    engine.close()
    assert endpoint.is_closed


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"block_size": 0}, "block_size: expected a whole number of at least 1, found 0"),
        ({"num_blocks": 1.5}, "num_blocks"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"cache_layout": "NDH"}, "expected NHD or HND, found 'NDH'"),
        ({"kv_load_failure_policy": "retry"}, "expected fail or recompute"),
        ({"kv_cache_gb": 0.0}, "kv_cache_gb: expected a number above 0"),
        ({"kv_cache_gb": 1e-9}, "the size of one block"),
        ({"max_model_len": 513}, "expected at most 512"),
        ({"tp_size": 3}, "divisor or a multiple of the model's 2 KV heads, found 3"),
        ({"pp_size": 3}, "pp_size: expected 1 to 2"),
    ],
)
def test_settings_that_cannot_be_used(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(tiny_model(), EngineConfig(**setting))
