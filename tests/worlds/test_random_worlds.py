"""Three hundred random worlds hold; the same ones as `make worlds SEEDS=0:300`."""

import pytest

from kvcourier.sim.scheduler import SimScheduler
from kvcourier.sim.worlds import run_seeds

SEEDS = range(300)
A_PART = 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + A_PART] for at in range(0, len(SEEDS), A_PART)], ids=str
)
def test_random_worlds_hold(seeds):
    assert not [str(failure) for failure in run_seeds(seeds)]


def test_random_worlds_are_short_of_blocks_on_both_sides(monkeypatch):
    """Some of them call blocks back, and the requests that lent them come to their end."""
    given_back = []
    recalled = SimScheduler.recalled

    def note(self, sequence):
        given_back.append(sequence.request_id)
        recalled(self, sequence)

    monkeypatch.setattr(SimScheduler, "recalled", note)
    for seed in SEEDS:
        assert not run_seeds([seed])
        if len(given_back) >= 3:
            return
    raise AssertionError("no world is short of blocks")
