"""The scripts of benchmarks/gpu import each other by name, as they do when one is run."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(SCRIPTS))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
