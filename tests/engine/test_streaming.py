"""What the engine tells its endpoint while it computes a prompt for another instance."""

import pytest
import torch

from engine.rig import LLAMA, random_prompt, reference
from engine.test_prefill_decode_pair import Pair, pair
from kvcourier.engine.api import FinishReason
from kvcourier.runtime.step_clock import CudaClock

NUM_TOKENS = 8


def told(found: Pair, name: str) -> list[tuple[int, tuple[int, ...] | None]]:
    advances = found.prefill.endpoint.advances
    return [(count, layers) for request_id, count, layers in advances if request_id == f"p/{name}"]


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        ("request", []),
        ("chunk", [(32, None), (64, None), (96, None)]),
        ("layer", [(32, None), (64, None), (96, None), (100, (0,)), (100, (0, 1))]),
    ],
)
def test_granularity(granularity: str, expected: list[tuple[int, object]]) -> None:
    prompt = random_prompt(100)
    with pair(prefill={"granularity": granularity}) as found:
        assert found.push("a", prompt) == list(reference(LLAMA, prompt, NUM_TOKENS))
        assert told(found, "a") == expected
        found.assert_all_returned()


def test_layers_are_not_told_of_when_nobody_waits() -> None:
    prompt = random_prompt(40)
    with pair() as found:
        assert found.pull("a", prompt) == list(reference(LLAMA, prompt, NUM_TOKENS))
        assert told(found, "a") == [(32, None)]


def test_what_the_prefix_cache_holds_is_told_of_at_once() -> None:
    prompt = random_prompt(100)
    with pair() as found:
        found.push("a", prompt)
        found.push("b", prompt)
        assert told(found, "b")[0] == (96, None)
        found.assert_all_returned()


def test_a_preempted_prompt_is_rolled_back_and_told_of_anew() -> None:
    """O13: the pool is too small for both, so the younger one loses its blocks."""
    prompt = random_prompt(60)
    with pair(prefill={"num_blocks": 8, "max_batch_tokens": 64}) as found:
        older = found.start_prefill("old", random_prompt(40, seed=1), max_tokens=30)
        older.next()
        younger = found.start_prefill("young", prompt, max_tokens=30)
        assert older.finish().finish_reason is FinishReason.LENGTH
        found.wire.end_hold("old", None)
        assert younger.finish().finish_reason is FinishReason.LENGTH
        assert found.prefill.engine.stats()["preemptions"] > 0
        calls = [
            call for call, request_id in found.prefill.endpoint.calls if request_id == "p/young"
        ]
        assert "roll_back" in calls
        assert "advance_prefill" in calls[: calls.index("roll_back")]
        assert "advance_prefill" in calls[calls.index("roll_back") :]
        assert calls[-1] == "finish_prefill"
        found.wire.end_hold("young", None)
        found.assert_all_returned()


def test_an_abort_in_mid_stream_keeps_the_blocks_until_they_are_released() -> None:
    with pair() as found:
        found.wire.is_paused = True
        endpoint = found.prefill.endpoint
        listener = found.start_prefill("a", random_prompt(40), max_tokens=400)
        listener.next()
        found.prefill.engine.abort("p/a")
        assert listener.finish().finish_reason is FinishReason.ABORT
        stats = found.prefill.engine.stats()
        assert stats["kv_loans"] == 1
        assert stats["kv_blocks_used"] == len(endpoint.owned["p/a"]) > 0
        endpoint.release("p/a")
        found.assert_all_returned()


def test_on_cuda_everything_that_is_told_waits_for_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Event:
        def __init__(self) -> None:
            self.is_recorded = False

        def record(self) -> None:
            self.is_recorded = True

        def query(self) -> bool:
            return self.is_recorded

    monkeypatch.setattr(torch.cuda, "Event", Event)
    prompt = random_prompt(100)
    with pair() as found:
        streams = found.prefill.engine._kv.streams
        assert streams is not None
        streams._clock = CudaClock()
        assert found.push("a", prompt) == list(reference(LLAMA, prompt, NUM_TOKENS))
        assert len(found.prefill.endpoint.ready) == len(told(found, "a")) == 5
        assert all(ready() for ready in found.prefill.endpoint.ready)
