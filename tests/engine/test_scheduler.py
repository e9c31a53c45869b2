"""The scheduler, without models: order, budgets, preemption, and that everybody finishes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.engine.blocks import BlockPool
from kvcourier.engine.scheduler import Phase, Remote, Scheduler, Sequence
from kvcourier.ids import RequestId
from kvcourier.layout.geometry import TokenSpan

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int, max_batch_tokens: int = 8, max_num_seqs: int = 4) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=BLOCK_SIZE,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
    )


def make_sequence(
    arrival: int, num_tokens: int, phase: Phase = Phase.WAITING, seed: int | None = None
) -> Sequence:
    source = random.Random(arrival if seed is None else seed)
    tokens = [source.randrange(100) for _ in range(num_tokens)]
    name = RequestId(str(arrival))
    remote = Remote(name, num_tokens, threshold=1) if phase is Phase.WANTING else None
    return Sequence(name, arrival, tokens, remote)


def run_step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Compute a batch, add a token to whoever completes; (arrival, start, count) of each."""
    batch = scheduler.schedule()
    result = [(work.sequence.arrival, work.start, work.count) for work in batch]
    completing = [work.sequence for work in batch if work.completes]
    for work in batch:
        scheduler.computed(work)
    for sequence in completing:
        sequence.tokens.append(7)
    return result


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_first() -> None:
    scheduler = make_scheduler(20)
    scheduler.add(make_sequence(1, 3))
    scheduler.add(make_sequence(2, 18))
    assert run_step(scheduler) == [(1, 0, 3), (2, 0, 5)]
    assert run_step(scheduler) == [(1, 3, 1), (2, 5, 7)]
    assert run_step(scheduler) == [(1, 4, 1), (2, 12, 6)]
    assert run_step(scheduler) == [(1, 5, 1), (2, 18, 1)]


def test_single_tokens_are_not_held_up_by_an_older_prefill() -> None:
    scheduler = make_scheduler(20)
    scheduler.add(make_sequence(1, 40))
    remote = make_sequence(2, 6, Phase.WANTING)
    scheduler.add(remote)
    scheduler.admit_remote()
    assert run_step(scheduler) == [(1, 0, 8)]
    scheduler.received(remote)
    assert run_step(scheduler) == [(2, 5, 1), (1, 8, 7)]
    assert run_step(scheduler) == [(2, 6, 1), (1, 15, 7)]


def test_no_more_sequences_than_allowed() -> None:
    scheduler = make_scheduler(20, max_num_seqs=2)
    for arrival in (1, 2, 3):
        scheduler.add(make_sequence(arrival, 2))
    assert [arrival for arrival, _, _ in run_step(scheduler)] == [1, 2]
    scheduler.remove(scheduler.running[0])
    assert [arrival for arrival, _, _ in run_step(scheduler)] == [2, 3]


def test_the_newest_is_preempted_and_starts_again_in_order() -> None:
    scheduler = make_scheduler(5)
    first, second = make_sequence(1, 8), make_sequence(2, 8)
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(make_sequence(3, 4))
    while second.phase is Phase.RUNNING:
        run_step(scheduler)
    assert scheduler.counters.preemptions == 1
    assert second.num_computed == 0
    assert [s.arrival for s in scheduler.waiting] == [2, 3]  # 3 may not overtake 2
    scheduler.remove(first)
    assert run_step(scheduler)[0][0] == 2


def test_remote_ones_get_all_their_blocks_or_none_and_in_order() -> None:
    scheduler = make_scheduler(5)
    for arrival, num_tokens in ((1, 12), (2, 12), (3, 4)):
        scheduler.add(make_sequence(arrival, num_tokens, Phase.WANTING))
    (admission,) = scheduler.admit_remote()
    assert (admission.sequence.arrival, len(admission.blocks)) == (1, 3)
    assert scheduler.pool.num_free == 2  # 2 does not hold part of its need, 3 does not overtake
    scheduler.received(admission.sequence)
    assert run_step(scheduler) == [(1, 11, 1)]
    scheduler.remove(admission.sequence)
    assert [a.sequence.arrival for a in scheduler.admit_remote()] == [2, 3]


def test_remote_ones_overtake_local_ones_only_with_blocks_those_do_not_need() -> None:
    scheduler = make_scheduler(11, max_num_seqs=1)
    scheduler.add(make_sequence(1, 8))
    run_step(scheduler)  # needs 1 of the 9 free blocks for its next token
    scheduler.add(make_sequence(2, 20))  # waits for a place, needs 5 of them
    scheduler.add(make_sequence(3, 12, Phase.WANTING))
    assert len(scheduler.admit_remote()) == 1
    scheduler.add(make_sequence(4, 4, Phase.WANTING))
    assert scheduler.admit_remote() == []


def test_a_local_one_does_not_take_blocks_that_an_older_remote_one_waits_for() -> None:
    scheduler = make_scheduler(4)
    scheduler.add(make_sequence(1, 4))
    run_step(scheduler)
    remote = make_sequence(2, 16, Phase.WANTING)
    remote.is_held = True
    scheduler.add(remote)
    assert scheduler.admit_remote() == []
    scheduler.add(make_sequence(3, 4))
    assert [arrival for arrival, _, _ in run_step(scheduler)] == [1]


def test_nobody_waits_for_a_remote_one_that_may_never_be_begun() -> None:
    scheduler = make_scheduler(4)
    scheduler.add(make_sequence(1, 4))
    run_step(scheduler)
    scheduler.add(make_sequence(2, 16, Phase.WANTING))
    assert scheduler.admit_remote() == []
    scheduler.add(make_sequence(3, 4))
    assert [arrival for arrival, _, _ in run_step(scheduler)] == [1, 3]


def lent(scheduler: Scheduler, *arrivals: int, num_tokens: int = 8) -> list[Sequence]:
    """Early ones, of two blocks each, that have all the blocks there are."""
    sequences = [make_sequence(each, num_tokens, Phase.WANTING) for each in arrivals]
    for sequence in sequences:
        scheduler.add(sequence)
    assert len(scheduler.admit_remote()) == len(sequences)
    assert scheduler.pool.num_free == 0
    return sequences


def test_a_held_one_gets_the_blocks_of_the_youngest_that_is_not() -> None:
    scheduler = make_scheduler(6)
    first, second, third = lent(scheduler, 1, 2, 4)
    held = make_sequence(3, 7, Phase.WANTING)
    held.is_held = True
    scheduler.add(held)
    assert scheduler.admit_remote() == []
    assert scheduler.take_recalls() == [third]
    assert scheduler.take_recalls() == [], "it is asked once"
    scheduler.recalled(third)
    assert [each.sequence for each in scheduler.admit_remote()] == [held]
    assert scheduler.take_recalls() == []
    # Who has lent its blocks keeps its place, and is next when it is held.
    other = make_sequence(5, 7, Phase.WANTING)
    other.is_held = third.is_held = True
    scheduler.add(other)
    scheduler.received(held)
    scheduler.remove(held)
    assert [each.sequence for each in scheduler.admit_remote()] == [third]
    assert [first.is_recalled, second.is_recalled] == [False, False]


def test_what_is_held_is_never_recalled() -> None:
    scheduler = make_scheduler(4)
    for sequence in lent(scheduler, 1, 2):
        sequence.is_held = True
    held = make_sequence(3, 4, Phase.WANTING)
    held.is_held = True
    scheduler.add(held)
    assert scheduler.admit_remote() == scheduler.take_recalls() == []


def test_a_recall_that_comes_too_late_is_a_receive() -> None:
    scheduler = make_scheduler(4)
    first, second = lent(scheduler, 1, 2)
    scheduler.add(make_sequence(3, 4))
    run_step(scheduler)
    assert scheduler.take_recalls() == [second]
    scheduler.received(second)
    assert not second.is_recalled
    assert scheduler.take_recalls() == [first]


def test_a_running_one_that_needs_a_block_waits_for_it_and_is_not_preempted() -> None:
    scheduler = make_scheduler(5)
    scheduler.add(make_sequence(1, 3))
    run_step(scheduler)
    _, young = lent(scheduler, 2, 3)
    assert run_step(scheduler) == [(1, 3, 1)]  # its block is full
    assert run_step(scheduler) == []
    assert scheduler.take_recalls() == [young]
    assert run_step(scheduler) == []
    scheduler.recalled(young)
    assert scheduler.admit_remote() == [], "one of its two blocks has an owner already"
    assert run_step(scheduler) == [(1, 4, 1)]
    assert scheduler.counters.preemptions == 0


def test_who_has_given_its_blocks_back_does_not_take_them_again_from_whom_they_are_for() -> None:
    scheduler = make_scheduler(6)
    cached = make_sequence(1, 9, seed=0)
    scheduler.add(cached)
    run_step(scheduler)
    run_step(scheduler)
    scheduler.remove(cached)  # two of its blocks are free, and known
    scheduler.add(make_sequence(2, 3))
    run_step(scheduler)
    young = make_sequence(3, 20, Phase.WANTING, seed=0)
    scheduler.add(young)
    (admission,) = scheduler.admit_remote()
    assert (admission.span.start, len(admission.blocks)) == (8, 3)
    assert scheduler.pool.num_free == 0
    assert run_step(scheduler) == [(2, 3, 1)]
    assert run_step(scheduler) == []
    assert scheduler.take_recalls() == [young]
    scheduler.recalled(young)
    # Its two known blocks are free as well now: with them there are enough, but not for both.
    assert scheduler.pool.num_free == 5
    assert scheduler.admit_remote() == []
    assert run_step(scheduler) == [(2, 4, 1)]
    assert scheduler.take_recalls() == []


def test_a_running_one_is_preempted_where_nothing_can_be_recalled() -> None:
    scheduler = make_scheduler(5)
    scheduler.add(make_sequence(1, 3))
    run_step(scheduler)
    for sequence in lent(scheduler, 2, 3):
        sequence.is_held = True
    assert run_step(scheduler) == [(1, 3, 1)]
    run_step(scheduler)
    assert scheduler.counters.preemptions == 1


def finish_and_keep(scheduler: Scheduler, sequence: Sequence) -> RequestId:
    """Run it to its first token, and keep what is computed."""
    scheduler.add(sequence)
    run_step(scheduler)
    name = RequestId(f"{sequence.request_id}/kept")
    scheduler.loans.keep(name, sequence.blocks)
    sequence.blocks = []
    scheduler.remove(sequence)
    return name


def test_what_is_kept_is_called_back_the_oldest_first_and_no_more_than_needed() -> None:
    scheduler = make_scheduler(8)
    names = [finish_and_keep(scheduler, make_sequence(i, 8)) for i in (1, 2, 3)]
    assert scheduler.pool.num_free == 2
    scheduler.add(make_sequence(4, 14))
    assert run_step(scheduler) == []
    assert scheduler.loans.take_called_back() == names[:1]
    assert run_step(scheduler) == [] and scheduler.loans.take_called_back() == []
    assert scheduler.loans.take_back(names[0])
    assert run_step(scheduler) == [(4, 0, 8)]
    assert scheduler.loans.kept == [scheduler.loans[name] for name in names[1:]]


def test_a_running_one_waits_for_what_is_called_back_and_is_not_preempted() -> None:
    scheduler = make_scheduler(4)
    name = finish_and_keep(scheduler, make_sequence(1, 8))
    scheduler.add(make_sequence(2, 8))
    run_step(scheduler)
    assert run_step(scheduler) == []
    assert scheduler.loans.take_called_back() == [name]
    scheduler.loans.take_back(name)
    assert run_step(scheduler) == [(2, 8, 1)]
    assert scheduler.counters.preemptions == 0


def test_what_was_kept_is_found_by_the_next_turn() -> None:
    scheduler = make_scheduler(20)
    first = make_sequence(1, 8, seed=0)
    name = finish_and_keep(scheduler, first)
    for is_kept in (True, False):
        turn = make_sequence(2 + is_kept, 12, seed=0)
        scheduler.add(turn)
        assert run_step(scheduler) == [(turn.arrival, 8, 4)]
        scheduler.remove(turn)
        if is_kept:
            assert scheduler.loans.take_back(name)
    assert scheduler.pool.num_free == 20


def test_of_a_history_only_what_is_held_is_received() -> None:
    scheduler = make_scheduler(20)
    sequence = make_sequence(1, 11)
    sequence.remote = Remote(RequestId("1/fetched"), 6, threshold=3)
    scheduler.add(sequence)
    (admission,) = scheduler.admit_remote()
    assert (admission.name, admission.span) == ("1/fetched", TokenSpan(0, 6))
    assert len(admission.blocks) == 3, "for all of the prompt"
    scheduler.received(sequence)
    assert run_step(scheduler) == [(1, 6, 5)]


def test_blocks_being_received_are_not_shared_before_they_came() -> None:
    scheduler = make_scheduler(20)
    first, second = (make_sequence(i, 9, Phase.WANTING, seed=0) for i in (1, 2))
    scheduler.add(first)
    scheduler.admit_remote()
    scheduler.add(second)
    (admission,) = scheduler.admit_remote()
    assert admission.span.start == 0
    scheduler.received(first)
    third = make_sequence(3, 9, Phase.WANTING, seed=0)
    scheduler.add(third)
    (declined,) = scheduler.admit_remote()
    assert declined.blocks == ()
    run_step(scheduler)
    assert third.blocks[:2] == first.blocks[:2]


def test_a_known_next_token_gets_its_block_before_it_is_computed() -> None:
    scheduler = make_scheduler(4)
    remote = make_sequence(1, 2 * BLOCK_SIZE, Phase.WANTING)
    scheduler.add(remote)
    scheduler.admit_remote()
    scheduler.received(remote, next_is_known=True)
    assert len(remote.blocks) == 2
    remote.tokens.append(7)
    assert run_step(scheduler) == [(1, 2 * BLOCK_SIZE, 1)]
    assert len(remote.blocks) == 3


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 30),  # prompt
            st.integers(1, 10),  # answer
            st.sampled_from(["local", "remote", "seeded", "lost", "abort"]),
            st.integers(0, 2),  # which prefix
        ),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(10, 24),
    max_batch_tokens=st.integers(1, 20),
    max_num_seqs=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_everybody_finishes_and_blocks_have_one_owner(
    requests: list[tuple[int, int, str, int]],
    num_blocks: int,
    max_batch_tokens: int,
    max_num_seqs: int,
    seed: int,
) -> None:
    scheduler = make_scheduler(
        num_blocks, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs
    )
    world = random.Random(seed)
    pending = list(enumerate(requests))
    kinds = {str(index): kind for index, (_, _, kind, _) in pending}
    goals = {str(index): prompt + answer for index, (prompt, answer, _, _) in pending}
    late: list[RequestId] = []  # lost loans that come back later
    kept: dict[RequestId, bool] = {}  # answers kept for a later turn; whether they are called back
    live: dict[str, Sequence] = {}
    for _ in range(2000):
        if pending and world.random() < 0.5:
            index, (num_tokens, _, kind, prefix) = pending.pop(0)
            wanted = kind in ("remote", "seeded", "lost")
            phase = Phase.WANTING if wanted else Phase.WAITING
            live[str(index)] = make_sequence(index, num_tokens, phase, seed=prefix)
            live[str(index)].is_held = world.random() < 0.3
            scheduler.add(live[str(index)])
        scheduler.admit_remote()
        scheduler.take_recalls()
        for sequence in list(scheduler.receiving):
            if sequence.is_recalled and world.random() < 0.5:
                scheduler.recalled(sequence)
            elif world.random() < 0.5:
                if kinds[sequence.request_id] == "remote":
                    scheduler.received(sequence)
                elif kinds[sequence.request_id] == "seeded":
                    scheduler.received(sequence, next_is_known=True)
                    sequence.tokens.append(7)
                else:
                    late.append(sequence.request_id)
                    scheduler.compute_instead(sequence)
        for request_id in [r for r in late if world.random() < 0.3]:
            late.remove(request_id)
            assert scheduler.loans.take_back(request_id)
        kept |= dict.fromkeys(scheduler.loans.take_called_back(), True)
        for name in [n for n, called in kept.items() if world.random() < (0.5 if called else 0.02)]:
            del kept[name]
            assert scheduler.loans.take_back(name)
        batch = run_step(scheduler)
        assert sum(count for _, _, count in batch) <= max_batch_tokens
        assert len(scheduler.running) <= max_num_seqs
        for name, sequence in list(live.items()):
            aborted = kinds[name] == "abort" and world.random() < 0.3
            if aborted or len(sequence.tokens) >= goals[name]:
                if not aborted and world.random() < 0.5:
                    key = RequestId(f"{name}/kept")
                    kept[key] = False
                    scheduler.loans.keep(key, sequence.blocks)
                    sequence.blocks = []
                scheduler.remove(sequence)
                del live[name]
        held = [block for sequence in live.values() for block in sequence.blocks]
        loans = scheduler.loans.items()
        lent = [block for name, blocks in loans if name not in kept for block in blocks]
        shared = {block for name, blocks in loans if name in kept for block in blocks}
        assert len(set(lent)) == len(lent)
        assert not set(held) & set(lent)
        assert not shared & set(lent)
        assert scheduler.pool.num_free == num_blocks - len(set(held) | shared) - len(lent)
        if not (pending or live or late):
            break
    assert not (pending or live or late)
    assert all(scheduler.loans.take_back(name) for name in kept)
    assert scheduler.pool.num_free == num_blocks
