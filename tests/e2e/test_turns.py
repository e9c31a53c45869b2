"""Conversations of several turns: P fetches from D what D has of the turns before."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import BLOCK_SIZE, MODES, Cluster, body_of, running_cluster, until
from e2e.conversation import (
    NUM_ANSWER,
    NUM_NEW,
    Conversation,
    by_hand,
    computed,
    fetched,
    misses,
)
from engine.rig import generate, random_prompt
from kvcourier.engine.engine import Engine

FLAGS = {
    # What P has computed itself it would not fetch, and much of a history it has.
    "prefill": ("--bidirectional-kv-xfer", "--no-prefix-caching"),
    "decode": ("--bidirectional-kv-xfer",),
}
DIGEST_STEP = 16
NUM_TURNS = 4


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("turns"), flags_by_role=FLAGS) as shared:
        yield shared


def kept_tokens(num_said: int) -> int:
    """Tokens of a history that can be proven: the last one was never computed."""
    return (num_said - 1) // DIGEST_STEP * DIGEST_STEP


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("mode", MODES)
def test_only_what_is_new_is_computed(
    talking: Cluster, single: Engine, mode: str, streams: bool
) -> None:
    prefill, decode = talking.prefill, talking.decode
    talk = Conversation(talking.router, single, f"four-{mode}-{streams}", mode, streams)
    before = computed(prefill), fetched(prefill), decode.metric("kvcourier:kv_received_total")
    hits = decode.metric("kvcourier:prefix_cache_hits_total")
    kept = decode.metric("kvcourier:histories")
    expected_computed = expected_hits = 0
    for _ in range(NUM_TURNS):
        known = kept_tokens(len(talk.said)) if talk.said else 0
        on_decode = (len(talk.said) - 1) // BLOCK_SIZE * BLOCK_SIZE if talk.said else 0
        talk.turn()
        expected_computed += len(talk.said) - NUM_ANSWER - known
        expected_hits += on_decode
    assert fetched(prefill) - before[1] == NUM_TURNS - 1
    assert computed(prefill) - before[0] == expected_computed
    # D keeps what it had, and takes only what is new.
    assert decode.metric("kvcourier:kv_received_total") - before[2] == NUM_TURNS
    assert decode.metric("kvcourier:prefix_cache_hits_total") - hits == expected_hits
    until(lambda: decode.metric("kvcourier:histories") == kept + 1, "the last turn is kept")
    assert not any("kv_transfer_params" in answer for answer in talk.raw)
    prefill.wait_idle()


@pytest.mark.parametrize("mode", MODES)
def test_who_moves_the_history(talking: Cluster, single: Engine, mode: str) -> None:
    """In pull P READs it, in push D WRITEs it."""

    def moved() -> list[float]:
        return [
            server.metric("kvcourier_transfer_bytes_count", operation=operation)
            for server in (talking.prefill, talking.decode)
            for operation in ("READ", "WRITE")
        ]

    talk = Conversation(talking.router, single, f"who-{mode}", mode, streams=False)
    talk.turn()
    before = moved()
    talk.turn()
    talking.prefill.wait_idle()
    p_reads, p_writes, d_reads, d_writes = (
        now - then for now, then in zip(moved(), before, strict=True)
    )
    if mode == "pull":
        assert (p_reads, p_writes, d_writes) == (1, 0, 0) and d_reads == 1
    else:
        assert (p_reads, d_reads, d_writes) == (0, 0, 1) and p_writes >= 1


@pytest.mark.parametrize("mode", MODES)
def test_a_rewritten_history_is_used_as_far_as_it_is_the_same(
    talking: Cluster, single: Engine, mode: str
) -> None:
    prefill = talking.prefill
    talk = Conversation(talking.router, single, f"rewritten-{mode}", mode)
    talk.turn()
    before = computed(prefill), fetched(prefill), misses(prefill).get("rewritten", 0)
    # The answer is told in other words: the prompt before it stands.
    talk.said[NUM_NEW:] = random_prompt(30, seed=f"other words {mode}")
    talk.turn()
    assert fetched(prefill) - before[1] == 1
    proven = NUM_NEW // DIGEST_STEP * DIGEST_STEP
    assert computed(prefill) - before[0] == 2 * NUM_NEW + 30 - proven
    # Not even the first word is the same.
    talk.said[0] += 1
    talk.turn()
    assert fetched(prefill) - before[1] == 1
    assert misses(prefill)["rewritten"] - before[2] == 1


@pytest.mark.parametrize("mode", MODES)
def test_two_conversations_at_once(talking: Cluster, single: Engine, mode: str) -> None:
    before = fetched(talking.prefill)
    talks = [
        Conversation(talking.router, single, f"two-{mode}-{index}", mode) for index in range(2)
    ]

    def talk(one: Conversation, answers: dict[str, list[list[int]]]) -> None:
        for _ in range(NUM_TURNS):
            prompt = one.next_prompt()
            one.said = [*prompt, *one.ask(prompt)]
            answers[one.name].append(list(one.said))

    answers: dict[str, list[list[int]]] = {one.name: [] for one in talks}
    threads = [threading.Thread(target=talk, args=(one, answers)) for one in talks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for said in (said for turns in answers.values() for said in turns):
        (expected,) = generate(single, [said[:-NUM_ANSWER]], max_tokens=NUM_ANSWER)
        assert said[-NUM_ANSWER:] == expected
    assert all(len(turns) == NUM_TURNS for turns in answers.values())
    assert fetched(talking.prefill) - before == 2 * (NUM_TURNS - 1)


@pytest.mark.parametrize("mode", MODES)
def test_two_calls_of_one_conversation_at_once(talking: Cluster, single: Engine, mode: str) -> None:
    router = talking.router
    talk = Conversation(router, single, f"both-{mode}", mode)
    talk.turn()
    before = fetched(talking.prefill), router.metric("kvcourier_router_turns_total", state="none")
    prompts = [talk.next_prompt() for _ in range(2)]
    answers: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda at=at: answers.update({at: talk.ask(prompts[at])}))
        for at in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, prompt in enumerate(prompts):
        assert generate(single, [prompt], max_tokens=NUM_ANSWER) == [answers[at]]
    assert fetched(talking.prefill) - before[0] == 1
    assert router.metric("kvcourier_router_turns_total", state="none") - before[1] == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_chat_whose_text_may_be_split_otherwise(talking: Cluster, mode: str) -> None:
    """What was said comes back as text, through the chat template: however much of it is proven,
    the answers are those of one instance."""
    client, before = talking.router.client, fetched(talking.prefill)
    messages = [{"role": "user", "content": f"Turn 1 of {mode}: what is moved, and where to?"}]
    for turn in range(3):
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": NUM_ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"X-KV-Mode": mode, "X-Conversation-Id": f"chat-{mode}"}
        path = "/v1/chat/completions"
        answer = client.post(talking.router.url + path, json=body, headers=headers).json()
        assert "kv_transfer_params" not in answer
        alone = client.post(talking.decode.url + path, json=body).json()
        (found,), (expected,) = answer["choices"], alone["choices"]
        assert found["token_ids"] == expected["token_ids"], f"turn {turn}"
        said = {"role": "assistant", "content": found["message"]["content"]}
        messages += [
            said,
            {"role": "user", "content": f"And {turn}? " + "Tell me more of it. " * 6},
        ]
    assert fetched(talking.prefill) > before


def test_without_a_conversation_nothing_is_kept(talking: Cluster, single: Engine) -> None:
    before = talking.decode.metric("kvcourier:histories_kept_total")
    prompt = random_prompt(NUM_NEW, seed="alone")
    expected = generate(single, [prompt], max_tokens=NUM_ANSWER)
    assert [talking.router.ask(prompt, "pull", NUM_ANSWER).token_ids] == expected
    assert talking.decode.metric("kvcourier:histories_kept_total") == before


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """D keeps an answer for a moment only."""
    flags = {**FLAGS, "decode": ("--bidirectional-kv-xfer", "--decoder-kv-blocks-ttl=0.3")}
    with running_cluster(tmp_path_factory.mktemp("forgetful"), flags_by_role=flags) as cluster:
        yield cluster


@pytest.mark.parametrize("mode", MODES)
def test_kept_for_its_time_and_no_longer(forgetful: Cluster, single: Engine, mode: str) -> None:
    router, prefill, decode = forgetful.router, forgetful.prefill, forgetful.decode
    expired = decode.metric("kvcourier_histories_expired_total")
    fresh = router.metric("kvcourier_router_turns_total", state="none")
    missed, refused = misses(prefill).get("not_held", 0), stale(forgetful)
    talk = Conversation(router, single, f"late-{mode}", mode, streams=False)
    talk.turn()
    until(lambda: decode.metric("kvcourier_histories_expired_total") == expired + 1, "it is kept")
    forgetful.wait_idle()
    # The router has forgotten it as well.
    talk.turn()
    assert router.metric("kvcourier_router_turns_total", state="none") == fresh + 2
    # One that has not is refused by D.
    state = ask_decode_alone(forgetful, talk.said, mode)
    until(lambda: decode.metric("kvcourier:histories") == 0, "it is kept")
    prompt = talk.next_prompt()
    name = f"late-by-hand-{mode}"
    params = by_hand(state, mode, name)
    body = body_of(prompt, 1, kv_transfer_params=params)
    answer = prefill.post(body).json()
    expected = generate(single, [prompt], max_tokens=1)
    assert [answer["choices"][0]["token_ids"]] == expected
    assert misses(prefill) == {"not_held": missed + 1}
    assert fetched(prefill) == 0
    assert stale(forgetful) > refused
    # No D comes for it: else its lease would be waited for.
    prefill.let_go(name)


def stale(cluster: Cluster) -> float:
    """References that one side has refused the other because what they name is gone."""
    return (
        cluster.decode.metric("kvcourier_stale_refused_total")
        + cluster.decode.metric("kvcourier_registrations_refused_total")
        + cluster.prefill.metric("kvcourier_stale_refused_total")
    )


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two caches of other shapes, and everything that is moved is compared."""
    flags = {
        "prefill": (*FLAGS["prefill"], "--tp-size=2", "--block-size=32", "--kv-integrity=all"),
        "decode": (*FLAGS["decode"], "--pp-size=2", "--kv-layout=HND", "--kv-integrity=all"),
    }
    with running_cluster(tmp_path_factory.mktemp("shaped"), flags_by_role=flags) as cluster:
        yield cluster


@pytest.mark.parametrize("mode", MODES)
def test_between_caches_of_other_shapes_that_are_compared(
    shaped: Cluster, single: Engine, mode: str
) -> None:
    before = fetched(shaped.prefill)
    checks = shaped.prefill.metric("kvcourier_integrity_checks_total")
    talk = Conversation(shaped.router, single, f"shaped-{mode}", mode)
    for _ in range(3):
        talk.turn()
    assert fetched(shaped.prefill) == before + 2
    assert shaped.prefill.metric("kvcourier_integrity_checks_total") > checks
    assert shaped.prefill.metric("kvcourier_integrity_failures_total") == 0
    assert misses(shaped.prefill) == {}


@pytest.mark.parametrize("mode", MODES)
def test_the_decode_instance_is_started_anew(talking: Cluster, single: Engine, mode: str) -> None:
    prefill, decode = talking.prefill, talking.decode
    before, restarted = fetched(prefill), misses(prefill).get("restarted", 0)
    talk = Conversation(talking.router, single, f"anew-{mode}", mode)
    talk.turn()
    talk.turn()
    assert fetched(prefill) == before + 1
    decode.child.process.kill()
    decode.wait_end()
    decode.start()
    decode.wait_ready()
    talk.turn()
    assert misses(prefill)["restarted"] == restarted + 1
    talk.turn()
    assert fetched(prefill) == before + 2


def test_what_is_kept_starves_nobody(tmp_path: Path, single: Engine) -> None:
    """D has room for two answers. Each that is kept goes when another prompt needs its blocks."""
    num_blocks = 2 * (-(-(NUM_NEW + NUM_ANSWER) // BLOCK_SIZE)) + 1
    flags = {**FLAGS, "decode": ("--bidirectional-kv-xfer", f"--num-blocks={num_blocks}")}
    with running_cluster(tmp_path, flags_by_role=flags) as small:
        talks = [Conversation(small.router, single, f"many-{at}", "push") for at in range(6)]
        for talk in talks:
            talk.turn()
        decode = small.decode
        assert decode.metric("kvcourier:histories_kept_total") == 6
        assert decode.metric("kvcourier:histories_given_up_total") >= 4
        assert decode.metric("kvcourier:num_preemptions_total") == 0
        # The oldest went first.
        assert small.prefill.metric("kvcourier:histories_fetched_total") == 0


def ask_decode_alone(cluster: Cluster, prompt: list[int], mode: str) -> dict[str, object]:
    """The state that D answers with, of a turn that no router has seen."""
    name = f"no-router-{mode}"
    hold = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
    handoff = cluster.prefill.post(body_of(prompt, 1, kv_transfer_params=hold)).json()
    params = handoff["kv_transfer_params"]
    answer = cluster.decode.post(body_of(prompt, NUM_ANSWER, kv_transfer_params=params)).json()
    state: dict[str, object] = answer["kv_transfer_params"]
    assert state["do_remote_decode"] is True and state["do_remote_prefill"] is False
    return state
