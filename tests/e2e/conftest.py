"""The processes that the end-to-end tests share."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from e2e.cluster import MODEL, NUM_BLOCKS, Cluster, running_cluster
from e2e.pairs import Zoo
from engine.rig import running_engine
from kvcourier.engine.engine import Engine


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every test here runs on real NIXL, and most on real processes, whose starts may take a minute
    on a busy machine."""
    for marker in ("e2e", "nixl", "slow"):
        item.add_marker(marker)
    if not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests that leave its processes alive. It ends every test idle."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as shared:
        yield shared


@pytest.fixture(scope="session")
def single() -> Iterator[Engine]:
    """One instance with the cluster's model, without transfers: what is right."""
    with running_engine(MODEL, max_batch_tokens=512, num_blocks=NUM_BLOCKS) as engine:
        yield engine


@pytest.fixture(scope="module")
def zoo() -> Iterator[Zoo]:
    """Instances in this process, in all shapes."""
    with ExitStack() as stack:
        yield Zoo(stack)
