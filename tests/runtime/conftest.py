"""Fixtures of the courier tests."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from runtime.courier_world import World


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port that is taken and answers nobody."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
