"""Fixtures of the courier tests."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from endpoint_rig import DIRECT
from runtime.courier_world import ONE_PARCEL, World


@pytest.fixture(params=[DIRECT, ONE_PARCEL], ids=["direct", "packed"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, request.param)


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port whose owner takes connections and answers nobody."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]
