"""Free runs against a plain set, and how long the runs are that they hand out."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcourier.engine.free_runs import FreeRuns, runs_of
from kvcourier.ids import BlockId

NUM_BLOCKS = 24


class RunsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runs = FreeRuns(NUM_BLOCKS)
        self.free = set(range(NUM_BLOCKS))
        self.taken: list[BlockId] = []

    def expected(self) -> list[tuple[int, int]]:
        return list(runs_of(sorted(self.free)))

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.free)))
        lengths = sorted(length for _, length in self.expected())
        blocks = self.runs.take(count)
        assert len(blocks) == len(set(blocks)) == count
        assert set(blocks) <= self.free
        self.free -= set(blocks)
        self.taken += blocks
        enough = [length for length in lengths if length >= count]
        if enough:
            assert len(list(runs_of(blocks))) == 1
            # What is left of the smallest run that was long enough, and every other one.
            lengths.remove(enough[0])
            left = enough[0] - count
            assert sorted([*lengths, *([left] if left else [])]) == sorted(
                length for _, length in self.expected()
            )
        else:
            fewest = next(
                number for number in range(1, len(lengths) + 1) if sum(lengths[-number:]) >= count
            )
            assert len(list(runs_of(blocks))) == fewest

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        self.runs.add(blocks)
        self.free |= set(blocks)
        self.taken = [block for block in self.taken if block not in set(blocks)]

    @invariant()
    def runs_are_whole(self) -> None:
        assert len(self.runs) == len(self.free)
        assert self.runs.runs() == self.expected()


TestRuns = RunsMachine.TestCase
TestRuns.settings = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=30
)


def test_single_blocks_fill_the_gaps_and_leave_long_runs_alone() -> None:
    runs = FreeRuns(10)
    runs.take(10)
    runs.add([BlockId(block) for block in (1, 9, 4, 5, 6, 7)])
    assert runs.take(1) == [1]
    assert runs.take(1) == [9]
    assert runs.take(4) == [4, 5, 6, 7]


def test_runs_of_keeps_the_order_it_is_given() -> None:
    assert list(runs_of([3, 4, 2, 1, 7, 8, 9])) == [(3, 2), (2, 1), (1, 1), (7, 3)]
    assert list(runs_of([])) == []
