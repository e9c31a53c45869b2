"""vLLM's engines with our connector on both sides: answers, statuses and blocks of transfers."""

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvcourier.transport.memory import Fate

from .engine_rig import (
    BLOCK,
    BYTES_PER_BLOCK,
    MODES,
    OPERATION,
    answer_to,
    handed_over,
    prompt_of,
    run,
)

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100)


def small(num_blocks: int) -> dict[str, int]:
    """Options of an instance with so many blocks, of which vLLM keeps one for itself."""
    return {"num_gpu_blocks_override": num_blocks, "max_model_len": 5 * BLOCK}


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_one_instance(pair, network, mode) -> None:
    p, d = pair
    for length in LENGTHS:
        before = network.num_moved
        prompt = prompt_of(length, seed=length)
        _, wanted = handed_over(p, d, prompt, mode)
        run(p, d, until=lambda: p.is_idle and d.is_idle)
        assert d.asked[wanted].tokens == answer_to(prompt, 4), f"{length} tokens"
        blocks = -(-(length - 1) // BLOCK)
        assert network.num_moved - before == blocks * BYTES_PER_BLOCK, f"{length} tokens"


@pytest.mark.parametrize("mode", MODES)
def test_a_request_waits_with_its_blocks_while_kv_is_on_its_way(pair, network, mode) -> None:
    p, d = pair
    network.plan(OPERATION[mode], Fate.HOLD)
    held, wanted = handed_over(p, d, prompt_of(100), mode)
    run(p, d, until=lambda: network.pending_of(OPERATION[mode]))
    assert d.status(wanted) is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert d.num_free_at_start - d.num_free == 4
    assert p.asked[held].finish_reason is FinishReason.LENGTH
    assert p.num_free_at_start - p.num_free == 4, "P keeps the blocks though its request is over"
    network.heal()
    run(p, d, until=lambda: d.status(wanted) is RequestStatus.RUNNING)
    run(p, until=lambda: p.is_idle)
    run(d, until=lambda: d.is_idle)
    assert d.asked[wanted].tokens == answer_to(prompt_of(100), 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("length", "cached", "fetched"),
    [
        pytest.param(2 * BLOCK + 1, 2 * BLOCK + 1, 0, id="full hit"),
        pytest.param(2 * BLOCK, 2 * BLOCK, 1, id="all but the last block"),
        pytest.param(100, BLOCK + 5, 3, id="first block"),
    ],
)
def test_what_the_prefix_cache_of_d_has_is_not_fetched(
    pair, network, mode, length, cached, fetched
) -> None:
    p, d = pair
    prompt = prompt_of(length)
    d.ask(prompt[:cached])
    run(d, until=lambda: d.is_idle)
    _, wanted = handed_over(p, d, prompt, mode)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.asked[wanted].tokens == answer_to(prompt, 4)
    assert network.num_moved == fetched * BYTES_PER_BLOCK


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_longer_than_a_step(make, network, mode) -> None:
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 8}
    p, d = make("p", "kv_producer", **options), make("d", "kv_consumer", **options)
    prompts = [prompt_of(200, seed) for seed in range(3)]
    wanted = [handed_over(p, d, prompt, mode)[1] for prompt in prompts]
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    for request_id, prompt in zip(wanted, prompts, strict=True):
        assert d.asked[request_id].tokens == answer_to(prompt, 4)
    assert network.num_moved == 3 * 7 * BYTES_PER_BLOCK


@pytest.mark.parametrize("mode", MODES)
def test_d_has_room_for_one_prompt_at_a_time(make, mode) -> None:
    p, d = make("p", "kv_producer"), make("d", "kv_consumer", **small(6))
    prompts = [prompt_of(100, seed) for seed in range(4)]
    wanted = [handed_over(p, d, prompt, mode)[1] for prompt in prompts]
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    for request_id, prompt in zip(wanted, prompts, strict=True):
        assert d.asked[request_id].tokens == answer_to(prompt, 4)


@pytest.mark.parametrize("mode", MODES)
def test_preemption_on_d(make, mode) -> None:
    p, d = make("p", "kv_producer"), make("d", "kv_consumer", **small(8))
    prompts = [prompt_of(2 * BLOCK, seed) for seed in range(2)]
    wanted = [handed_over(p, d, prompt, mode, max_tokens=90)[1] for prompt in prompts]
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.num_preemptions > 0
    for request_id, prompt in zip(wanted, prompts, strict=True):
        assert d.asked[request_id].tokens == answer_to(prompt, 90)


@pytest.mark.parametrize("mode", MODES)
def test_preemption_on_p(make, mode) -> None:
    p, d = make("p", "kv_producer", **small(8)), make("d", "kv_consumer")
    other = p.ask(prompt_of(2 * BLOCK, seed=1), max_tokens=90)
    prompt = prompt_of(2 * BLOCK)
    # The last that came is the first to be preempted.
    _, wanted = handed_over(p, d, prompt, mode, prefill_tokens=90)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert p.num_preemptions > 0
    assert p.asked[other].tokens == answer_to(prompt_of(2 * BLOCK, seed=1), 90)
    assert d.asked[wanted].tokens == answer_to(prompt, 4)


@pytest.mark.parametrize("mode", MODES)
def test_p_may_generate_more_than_one_token(pair, network, mode) -> None:
    p, d = pair
    prompt = prompt_of(60)
    held, wanted = handed_over(p, d, prompt, mode, prefill_tokens=20)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert p.asked[held].tokens == answer_to(prompt, 20)
    assert d.asked[wanted].tokens == answer_to(prompt, 4)
    assert network.num_moved == 2 * BYTES_PER_BLOCK, "the prompt only"


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_must_not_read_caches_computes_and_lets_p_go(pair, network, mode) -> None:
    p, d = pair
    _, wanted = handed_over(p, d, prompt_of(100), mode, skip_reading_prefix_cache=True)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.asked[wanted].tokens == answer_to(prompt_of(100), 4)
    assert network.num_moved == 0


def test_many_at_once_in_both_directions(make) -> None:
    a, b = make("a", "kv_both"), make("b", "kv_both")
    expected = []
    for number in range(12):
        p, d = (a, b) if number % 3 else (b, a)
        prompt = prompt_of(20 + 9 * number, number)
        _, wanted = handed_over(p, d, prompt, MODES[number % 2])
        expected.append((d, wanted, answer_to(prompt, 4)))
    run(a, b, until=lambda: a.is_idle and b.is_idle)
    for d, wanted, answer in expected:
        assert d.asked[wanted].tokens == answer


def test_a_producer_that_is_asked_to_receive_computes(make, network) -> None:
    lease = {"kv_lease_duration": 1}
    p, d = make("p", "kv_producer", extra=lease), make("d", "kv_producer")
    _, wanted = handed_over(p, d, prompt_of(100), "push")
    run(d, until=lambda: d.is_idle)
    assert d.asked[wanted].tokens == answer_to(prompt_of(100), 4)
    assert network.num_moved == 0


def test_hand_made_model_notices_one_wrong_byte(pair, network) -> None:
    """What every other test here relies on."""
    p, d = pair
    held, _ = handed_over(p, d, prompt_of(100), "pull", want=False)
    block = p.asked[held].params["remote_block_ids"][0][1]
    next(iter(p.worker.caches.values()))[block, 1, 3, 5] += 1
    wanted = d.ask(prompt_of(100), p.asked[held].params)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.asked[wanted].tokens != answer_to(prompt_of(100), 4)
