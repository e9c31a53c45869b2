"""Picking tokens from logits."""

import torch

from engine.rig import generate, random_prompt, running_engine, submit
from kvcourier.engine.api import FinishReason, SamplingParams
from kvcourier.engine.sampler import TokenSampler, sample

EOS = frozenset({3})
LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2]]))


def draws(num: int, eos: frozenset[int] = frozenset(), **params: object) -> list[int]:
    sampler = TokenSampler(SamplingParams(max_tokens=num, **params), eos)  # type: ignore[arg-type]
    return [sample(LOGITS.clone(), [sampler])[0] for _ in range(num)]


def test_greedy_takes_the_most_likely() -> None:
    assert draws(3) == [1, 1, 1]


def test_sampling_follows_the_distribution() -> None:
    found = torch.bincount(torch.tensor(draws(4000, temperature=1.0, seed=1)), minlength=4) / 4000
    assert torch.allclose(found, LOGITS.exp()[0], atol=0.03)


def test_top_k_and_top_p_keep_only_likely_tokens() -> None:
    assert set(draws(300, temperature=1.0, seed=1, top_k=2)) == {1, 2}
    assert set(draws(300, temperature=1.0, seed=1, top_p=0.75)) == {1, 2, 3}
    assert set(draws(300, temperature=1.0, seed=1, top_p=0.65)) == {1, 2}
    assert set(draws(50, temperature=1.0, seed=1, top_p=1e-9)) == {1}
    assert set(draws(50, temperature=5.0, seed=1, top_k=1)) == {1}


def test_a_pick_depends_on_the_seed_and_its_number_alone() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    whole = TokenSampler(params, EOS)
    expected = [sample(LOGITS.clone(), [whole])[0] for _ in range(20)]
    assert len(set(expected)) > 1
    for num_before in (1, 7):
        rest = TokenSampler(params, EOS)
        rest.num_sampled = num_before
        found = [sample(LOGITS.clone(), [rest])[0] for _ in range(20 - num_before)]
        assert found == expected[num_before:]


def test_seeds_that_share_their_low_bits_differ() -> None:
    assert draws(30, temperature=1.0, seed=1) != draws(30, temperature=1.0, seed=1 + 2**32)
    assert draws(30, temperature=1.0) != draws(30, temperature=1.0)


def test_min_tokens_hides_stop_tokens_until_then() -> None:
    greedy = TokenSampler(
        SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({1})), EOS
    )
    logits = torch.tensor([[0.0, 5.0, 1.0, 4.0]])
    assert [sample(logits.clone(), [greedy])[0] for _ in range(3)] == [2, 2, 1]


def test_seeded_answers_repeat_and_do_not_depend_on_the_batch() -> None:
    prompt = random_prompt(20)
    seeded = {"temperature": 1.0, "seed": 5, "max_tokens": 20}
    with running_engine(enable_prefix_caching=False) as engine:
        (alone,) = generate(engine, [prompt], **seeded)
        others = [
            submit(engine, f"other{i}", random_prompt(30 + i), temperature=0.8, max_tokens=30)
            for i in range(3)
        ]
        assert generate(engine, [prompt, prompt], **seeded) == [alone, alone]
        for other in others:
            other.finish()
        assert generate(engine, [prompt], **seeded | {"seed": 6}) != [alone]


def test_stop_and_eos_tokens_end_an_answer() -> None:
    prompt = random_prompt(12)
    with running_engine() as engine:
        (plain,) = generate(engine, [prompt], max_tokens=10)
        stop = plain[3]
        position = plain.index(stop)
        listener = submit(engine, "a", prompt, max_tokens=10, stop_token_ids=frozenset({stop}))
        assert listener.finish().finish_reason is FinishReason.STOP
        assert listener.tokens == plain[: position + 1]
        listener = submit(
            engine, "b", prompt, max_tokens=10, stop_token_ids=frozenset({stop}), min_tokens=8
        )
        listener.finish()
        assert len(listener.tokens) >= 8
        assert stop not in listener.tokens[:8]
