"""The worlds see it when a rule is broken: each of these is found within the seeds of CI."""

import pytest

from kvcourier.sim.draw import draw
from kvcourier.sim.worlds import quiet_logs, why_it_fails
from worlds.mutations import MUTATIONS

SEEDS = range(300)


@pytest.mark.slow
@pytest.mark.parametrize("broken", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_broken_rule_is_found(broken):
    with broken(), quiet_logs():
        # A crash of the core would be found by anything; what must show is the harm itself.
        reasons = (why_it_fails(draw(seed)) or "" for seed in SEEDS)
        assert any(reason.startswith("Violation: ") for reason in reasons)
