"""What a step of vLLM's scheduler means for the prompts that P computes for somebody."""

from types import SimpleNamespace

import pytest

from kvcourier.vllm_connector.block_tables import BlockTable
from kvcourier.vllm_connector.progress import Progress, ProgressTracker, StepNews

TABLES = (BlockTable(index=0, block_size=16),)


def step(new=(), cached=(), preempted=None):
    """A scheduler output: new (id, blocks, computed, scheduled), cached (id, more blocks, computed,
    scheduled, resumed)."""
    return SimpleNamespace(
        num_scheduled_tokens={each[0]: each[3] for each in (*new, *cached)},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=blocks, num_computed_tokens=computed)
            for name, blocks, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[each[0] for each in cached],
            new_block_ids=[each[1] for each in cached],
            num_computed_tokens=[each[2] for each in cached],
            resumed_req_ids={each[0] for each in cached if each[4]},
        ),
        preempted_req_ids=preempted,
    )


@pytest.fixture
def tracker() -> ProgressTracker:
    found = ProgressTracker()
    found.follow("p1", 100)
    return found


def test_a_prompt_in_one_step_is_written_when_it_ends(tracker):
    news = tracker.take(step(new=[("p1", ([4, 2, 7, 1, 9, 8, 3],), 0, 100)]), TABLES)
    assert news == StepNews((Progress("p1", ((4, 2, 7, 1, 9, 8, 3),), 100, is_last=True),))


def test_chunks_grow_from_the_cached_prefix_on(tracker):
    first = tracker.take(step(new=[("p1", ([4, 2, 7],), 16, 32)]), TABLES)
    assert first.progress == (Progress("p1", ((4, 2, 7),), 48, is_last=False),)
    second = tracker.take(step(cached=[("p1", ([1, 9],), 48, 30, False)]), TABLES)
    assert second.progress == (Progress("p1", ((4, 2, 7, 1, 9),), 78, is_last=False),)
    third = tracker.take(step(cached=[("p1", ([8, 3],), 78, 22, False)]), TABLES)
    assert third.progress == (Progress("p1", ((4, 2, 7, 1, 9, 8, 3),), 100, is_last=True),)


def test_a_step_without_new_blocks_goes_on_in_the_old_ones(tracker):
    tracker.take(step(new=[("p1", ([4, 2],), 0, 20)]), TABLES)
    news = tracker.take(step(cached=[("p1", None, 20, 5, False)]), TABLES)
    assert news.progress == (Progress("p1", ((4, 2),), 25, is_last=False),)


def test_a_preempted_prompt_is_void_and_starts_again_in_other_blocks(tracker):
    tracker.take(step(new=[("p1", ([4, 2],), 0, 32)]), TABLES)
    assert tracker.take(step(preempted={"p1", "x"}), TABLES) == StepNews((), ("p1",))
    news = tracker.take(step(cached=[("p1", ([6, 5],), 0, 32, True)]), TABLES)
    assert news.progress == (Progress("p1", ((6, 5),), 32, is_last=False),)


def test_prompts_of_nobody_and_answers_are_no_news(tracker):
    tracker.take(step(new=[("p1", ([1] * 7,), 0, 100), ("x", ([5],), 0, 16)]), TABLES)
    tracker.forget("p1")
    news = tracker.take(step(cached=[("p1", ([9],), 100, 1, False)], preempted={"p1"}), TABLES)
    assert news == StepNews()


def test_tokens_beyond_the_prompt_do_not_count(tracker):
    """With speculative or padded steps more may be scheduled than the prompt has left."""
    news = tracker.take(step(new=[("p1", ([1] * 8,), 0, 104)]), TABLES)
    assert news.progress == (Progress("p1", ((1,) * 7,), 100, is_last=True),)


def test_each_group_is_listed_from_its_window_on():
    tables = (BlockTable(index=0, block_size=16), BlockTable(index=1, block_size=16, window=20))
    tracker = ProgressTracker()
    tracker.follow("p1", 100)
    blocks = ([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 14, 15, 16, 17])
    (news,) = tracker.take(step(new=[("p1", blocks, 0, 100)]), tables).progress
    # The next query, at 100, looks at 81 to 100.
    assert news.block_ids == ((1, 2, 3, 4, 5, 6, 7), (16, 17))
