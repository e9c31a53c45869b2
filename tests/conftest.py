"""Settings of all tests.

Runs are repeatable: Hypothesis draws the same examples every time where CI is set, and never
judges by the clock. pytest-timeout's limit is in pyproject.toml.

`make test` has two workers: one runs what starts instances, one test after the other and with the
instances that they share, the other all the rest meanwhile.
"""

import os
import signal
from typing import Any

# A shell starts what it runs in the background with SIGINT ignored, and children inherit that: the
# commands that tests interrupt would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported anywhere, here or in a child: several test processes on few cores would
# otherwise fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "local", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

START_INSTANCES = (
    "tests/e2e/",
    "tests/bench/test_cli",
    "tests/cli/test_demo",
    "tests/trial/test_cli",
)
"""How files begin whose tests start instances; the tests are marked `e2e`."""

MOSTLY_IN_PROCESS = "tests/e2e/test_token_equality.py"
"""A quarter of their time. The other worker has it, with one pair of instances of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nobody starts instances beside those of the worker that has them."""
    for item in items:
        if item.get_closest_marker("e2e") and not item.nodeid.startswith(START_INSTANCES):
            raise pytest.UsageError(f"{item.nodeid} is e2e: name its file in {__file__}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files are given to workers, and nearly all that start instances to one of them."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            if file == MOSTLY_IN_PROCESS:
                return file
            return "instances" if file.startswith(START_INSTANCES) else file

    return Scheduling(config, log)
