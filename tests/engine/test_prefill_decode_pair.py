"""A prefill and a decode engine joined by the fake endpoint give the tokens of one engine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from engine.fake_endpoint import FakeEndpoint, FakeWire
from engine.rig import (
    LLAMA,
    Listener,
    generate,
    random_prompt,
    reference,
    submit,
    tiny_model,
)
from kvcourier.core.params import HolderAddress, HoldIntent, PullIntent, PushIntent
from kvcourier.engine.api import FinishReason, RequestRejected
from kvcourier.engine.config import EngineConfig, make_cache
from kvcourier.engine.engine import Engine
from kvcourier.engine.inbox import EngineStopped
from kvcourier.ids import BlockId, EngineId, RequestId, TransferId
from kvcourier.runtime.reports import Outcome

NUM_TOKENS = 8
HOLDER = HolderAddress(EngineId("p"), "localhost", 5600, 1, 1)
LENGTHS = (1, 15, 16, 17, 32, 100)


@dataclass
class Side:
    engine: Engine
    endpoint: FakeEndpoint


@dataclass
class Pair:
    wire: FakeWire
    prefill: Side
    decode: Side

    def start_prefill(
        self, name: str, prompt: tuple[int, ...], max_tokens: int = 1, **sampling: Any
    ) -> Listener:
        intent = HoldIntent(TransferId(name))
        sampling = {"max_tokens": max_tokens} | sampling
        return submit(self.prefill.engine, f"p/{name}", prompt, intent=intent, **sampling)

    def start_push(self, name: str, prompt: tuple[int, ...], **sampling: Any) -> Listener:
        intent = PushIntent(HOLDER, None, TransferId(name))
        sampling = {"max_tokens": NUM_TOKENS} | sampling
        return submit(self.decode.engine, f"d/{name}", prompt, intent=intent, **sampling)

    def start_pull(
        self,
        name: str,
        prompt: tuple[int, ...],
        params: dict[str, Any],
        **sampling: Any,
    ) -> Listener:
        (blocks,) = params["remote_block_ids"]
        intent = PullIntent(
            holder=HOLDER,
            holder_request_id=RequestId(params["remote_request_id"]),
            block_ids=(tuple(map(BlockId, blocks)),),
            num_tokens=params["remote_num_tokens"],
            hold_id=None,
            incarnation=None,
            transfer_id=TransferId(name),
        )
        sampling = {"max_tokens": NUM_TOKENS} | sampling
        return submit(self.decode.engine, f"d/{name}", prompt, intent=intent, **sampling)

    def pull(self, name: str, prompt: tuple[int, ...]) -> list[int]:
        params = self.start_prefill(name, prompt).finish().kv_transfer_params
        assert params is not None
        listener = self.start_pull(name, prompt, params)
        assert listener.finish().finish_reason is FinishReason.LENGTH
        return listener.tokens

    def push(self, name: str, prompt: tuple[int, ...]) -> list[int]:
        listener = self.start_push(name, prompt)
        self.start_prefill(name, prompt)
        assert listener.finish().finish_reason is FinishReason.LENGTH
        return listener.tokens

    def settle(self) -> None:
        """Run one more request on each side: all reports before it have been taken then."""
        for side in (self.prefill, self.decode):
            generate(side.engine, [random_prompt(1)])

    def assert_all_returned(self) -> None:
        self.settle()
        for side in (self.prefill, self.decode):
            stats = side.engine.stats()
            assert stats["kv_blocks_used"] == stats["kv_loans"] == 0
            assert stats["running"] == stats["waiting"] == stats["waiting_remote"] == 0
            assert not side.endpoint.owned
            assert not side.engine._inbox.ids_in_use


@contextmanager
def pair(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> Iterator[Pair]:
    wire = FakeWire()
    sides = []
    with ExitStack() as stack:
        for overrides in (prefill, decode):
            settings: dict[str, Any] = {"block_size": 16, "num_blocks": 40, "max_batch_tokens": 32}
            config = EngineConfig(model=LLAMA, **settings | (overrides or {}))
            model = tiny_model()
            cache = make_cache(model, config)
            endpoint = FakeEndpoint(wire, cache.rank_caches())
            engine = Engine(model, config, endpoint, cache=cache)
            engine.start()
            stack.callback(engine.close)
            sides.append(Side(engine, endpoint))
        yield Pair(wire, *sides)
        for side in sides:
            assert side.engine.is_alive or side.endpoint.is_closed, side.engine.error
    assert all(side.endpoint.is_closed for side in sides)


def answer(prompt: tuple[int, ...]) -> list[int]:
    return list(reference(LLAMA, prompt, NUM_TOKENS))


def ways(joined: Pair) -> dict[str, Callable[[str, tuple[int, ...]], list[int]]]:
    return {"pull": joined.pull, "push": joined.push}


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_tokens_equal_one_engine(mode: str) -> None:
    expected = [answer(random_prompt(length)) for length in LENGTHS]
    with pair() as joined:
        run = ways(joined)[mode]
        assert [run(f"n{length}", random_prompt(length)) for length in LENGTHS] == expected
        assert joined.wire.num_moved_tokens == sum(LENGTHS) - 1  # one token is never fetched
        joined.assert_all_returned()
        assert joined.decode.engine.stats()["kv_received"] == len(LENGTHS) - 1
        assert joined.prefill.engine.stats()["kv_sent"] == len(LENGTHS)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"tp_size": 2}, {"tp_size": 1}),
        ({"tp_size": 1, "cache_layout": "HND"}, {"tp_size": 4}),
        ({"tp_size": 4, "pp_size": 2}, {"tp_size": 2, "cache_layout": "HND"}),
        ({"block_size": 32, "num_blocks": 20}, {"block_size": 8, "num_blocks": 80}),
    ],
)
def test_unequal_sides(mode: str, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    prompts = [random_prompt(length) for length in (17, 100)]
    expected = [answer(prompt) for prompt in prompts]
    with pair(prefill, decode) as joined:
        run = ways(joined)[mode]
        assert [run(f"{len(prompt)}", prompt) for prompt in prompts] == expected
        joined.assert_all_returned()


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    ("num_warm", "num_moved"), [(0, 100), (50, 100 - 48), (96, 100 - 96), (100, 100 - 96)]
)
def test_only_what_decode_lacks_is_moved(mode: str, num_warm: int, num_moved: int) -> None:
    prompt = random_prompt(100)
    expected = answer(prompt)
    with pair() as joined:
        if num_warm:
            generate(joined.decode.engine, [prompt[:num_warm]], max_tokens=1)
        assert ways(joined)[mode]("a", prompt) == expected
        assert joined.wire.num_moved_tokens == num_moved
        joined.assert_all_returned()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_full_prefix_hit_is_declined(mode: str) -> None:
    prompt = random_prompt(97)  # six blocks and the one token that is always computed
    expected = answer(prompt)
    with pair() as joined:
        generate(joined.decode.engine, [prompt], max_tokens=1)
        assert ways(joined)[mode]("a", prompt) == expected
        assert ("decline", "d/a") in joined.decode.endpoint.calls
        assert joined.wire.num_moved_tokens == 0
        joined.assert_all_returned()


def test_recompute_threshold() -> None:
    with pair(decode={"kv_recompute_threshold": 20}) as joined:
        assert joined.pull("short", random_prompt(20)) == answer(random_prompt(20))
        assert joined.wire.num_moved_tokens == 0
        assert joined.pull("long", random_prompt(21, seed=1)) == answer(random_prompt(21, seed=1))
        assert joined.wire.num_moved_tokens == 21
        joined.assert_all_returned()


def test_received_blocks_serve_as_prefix() -> None:
    prompt = random_prompt(80)
    with pair() as joined:
        joined.pull("a", prompt)
        listener = submit(joined.decode.engine, "local", prompt, max_tokens=NUM_TOKENS)
        assert listener.finish().num_cached_tokens == 64
        assert listener.tokens == answer(prompt)


def test_push_takes_blocks_before_older_prefills_are_computed() -> None:
    with pair(decode={"max_batch_tokens": 1, "max_num_seqs": 1}) as joined:
        busy = submit(joined.decode.engine, "busy", random_prompt(200), max_tokens=1)
        listener = joined.start_push("a", random_prompt(50))
        joined.decode.endpoint.wait_for("receive", "d/a")
        assert busy.is_quiet  # 200 steps are not over
        joined.start_prefill("a", random_prompt(50))
        assert listener.finish().finish_reason is FinishReason.LENGTH
        assert listener.tokens == answer(random_prompt(50))


def test_prefill_that_also_decodes_hands_over_its_prompt_at_the_end() -> None:
    prompt = random_prompt(30)
    with pair() as joined:
        listener = joined.start_prefill("a", prompt, max_tokens=5)
        last = listener.finish()
        assert listener.tokens == answer(prompt)[:5]
        assert last.kv_transfer_params is not None
        assert last.kv_transfer_params["remote_num_tokens"] == 30
        tokens = joined.start_pull("a", prompt, last.kv_transfer_params)
        tokens.finish()
        assert tokens.tokens == answer(prompt)
        joined.assert_all_returned()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_many_at_once_with_few_blocks(mode: str) -> None:
    prompts = {f"r{i}": random_prompt(20 + 9 * i, seed=i) for i in range(12)}
    expected = {name: answer(prompt) for name, prompt in prompts.items()}
    with pair({"num_blocks": 12}, {"num_blocks": 12}) as joined:
        if mode == "push":
            wanted = {name: joined.start_push(name, prompt) for name, prompt in prompts.items()}
            for name, prompt in prompts.items():
                joined.start_prefill(name, prompt)
        else:
            held = [(name, joined.start_prefill(name, prompt)) for name, prompt in prompts.items()]
            wanted = {}
            for name, listener in held:
                params = listener.finish().kv_transfer_params
                assert params is not None
                wanted[name] = joined.start_pull(name, prompts[name], params)
        for listener in wanted.values():
            assert listener.finish().finish_reason is FinishReason.LENGTH
        assert {name: listener.tokens for name, listener in wanted.items()} == expected
        joined.assert_all_returned()


def test_failed_receive_fails_the_request_at_once_and_keeps_the_blocks() -> None:
    with pair() as joined:
        joined.wire.is_paused = True
        listener = joined.start_push("a", random_prompt(50))
        joined.decode.endpoint.wait_for("receive", "d/a")
        joined.wire.fail("a", "the peer is gone", release=False)
        last = listener.finish()
        assert last.finish_reason is FinishReason.ERROR
        assert "the peer is gone" in last.error
        stats = joined.decode.engine.stats()
        assert (stats["kv_blocks_used"], stats["kv_loans"]) == (4, 1)
        with pytest.raises(RequestRejected, match="in use"):
            submit(joined.decode.engine, "d/a", random_prompt(5))
        joined.decode.endpoint.release(RequestId("d/a"))
        joined.assert_all_returned()


def test_failed_receive_is_recomputed_in_other_blocks() -> None:
    prompt = random_prompt(50)
    expected = answer(prompt)
    with pair(decode={"kv_load_failure_policy": "recompute"}) as joined:
        joined.wire.is_paused = True
        listener = joined.start_push("a", prompt)
        joined.decode.endpoint.wait_for("receive", "d/a")
        joined.wire.fail("a", "the peer is gone", release=False)
        # Whatever a late write does to the lent blocks must not matter.
        lent = joined.decode.endpoint.owned[RequestId("d/a")]
        for views in joined.decode.endpoint.memory._views.values():
            for view in views:
                view[lent] = 0x7F
        assert listener.finish().finish_reason is FinishReason.LENGTH
        assert listener.tokens == expected
        joined.decode.endpoint.release(RequestId("d/a"))
        joined.assert_all_returned()


def test_abort_while_waiting_for_blocks_and_while_receiving() -> None:
    with pair(decode={"num_blocks": 10}) as joined:
        joined.wire.is_paused = True
        first = joined.start_push("first", random_prompt(100))
        joined.decode.endpoint.wait_for("receive", "d/first")
        second = joined.start_push("second", random_prompt(90, seed=1))  # 6 of 3 free blocks
        joined.decode.engine.abort(RequestId("d/second"))
        assert second.finish().finish_reason is FinishReason.ABORT
        assert ("receive", "d/second") not in joined.decode.endpoint.calls
        joined.decode.engine.abort(RequestId("d/first"))
        assert first.finish().finish_reason is FinishReason.ABORT
        assert joined.decode.engine.stats()["kv_blocks_used"] == 7  # may still be written to
        joined.decode.endpoint.release(RequestId("d/first"))
        joined.assert_all_returned()


def test_abort_while_decoding_what_was_received() -> None:
    with pair() as joined:
        params = joined.start_prefill("a", random_prompt(40)).finish().kv_transfer_params
        assert params is not None
        listener = joined.start_pull("a", random_prompt(40), params, max_tokens=400)
        listener.next()
        joined.decode.engine.abort(RequestId("d/a"))
        assert listener.finish().finish_reason is FinishReason.ABORT
        assert ("abort", "d/a") not in joined.decode.endpoint.calls  # it was done with it
        joined.assert_all_returned()


def test_abort_of_a_prefill_before_it_is_handed_over_frees_all() -> None:
    with pair(prefill={"max_batch_tokens": 1}) as joined:
        wanted = joined.start_push("a", random_prompt(150))
        joined.decode.endpoint.wait_for("receive", "d/a")
        held = joined.start_prefill("a", random_prompt(150))
        joined.prefill.engine.abort(RequestId("p/a"))
        assert held.finish().finish_reason is FinishReason.ABORT
        assert wanted.finish().finish_reason is FinishReason.ERROR
        joined.assert_all_returned()
        assert ("finish_prefill", "p/a") not in joined.prefill.endpoint.calls


def test_abort_after_the_hand_over_does_not_take_the_blocks_back() -> None:
    prompt = random_prompt(40)
    with pair() as joined:
        params = joined.start_prefill("a", prompt).finish().kv_transfer_params
        assert params is not None
        joined.prefill.engine.abort(RequestId("p/a"))
        joined.settle()
        assert joined.prefill.engine.stats()["kv_loans"] == 1
        listener = joined.start_pull("a", prompt, params)
        listener.finish()
        assert listener.tokens == answer(prompt)
        joined.assert_all_returned()


def test_close_ends_every_request() -> None:
    with pair() as joined:
        joined.wire.is_paused = True
        receiving = joined.start_push("a", random_prompt(50))
        joined.decode.endpoint.wait_for("receive", "d/a")
        joined.decode.engine.close()
        assert receiving.finish().finish_reason is FinishReason.ABORT
        assert ("abort", "d/a") in joined.decode.endpoint.calls
        with pytest.raises(EngineStopped):
            joined.start_push("b", random_prompt(50))


def test_a_refused_request_lets_its_holder_go() -> None:
    with pair(decode={"max_model_len": 40}) as joined:
        joined.start_prefill("a", random_prompt(50)).finish()
        with pytest.raises(RequestRejected, match="context of 40 tokens"):
            joined.start_push("a", random_prompt(50))
        assert joined.decode.endpoint.calls == [("expect", "d/a"), ("abort", "d/a")]
        joined.assert_all_returned()


def test_an_endpoint_that_refuses_to_receive_fails_one_request_only() -> None:
    with pair() as joined:
        joined.decode.endpoint.failure = RuntimeError("out of order")
        last = joined.start_push("a", random_prompt(50)).finish()
        joined.decode.endpoint.failure = None
        assert last.finish_reason is FinishReason.ERROR
        assert "out of order" in last.error
        assert joined.push("b", random_prompt(50)) == answer(random_prompt(50))
        joined.assert_all_returned()


def test_reports_about_unknown_requests_are_counted_and_ignored() -> None:
    with pair() as joined:
        for outcome in (Outcome.RECEIVED, Outcome.RECEIVE_FAILED, Outcome.RELEASED):
            joined.decode.endpoint.report(RequestId("d/unknown"), outcome)
        joined.settle()
        assert joined.decode.engine.stats()["ignored_reports"] == 3
