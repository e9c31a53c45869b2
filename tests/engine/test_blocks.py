"""The block pool against a naive model that knows what every block really holds."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from kvcourier.engine.blocks import BlockKey, BlockPool, extend_keys
from kvcourier.engine.free_runs import runs_of
from kvcourier.ids import BlockId

BLOCK_SIZE = 2
NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """`content` is what each block holds: all tokens up to its end, or nothing complete."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.content: dict[BlockId, tuple[int, ...]] = {}
        self.owners: dict[int, list[BlockId]] = {}
        self.next_table = 0
        # Free blocks whose prefix can still be found, next to be evicted first.
        self.cached: list[BlockId] = []
        self.keys: dict[BlockId, BlockKey] = {}

    @initialize(fragment=st.sampled_from([0.0, 0.5, 1.0]))
    def begin(self, fragment: float) -> None:
        self.pool = BlockPool(NUM_BLOCKS, fragment)

    @rule(
        target=tables,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        is_written=st.booleans(),
    )
    def start(self, tokens: list[int], is_written: bool) -> int:
        keys = keys_of(tokens)
        shared = self.pool.match(keys)
        for index, block in enumerate(shared):
            assert self.content[block] == tuple(tokens[: (index + 1) * BLOCK_SIZE])
        num_new = -(-len(tokens) // BLOCK_SIZE) - len(shared)
        free_before = self.pool.num_free
        blocks = self.pool.allocate(shared, num_new)
        idle = set(range(NUM_BLOCKS)) - {b for table in self.owners.values() for b in table}
        available = len(idle - set(shared))
        assert (blocks is None) == (num_new > available)
        table = self.next_table
        self.next_table += 1
        if blocks is None:
            assert self.pool.num_free == free_before
            self.owners[table] = []
            return table
        assert blocks[: len(shared)] == shared
        fresh = blocks[len(shared) :]
        assert set(fresh) <= idle
        self.cached = [block for block in self.cached if block not in shared]
        num_evicted = max(0, num_new - (available - len(self.cached)))
        evicted, self.cached = self.cached[:num_evicted], self.cached[num_evicted:]
        assert not set(fresh) & set(self.cached), "a prefix was evicted out of turn"
        for block in evicted:
            del self.keys[block]
        self.owners[table] = blocks
        for index, block in enumerate(blocks):
            if index < len(shared):
                continue
            prefix = tuple(tokens[: (index + 1) * BLOCK_SIZE])
            self.content[block] = prefix if is_written else ()
            if is_written and index < len(keys):
                self.pool.publish(block, keys[index])
                if keys[index] not in self.keys.values():
                    self.keys[block] = keys[index]
        return table

    @rule(table=consumes(tables))
    def finish(self, table: int) -> None:
        blocks = self.owners.pop(table)
        self.pool.release(blocks)
        owned = {block for each in self.owners.values() for block in each}
        self.cached += [b for b in reversed(blocks) if b in self.keys and b not in owned]

    @invariant()
    def blocks_are_conserved(self) -> None:
        owned = {block for table in self.owners.values() for block in table}
        assert self.pool.num_free == NUM_BLOCKS - len(owned)
        for table in self.owners.values():
            assert len(set(table)) == len(table)

    @invariant()
    def what_was_not_evicted_is_found(self) -> None:
        for block, key in self.keys.items():
            assert self.pool.match([key]) == [block]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=40
)


def keys_of(tokens: list[int]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    extend_keys(keys, tokens, BLOCK_SIZE)
    return keys


def test_keys_cover_full_blocks_and_grow_with_the_tokens() -> None:
    tokens = [5, 6, 7, 8, 9]
    keys = keys_of(tokens)
    assert len(keys) == 2
    extend_keys(keys, [*tokens, 1], BLOCK_SIZE)
    assert keys == keys_of([*tokens, 1])
    assert keys_of([0, 6, 7, 8])[1] != keys[1]  # the same tokens after others


def test_least_recently_used_prefix_is_evicted_end_first() -> None:
    pool = BlockPool(4)
    for tokens in ([1, 1, 2, 2], [3, 3, 4, 4]):
        blocks = pool.allocate((), 2)
        assert blocks is not None
        for block, key in zip(blocks, keys_of(tokens), strict=True):
            pool.publish(block, key)
        pool.release(blocks)
    assert pool.allocate((), 1) is not None
    assert len(pool.match(keys_of([1, 1, 2, 2]))) == 1
    assert len(pool.match(keys_of([3, 3, 4, 4]))) == 2


def test_unpublished_blocks_are_reused_before_any_prefix_is_evicted() -> None:
    pool = BlockPool(3)
    cached = pool.allocate((), 1)
    assert cached is not None
    pool.publish(cached[0], keys_of([1, 1])[0])
    pool.release(cached)
    for _ in range(5):
        plain = pool.allocate((), 2)
        assert plain is not None
        pool.release(plain)
    assert pool.match(keys_of([1, 1])) == cached


def test_evicted_prefixes_are_handed_out_as_runs() -> None:
    pool = BlockPool(8)
    for tokens in ([1] * 8, [2] * 8):
        blocks = pool.allocate((), 4)
        assert blocks is not None
        for block, key in zip(blocks, keys_of(tokens), strict=True):
            pool.publish(block, key)
        pool.release(blocks)
    for expected in ([1, 2, 3], [6, 7, 0]):
        blocks = pool.allocate((), 3)
        assert blocks == expected


@given(fragment=st.floats(0, 1), counts=st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_fragment_shuffles_its_part_of_every_allocation(fragment: float, counts: list[int]) -> None:
    whole, cut = BlockPool(512), BlockPool(512, fragment)
    for count in counts:
        expected, found = whole.allocate((), count), cut.allocate((), count)
        assert expected is not None and found is not None
        assert sorted(expected) == sorted(found)
        num_moved = sum(a != b for a, b in zip(expected, found, strict=True))
        assert num_moved <= round(fragment * count)


def test_a_whole_fragment_leaves_hardly_any_runs_and_none_leaves_one() -> None:
    for fragment, at_least, at_most in ((0.0, 1, 1), (0.5, 300, 450), (1.0, 450, 512)):
        pool, again = BlockPool(1024, fragment), BlockPool(1024, fragment)
        blocks = pool.allocate((), 512)
        assert blocks is not None
        assert blocks == again.allocate((), 512), "the order is the same in every run"
        assert at_least <= len(list(runs_of(blocks))) <= at_most
