"""A minute of `make soak`: one process is killed, and nothing is lost, leaked or wrong."""

from pathlib import Path

import pytest

from soak.run import prepared
from soak.verdict import summary, violations


@pytest.mark.timeout(400)
def test_a_minute(tmp_path: Path) -> None:
    with prepared(tmp_path, seed=2, minutes=1.0, num_clients=6) as soak:
        evidence = soak.run()
        found = violations(evidence)
        assert not found, "\n".join([*found, *summary(evidence), *soak.last_words()])
