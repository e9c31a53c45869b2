"""Requests that end early or badly: every block comes back, and the engines go on."""

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvcourier.transport.memory import Fate

from .engine_rig import BLOCK, MODES, OPERATION, answer_to, handed_over, prompt_of, run

PROMPT = prompt_of(100)
HOLD = {"do_remote_decode": True}


def test_p_aborts_before_its_first_step(pair) -> None:
    p, _ = pair
    p.abort(p.ask(PROMPT, HOLD))
    assert p.is_idle


def test_p_aborts_in_the_middle_of_a_prompt(make) -> None:
    p = make("p", "kv_producer", max_num_batched_tokens=48, max_num_seqs=8)
    held = p.ask(PROMPT, HOLD)
    run(p, until=lambda: p.num_free < p.num_free_at_start)
    p.abort(held)
    run(p, until=lambda: p.is_idle)
    assert p.asked[held].tokens == []


def test_p_aborts_while_d_waits_for_its_write(make) -> None:
    p = make("p", "kv_producer", max_num_batched_tokens=48, max_num_seqs=8)
    d = make("d", "kv_consumer")
    held, wanted = handed_over(p, d, PROMPT, "push")
    run(d, until=lambda: d.status(wanted) is RequestStatus.WAITING_FOR_REMOTE_KVS)
    p.step()
    p.abort(held)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.asked[wanted].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_on_p_after_its_answer_takes_nothing_from_d(pair, mode) -> None:
    p, d = pair
    held, wanted = handed_over(p, d, PROMPT, mode)
    run(p, until=lambda: p.asked[held].finish_reason is not None)
    p.abort(held)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.asked[wanted].tokens == answer_to(PROMPT, 4)


@pytest.mark.parametrize("mode", MODES)
def test_d_aborts_before_its_first_step(pair, mode) -> None:
    p, d = pair
    _, wanted = handed_over(p, d, PROMPT, mode)
    d.abort(wanted)
    assert d.is_idle
    run(p, until=lambda: p.is_idle)


@pytest.mark.parametrize("mode", MODES)
def test_d_refuses_a_request_before_admission(pair, mode) -> None:
    """vLLM then makes up a request of one token with the same params."""
    p, d = pair
    held, _ = handed_over(p, d, PROMPT, mode, want=False)
    params = p.asked[held].params if mode == "pull" else p.early_params(p.transfer_ids[held])
    d.ask([0], params, abort_immediately=True)
    assert d.is_idle
    run(p, until=lambda: p.is_idle)


def test_d_aborts_after_it_registered(pair, network) -> None:
    _, d = pair
    p, _ = pair
    wanted = d.ask(PROMPT, p.early_params("a prompt that never comes"))
    run(d, until=lambda: d.status(wanted) is RequestStatus.WAITING_FOR_REMOTE_KVS)
    d.abort(wanted)
    run(d, until=lambda: d.is_idle)
    assert network.num_moved == 0


@pytest.mark.parametrize("mode", MODES)
def test_d_aborts_while_kv_is_on_its_way(pair, network, mode) -> None:
    p, d = pair
    network.plan(OPERATION[mode], Fate.HOLD)
    _, wanted = handed_over(p, d, PROMPT, mode)
    run(p, d, until=lambda: network.pending_of(OPERATION[mode]))
    d.abort(wanted)
    # What comes next must not get blocks that may still be written to.
    other = d.ask(prompt_of(100, seed=1))
    run(d, until=lambda: d.asked[other].finish_reason is not None)
    assert d.asked[other].tokens == answer_to(prompt_of(100, seed=1), 4)
    assert d.num_free_at_start - d.num_free == 4
    network.heal()
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.asked[wanted].tokens == []


@pytest.mark.parametrize("mode", MODES)
def test_both_abort_while_kv_is_on_its_way(pair, network, mode) -> None:
    p, d = pair
    network.plan(OPERATION[mode], Fate.HOLD)
    held, wanted = handed_over(p, d, PROMPT, mode)
    run(p, d, until=lambda: network.pending_of(OPERATION[mode]))
    d.abort(wanted)
    p.abort(held)
    network.heal()
    run(p, d, until=lambda: p.is_idle and d.is_idle)


@pytest.mark.parametrize("mode", MODES)
def test_d_aborts_when_all_is_there(pair, mode) -> None:
    p, d = pair
    _, wanted = handed_over(p, d, PROMPT, mode, max_tokens=200)
    run(p, d, until=lambda: d.status(wanted) is RequestStatus.RUNNING)
    d.abort(wanted)
    run(p, d, until=lambda: p.is_idle and d.is_idle)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_steps", range(3))
def test_an_abort_that_comes_during_a_step(pair, mode, num_steps) -> None:
    p, d = pair
    _, wanted = handed_over(p, d, PROMPT, mode, max_tokens=200)
    run(p, d, until=lambda: d.status(wanted) is RequestStatus.RUNNING)
    for _ in range(num_steps):
        d.step()
    d.core.aborts_queue.put_nowait([wanted])
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert len(d.asked[wanted].tokens) < 200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fate", [Fate.FAIL, Fate.REFUSE], ids=lambda fate: fate.value)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_kv_that_cannot_be_moved(make, network, mode, fate, policy) -> None:
    p, d = make("p", "kv_producer"), make("d", "kv_consumer", policy=policy)
    d.ask(prompt_of(BLOCK))
    run(d, until=lambda: d.is_idle)
    network.plan_all(fate)
    _, wanted = handed_over(p, d, prompt_of(100), mode)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    if policy == "fail":
        assert d.asked[wanted].finish_reason is FinishReason.ERROR
        assert d.asked[wanted].tokens == []
    else:
        assert d.asked[wanted].tokens == answer_to(prompt_of(100), 4)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_second_failure_of_the_same_prompt(make, network, policy) -> None:
    p, d = make("p", "kv_producer"), make("d", "kv_consumer", policy=policy)
    network.plan(OPERATION["pull"], Fate.FAIL)
    wanted = [handed_over(p, d, PROMPT, "pull")[1] for _ in range(2)]
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    for request_id in wanted:
        asked = d.asked[request_id]
        if policy == "fail":
            assert asked.finish_reason is FinishReason.ERROR
        else:
            assert asked.tokens == answer_to(PROMPT, 4)


def test_p_is_gone_before_d_reads(pair, network) -> None:
    p, d = pair
    handed_over(p, d, PROMPT, "pull")
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    held, _ = handed_over(p, d, prompt_of(100, seed=1), "pull", want=False)
    p.close()
    wanted = d.ask(prompt_of(100, seed=1), p.asked[held].params)
    run(d, until=lambda: d.is_idle)
    assert d.asked[wanted].finish_reason is FinishReason.ERROR


def test_a_lease_that_ran_out(make) -> None:
    p = make("p", "kv_producer", extra={"kv_lease_duration": 0.5})
    d = make("d", "kv_consumer", policy="recompute")
    held, _ = handed_over(p, d, PROMPT, "pull", want=False)
    run(p, until=lambda: p.is_idle)
    wanted = d.ask(PROMPT, p.asked[held].params)
    run(p, d, until=lambda: d.is_idle)
    assert d.asked[wanted].tokens == answer_to(PROMPT, 4)


@pytest.mark.parametrize("mode", MODES)
def test_two_requests_that_want_the_same_kv(pair, mode) -> None:
    """As n > 1 in one call: each of them is sent with the same params."""
    p, d = pair
    held, first = handed_over(p, d, PROMPT, mode)
    params = p.asked[held].params or d.requests[first].kv_transfer_params
    others = [d.ask(PROMPT, params) for _ in range(2)]
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    answers = [d.asked[each] for each in (first, *others)]
    right = [asked.tokens == answer_to(PROMPT, 4) for asked in answers]
    assert any(right), "one of them gets it"
    for asked, is_right in zip(answers, right, strict=True):
        assert is_right or asked.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("mode", MODES)
def test_several_prompts_with_the_params_of_the_first(pair, mode) -> None:
    """As in one call of several prompts: none may get another's KV."""
    p, d = pair
    held, first = handed_over(p, d, PROMPT, mode)
    params = p.asked[held].params or d.requests[first].kv_transfer_params
    prompts = [prompt_of(100, seed=1), prompt_of(120, seed=2)]
    others = [d.ask(prompt, params) for prompt in prompts]
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    for prompt, each in zip((PROMPT, *prompts), (first, *others), strict=True):
        assert d.asked[each].tokens == answer_to(prompt, 4)


@pytest.mark.parametrize("mode", MODES)
def test_results_for_unknown_requests(pair, monkeypatch, mode) -> None:
    p, d = pair
    local = d.ask(prompt_of(40, seed=1), max_tokens=200)
    for instance in pair:
        connector = instance.worker.connector
        take = connector.get_transfer_results

        def with_strangers(finished, take=take):
            results = take(finished)
            for found in (results.finished_sending, results.finished_recving):
                found |= {"nobody", local}
            return results

        monkeypatch.setattr(connector, "get_transfer_results", with_strangers)
    _, wanted = handed_over(p, d, PROMPT, mode)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.asked[wanted].tokens == answer_to(PROMPT, 4)
    assert d.asked[local].tokens == answer_to(prompt_of(40, seed=1), 200)


GOOD_PULL = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "remote_request_id": "x",
    "remote_block_ids": [[1, 2]],
}
UNUSABLE = {
    "no holder": {"do_remote_prefill": True},
    "both legs": {"do_remote_prefill": True, "do_remote_decode": True},
    "a flag that is a text": {"do_remote_decode": "yes"},
    "a host that is a list": GOOD_PULL | {"remote_host": []},
    "a huge tp_size": GOOD_PULL | {"tp_size": 10**9},
    "blocks that are texts": GOOD_PULL | {"remote_block_ids": [["1"]]},
    "more blocks than fit in a message": GOOD_PULL
    | {"remote_block_ids": [[(1 << 31) - 1] * (1 << 17)] * 64},
    "blocks nested deeper": GOOD_PULL | {"remote_block_ids": [[[1]]]},
    "negative blocks": GOOD_PULL | {"remote_block_ids": [[-1]]},
    "a transfer id that is a number": {"do_remote_decode": True, "transfer_id": 5},
}


@pytest.mark.parametrize("params", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_params_mean_a_local_answer(pair, params) -> None:
    for instance in pair:
        request_id = instance.ask(PROMPT, params)
        run(instance, until=lambda instance=instance: instance.is_idle)
        assert instance.asked[request_id].tokens == answer_to(PROMPT, 4)


EXTRAS = {
    "a lone surrogate": "\ud800",
    "a set": {1, 2},
    "more than a message may have": "x" * (17 << 20),
}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("mode", MODES)
def test_keys_that_nobody_reads_do_no_harm(pair, mode, extra) -> None:
    p, d = pair
    held, _ = handed_over(p, d, PROMPT, mode, want=False)
    params = p.asked[held].params if mode == "pull" else p.early_params(p.transfer_ids[held])
    wanted = d.ask(PROMPT, params | {"note": extra})
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    assert d.asked[wanted].tokens == answer_to(PROMPT, 4)


def test_a_transfer_id_that_is_used_again(pair) -> None:
    """By a client that chooses it, or a router that tries again."""
    p, d = pair
    asked = [
        p.ask(prompt_of(60 + number), HOLD | {"transfer_id": "twice"}, max_tokens=1)
        for number in range(2)
    ]
    run(p, until=lambda: all(p.asked[each].finish_reason is not None for each in asked))
    asked.append(p.ask(prompt_of(90), HOLD | {"transfer_id": "twice"}, max_tokens=1))
    run(p, until=lambda: p.asked[asked[-1]].finish_reason is not None)
    wanted = [d.ask(p.requests[each].prompt_token_ids, p.asked[each].params) for each in asked]
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    for held, each in zip(asked, wanted, strict=True):
        prompt = p.requests[held].prompt_token_ids
        assert d.asked[each].tokens == answer_to(prompt, 4)


@pytest.mark.parametrize("mode", MODES)
def test_another_engine_than_the_named_one_answers(pair, mode) -> None:
    p, d = pair
    params = p.early_params("t") if mode == "push" else GOOD_PULL | {"remote_port": p.port}
    wanted = d.ask(PROMPT, params | {"remote_engine_id": "somebody else"})
    run(d, until=lambda: d.is_idle)
    assert d.asked[wanted].finish_reason is FinishReason.ERROR
