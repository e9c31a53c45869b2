"""Which path a WRITE takes, and what is learnt from those before it."""

from hypothesis import given
from hypothesis import strategies as st

from kvcourier.config import MIB, PathPolicy, TransferPath
from kvcourier.layout import MemoryKind
from kvcourier.runtime.path_choice import FIRST_GUESS, PathChooser

GPU = MemoryKind.VRAM
PROMPT = 1792 * MIB  # 16k tokens of a 28-layer model with 8 heads of 128, in bf16


def chosen(chooser: PathChooser, pieces: int, parcels: int, num_bytes: int) -> TransferPath:
    return chooser.choose(pieces, parcels, num_bytes)[0]


def test_scattered_blocks_go_packed_and_long_runs_directly() -> None:
    chooser = PathChooser(PathPolicy.AUTO, GPU)
    assert chosen(chooser, 57_344, 14, PROMPT) is TransferPath.PACKED
    assert chosen(chooser, 28, 14, PROMPT) is TransferPath.DIRECT


def test_a_policy_is_an_order() -> None:
    for policy in (PathPolicy.DIRECT, PathPolicy.PACKED):
        chooser = PathChooser(policy, GPU)
        for pieces in (1, 57_344):
            assert chosen(chooser, pieces, 14, PROMPT) == policy.value


def test_the_latency_of_small_transfers_is_not_taken_for_the_wire() -> None:
    chooser = PathChooser(PathPolicy.AUTO, GPU)
    # As a first contact on two GPUs was: 1.8 MB in 16 ms, of which posting took four.
    for _ in range(20):
        chooser.learn_direct(28, 1_835_008, 0.004, 0.016)
    assert chooser.costs.wire_s == FIRST_GUESS[GPU].wire_s
    _, estimates = chooser.choose(57_344, 14, PROMPT)
    assert estimates[TransferPath.PACKED] < 0.02


def test_many_pieces_that_move_while_they_are_posted_say_nothing_of_the_wire() -> None:
    chooser = PathChooser(PathPolicy.AUTO, GPU)
    for _ in range(20):
        chooser.learn_direct(57_344, PROMPT, 0.3, 0.301)
    assert chooser.costs.wire_s == FIRST_GUESS[GPU].wire_s
    assert abs(chooser.costs.post_s - 0.3 / 57_344) < 0.02 * 0.3 / 57_344


def test_a_slower_wire_is_learnt() -> None:
    chooser = PathChooser(PathPolicy.AUTO, GPU)
    for _ in range(40):
        chooser.learn_direct(28, PROMPT, 0.0002, 0.1)
    assert abs(chooser.costs.wire_s * PROMPT - 0.1) < 0.002


def test_what_a_crowd_has_suffered_does_not_send_a_lone_one_the_slow_way() -> None:
    """As on two GPUs: a burst of prompts shared four slots, two parcels took a second, and from
    then on every scattered prompt went directly, in ten times the time."""
    chooser = PathChooser(PathPolicy.AUTO, GPU)
    for _ in range(50):
        chooser.learn_packed(2, 224 * MIB, 1.0)
    assert chosen(chooser, 57_344, 14, PROMPT) is TransferPath.PACKED


def test_a_path_that_is_not_taken_is_tried_again_in_the_end() -> None:
    chooser = PathChooser(PathPolicy.AUTO, GPU)
    pieces = 5000
    assert chosen(chooser, pieces, 14, PROMPT) is TransferPath.PACKED
    for _ in range(50):
        chooser.learn_packed(2, 224 * MIB, 1.0)
    choices = [chosen(chooser, pieces, 14, PROMPT) for _ in range(100)]
    assert choices[0] is TransferPath.DIRECT
    assert choices[-1] is TransferPath.PACKED


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(1, 100_000), st.integers(1, 1 << 33), st.floats(1e-6, 10)
        ),
        max_size=20,
    )
)
def test_no_measurement_makes_a_cost_negative_or_endless(measured) -> None:
    chooser = PathChooser(PathPolicy.AUTO, GPU)
    for packed, pieces, num_bytes, total_s in measured:
        if packed:
            chooser.learn_packed(pieces, num_bytes, total_s)
        else:
            chooser.learn_direct(pieces, num_bytes, total_s / 3, total_s)
    for estimate in chooser.choose(100, 10, 1 << 20)[1].values():
        assert 0 < estimate < 1e9
