"""P and D have room for two prompts each, and D's blocks cannot be taken back: all are served."""

import random
from itertools import pairwise

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from .engine_rig import BLOCK, MODES, answer_to, handed_over, prompt_of, run

LENGTH = 3 * BLOCK - 6
"""Three blocks, with the answer."""
WAITING = RequestStatus.WAITING
RESERVED = RequestStatus.WAITING_FOR_REMOTE_KVS


def blocks(num_usable: int) -> dict[str, int]:
    """Options of an instance with so many blocks, where a request has four at most."""
    return {"num_gpu_blocks_override": num_usable + 1, "max_model_len": 4 * BLOCK}


@pytest.fixture
def cramped(make):
    """(P, D); D has room for one prompt beside the longest request."""
    return make("p", "kv_producer", **blocks(6)), make("d", "kv_consumer", **blocks(7))


@pytest.fixture
def tight(make):
    """(P, D); D has room for no prompt beside the longest request."""
    return make("p", "kv_producer", **blocks(6)), make("d", "kv_consumer", **blocks(6))


def served(p, d, wanted) -> None:
    """All have their answers, and nobody had to be told by a deadline."""
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    for request_id, prompt in wanted.items():
        assert d.asked[request_id].tokens == answer_to(prompt, 4)


def test_d_reserves_no_room_that_p_needs_for_what_it_keeps(cramped) -> None:
    p, d = cramped
    kept = [prompt_of(LENGTH, seed=seed) for seed in range(2)]
    held = [handed_over(p, d, prompt, "pull", want=False)[0] for prompt in kept]
    assert p.num_free == 0, "P can begin nothing until D takes these"
    pushed = {}
    for seed in (2, 3):
        prompt = prompt_of(LENGTH, seed=seed)
        pushed[handed_over(p, d, prompt, "push")[1]] = prompt
    first, second = pushed
    run(p, d, until=lambda: d.status(first) is RESERVED)
    for _ in range(20):
        d.step()
    assert d.status(second) is WAITING
    pulled = {
        d.ask(prompt, p.asked[each].params): prompt for prompt, each in zip(kept, held, strict=True)
    }
    served(p, d, pulled | pushed)


def test_a_prompt_gets_its_blocks_when_p_has_finished_it(tight) -> None:
    p, d = tight
    prompt = prompt_of(LENGTH)
    held, wanted = handed_over(p, d, prompt, "push")
    for _ in range(20):
        d.step()
    assert d.status(wanted) is WAITING
    assert d.num_free == d.num_free_at_start
    run(p, until=lambda: p.asked[held].finish_reason is not None)
    assert p.num_free < p.num_free_at_start, "P keeps it"
    served(p, d, {wanted: prompt})


def test_one_that_is_aborted_makes_room_for_the_next(cramped) -> None:
    p, d = cramped
    prompts = [prompt_of(LENGTH, seed=seed) for seed in range(3)]
    wanted = [d.ask(prompt, p.early_params(f"t{n}")) for n, prompt in enumerate(prompts)]
    for before, after in pairwise(wanted):
        run(d, until=lambda before=before: d.status(before) is RESERVED)
        assert d.status(after) is WAITING
        d.abort(before)
    run(d, until=lambda: d.status(wanted[-1]) is RESERVED)
    d.abort(wanted[-1])
    waiting = [d.ask(prompt, p.early_params(f"u{n}")) for n, prompt in enumerate(prompts)]
    run(d, until=lambda: d.status(waiting[0]) is RESERVED)
    for each in reversed(waiting):
        d.abort(each)
    run(p, d, until=lambda: d.is_idle)


def test_one_that_is_preempted_and_computed_claims_nothing(cramped) -> None:
    p, d = cramped
    wanted = {}
    for seed in range(3):
        prompt = prompt_of(BLOCK - 4, seed=seed)
        wanted[handed_over(p, d, prompt, "push", max_tokens=3 * BLOCK)[1]] = prompt
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.num_preemptions
    for request_id, prompt in wanted.items():
        assert d.asked[request_id].tokens == answer_to(prompt, 3 * BLOCK)


def test_a_prompt_that_p_never_hears_of_fails(make) -> None:
    p = make("p", "kv_producer", **blocks(6))
    d = make("d", "kv_consumer", extra={"push_registration_timeout": 1}, **blocks(6))
    wanted = d.ask(prompt_of(LENGTH), p.early_params("never sent to P"))
    run(p, d, until=lambda: d.is_idle)
    assert d.asked[wanted].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_d", [6, 7], ids=["tight", "cramped"])
def test_twelve_at_once_in_both_modes_and_some_on_d_alone(make, num_d, seed) -> None:
    p, d = make("p", "kv_producer", **blocks(6)), make("d", "kv_consumer", **blocks(num_d))
    chance = random.Random(seed)
    prompts = [prompt_of(chance.randint(2, LENGTH), seed=n) for n in range(12)]
    kept, others = prompts[:2], prompts[2:]
    held = [handed_over(p, d, prompt, "pull", want=False)[0] for prompt in kept]
    wanted = {}
    for prompt in others:
        kind = chance.choice(["push", "push", "local"])
        each = d.ask(prompt) if kind == "local" else handed_over(p, d, prompt, kind)[1]
        wanted[each] = prompt
    for prompt, each in zip(kept, held, strict=True):
        wanted[d.ask(prompt, p.asked[each].params)] = prompt
    served(p, d, wanted)


def test_where_there_is_room_all_have_blocks_at_once(make) -> None:
    p, d = make("p", "kv_producer"), make("d", "kv_consumer")
    wanted = {}
    for seed, mode in enumerate(MODES * 2):
        prompt = prompt_of(LENGTH, seed=seed)
        wanted[handed_over(p, d, prompt, mode)[1]] = prompt
    for _ in range(3):
        d.step()
    assert {d.status(each) for each in wanted} == {RESERVED}
    served(p, d, wanted)
