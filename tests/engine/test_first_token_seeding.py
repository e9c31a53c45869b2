"""D goes on from the token that P has sampled, where it would have sampled the same."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.rig import LLAMA, generate, random_prompt, running_engine
from engine.test_prefill_decode_pair import Pair, answer, pair
from kvcourier.engine.api import FinishReason, SamplingParams
from kvcourier.engine.first_token import pack_first_token, unpack_first_token
from kvcourier.engine.sampler import TokenSampler

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 1234}
OFF = {"first_token_seeding": False}
EOS = frozenset({3})
VOCAB = 100

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_p=st.sampled_from([0.9, 1.0]),
    top_k=st.sampled_from([0, 5]),
    seed=st.sampled_from([None, 1, 2]),
    stop_token_ids=st.frozensets(st.integers(0, 3), max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 2),
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)


@given(token=st.integers(0, VOCAB - 1), prompt=prompts, sampling=params)
def test_a_packed_token_is_unpacked_by_an_equal_request(
    token: int, prompt: list[int], sampling: SamplingParams
) -> None:
    text = pack_first_token(token, prompt, TokenSampler(sampling, EOS))
    assert len(text) <= 64 and text.isprintable()
    assert unpack_first_token(text, prompt, TokenSampler(sampling, EOS), VOCAB) == token
    assert unpack_first_token(text, prompt, TokenSampler(sampling, EOS), token) is None
    assert unpack_first_token(text, [*prompt, 0], TokenSampler(sampling, EOS), VOCAB) is None


@given(prompt=prompts, ours=params, theirs=params)
def test_it_is_taken_only_if_it_would_have_been_picked_alike(
    prompt: list[int], ours: SamplingParams, theirs: SamplingParams
) -> None:
    samplers = [TokenSampler(each, EOS) for each in (ours, theirs)]
    forbidden = [sampler.forbidden_token_ids for sampler in samplers]
    drawn = [(each.temperature, each.top_p, each.top_k, each.seed) for each in (ours, theirs)]
    alike = forbidden[0] == forbidden[1] and (
        drawn[0] == drawn[1] or ours.temperature == theirs.temperature == 0
    )
    text = pack_first_token(7, prompt, samplers[0])
    assert (unpack_first_token(text, prompt, samplers[1], VOCAB) == 7) == alike


@given(st.text(max_size=60) | st.from_regex(r"[0-9]{1,12}:[0-9a-f]{30,34}", fullmatch=True))
def test_what_a_peer_makes_up_is_not_taken(text: str) -> None:
    greedy = TokenSampler(SamplingParams(max_tokens=1), EOS)
    assert unpack_first_token(text, [1, 2], greedy, VOCAB) is None


def ask(
    joined: Pair,
    mode: str,
    name: str,
    prompt: tuple[int, ...],
    on_prefill: dict[str, Any] | None = None,
    **sampling: Any,
) -> tuple[list[int], FinishReason | None]:
    """Tokens and end of an answer by both instances; P's leg may be sampled in another way."""
    ours = sampling | {"max_tokens": 1, "min_tokens": 0} | (on_prefill or {})
    if mode == "push":
        listener = joined.start_push(name, prompt, **sampling)
        joined.start_prefill(name, prompt, **ours)
    else:
        told = joined.start_prefill(name, prompt, **ours).finish().kv_transfer_params
        assert told is not None
        listener = joined.start_pull(name, prompt, told, **sampling)
    last = listener.finish()
    return listener.tokens, last.finish_reason


def seeded(joined: Pair) -> float:
    return joined.decode.engine.stats()["first_tokens_seeded"]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sides", [(None, None), (OFF, None), (None, OFF)], ids=str)
def test_tokens_equal_one_engine(
    mode: str, sampling: dict[str, Any], sides: tuple[dict[str, Any] | None, ...]
) -> None:
    lengths = (2, 15, 16, 17, 48, 70)
    with running_engine(LLAMA) as single:
        sampling = {"max_tokens": 8} | sampling
        wanted = [random_prompt(length) for length in lengths]
        expected = generate(single, wanted, **sampling)
    with pair(*sides) as joined:
        for prompt, tokens in zip(wanted, expected, strict=True):
            assert ask(joined, mode, str(len(prompt)), prompt, **sampling)[0] == tokens
        stats = joined.decode.engine.stats()
        is_on = sides == (None, None)
        assert stats["first_tokens_seeded"] == (len(lengths) if is_on else 0)
        assert stats["prompt_tokens"] == (0 if is_on else len(lengths))
        assert stats["generated_tokens"] == 8 * len(lengths)
        joined.assert_all_returned()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_an_answer_of_one_token_needs_no_step(mode: str) -> None:
    prompt = random_prompt(40)
    first = answer(prompt)[0]
    with pair() as joined:
        found = ask(joined, mode, "a", prompt, max_tokens=1)
        assert found == ([first], FinishReason.LENGTH)
        stop = frozenset({first})
        found = ask(joined, mode, "b", random_prompt(40), max_tokens=8, stop_token_ids=stop)
        assert found == ([first], FinishReason.STOP)
        assert joined.decode.engine.stats()["steps"] == 0
        joined.assert_all_returned()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_token_that_may_not_come_first_here_is_not_taken(mode: str) -> None:
    """Routers leave `min_tokens` out of P's leg, so P may sample what ends an answer."""
    prompt = random_prompt(40)
    sampling = {"stop_token_ids": frozenset({answer(prompt)[0]}), "max_tokens": 6, "min_tokens": 3}
    with running_engine(LLAMA) as single:
        (expected,) = generate(single, [prompt], **sampling)
    with pair() as joined:
        assert ask(joined, mode, "a", prompt, **sampling)[0] == expected
        assert seeded(joined) == 0
        assert ask(joined, mode, "b", prompt, {"min_tokens": 1}, **sampling)[0] == expected
        joined.assert_all_returned()


@pytest.mark.parametrize("num_warm", [48, 96])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_with_blocks_cached_on_decode(mode: str, num_warm: int) -> None:
    prompt = random_prompt(97)  # six blocks and a token
    with pair() as joined:
        generate(joined.decode.engine, [prompt[:num_warm]], max_tokens=1)
        assert ask(joined, mode, "a", prompt, max_tokens=8)[0] == answer(prompt)
        # With all but one token cached nothing is fetched, and the token is computed.
        assert seeded(joined) == (1 if num_warm == 48 else 0)
        joined.assert_all_returned()


def test_a_lost_transfer_is_computed_with_its_first_token() -> None:
    prompt = random_prompt(50)
    with pair(decode={"kv_load_failure_policy": "recompute"}) as joined:
        joined.wire.is_paused = True
        listener = joined.start_push("a", prompt)
        joined.start_prefill("a", prompt).finish()
        joined.decode.endpoint.wait_for("receive", "d/a")
        joined.wire.fail("a", "the peer is gone")
        listener.finish()
        assert listener.tokens == answer(prompt)
        assert seeded(joined) == 0


@pytest.mark.parametrize("told", ["", "7", "7:0123", "999999999:" + "0" * 32])
def test_a_foreign_continuation_costs_a_step_only(told: str) -> None:
    prompt = random_prompt(50)
    with pair() as joined:
        joined.wire.is_paused = True
        listener = joined.start_push("a", prompt)
        joined.start_prefill("a", prompt).finish()
        joined.decode.endpoint.wait_for("receive", "d/a")
        with joined.wire.lock:
            joined.wire.holds["a"].continuation = told
            joined.wire.flush()
        listener.finish()
        assert listener.tokens == answer(prompt)
        assert seeded(joined) == 0
        joined.assert_all_returned()


def test_a_seeded_request_is_preempted_like_any_other() -> None:
    prompts = [random_prompt(32, seed=index) for index in range(3)]
    with running_engine(LLAMA) as single:
        expected = generate(single, prompts, max_tokens=40)
    with pair(decode={"num_blocks": 8}) as joined:
        listeners = [
            joined.start_push(f"r{index}", prompt, max_tokens=40)
            for index, prompt in enumerate(prompts)
        ]
        for index, prompt in enumerate(prompts):
            joined.start_prefill(f"r{index}", prompt)
        for listener in listeners:
            listener.finish()
        assert [listener.tokens for listener in listeners] == expected
        assert joined.decode.engine.stats()["preemptions"] > 0
        assert seeded(joined) == 3
        joined.assert_all_returned()
