"""The fleet on virtual time: the router's own decisions, in a world where decode instances fail."""

import pytest

from kvcourier.sim.binding import ROWS, run

NUM_CALLS = 24
SEED = 3


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_every_call_is_served_and_a_run_can_be_repeated(row: str) -> None:
    """That each answer has the right tokens, `run` itself requires."""
    first = run(SEED, ROWS[row], NUM_CALLS)
    assert len(first.ttft_s) == NUM_CALLS and not first.num_failed
    assert run(SEED, ROWS[row], NUM_CALLS) == first


@pytest.mark.slow
def test_binding_anew_saves_prefills() -> None:
    early, near = (run(SEED, ROWS[row], 60) for row in ("push, early", "push, near"))
    assert near.num_rebinds > 0
    assert near.num_anew < early.num_anew
