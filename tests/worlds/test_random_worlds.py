"""Three hundred random worlds hold; the same ones as `make worlds SEEDS=0:300`."""

import pytest

from kvcourier.sim.worlds import run_seeds

SEEDS = range(300)
A_PART = 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + A_PART] for at in range(0, len(SEEDS), A_PART)], ids=str
)
def test_random_worlds_hold(seeds):
    assert not [str(failure) for failure in run_seeds(seeds)]
