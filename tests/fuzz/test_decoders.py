"""A short run of `make fuzz`, which takes as long as it is told to, and what it would notice."""

import logging
from collections.abc import Iterator

import pytest

from fuzz.inputs import JSON
from fuzz.meter import MAX_BYTES, MAX_CALLS, Cost, TooCostly, measure
from fuzz.run import Tally, every_target, feed
from fuzz.targets import Target

NUM_INPUTS = 40
TARGETS = every_target()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_spoilt_inputs_are_taken_or_refused(target: Target) -> None:
    tally = Tally()
    feed(target, NUM_INPUTS, 0, tally)
    assert tally.inputs >= NUM_INPUTS and tally.taken < tally.inputs


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_examples_are_good(target: Target) -> None:
    """Or what is spoilt would be refused for what was wrong before."""
    if target.name != "router: HTTP":
        assert any(map(target.feed, target.examples))
    if target.codec is not None:
        for example in target.examples:
            again = target.codec.encode(target.codec.decode(example))
            assert target.codec.decode(again) == target.codec.decode(example)


def test_what_costs_too_much_is_noticed() -> None:
    assert measure(len, b"abc", Cost()) == 3
    with pytest.raises(TooCostly, match="calls"):
        measure(lambda payload: [len(payload) for _ in range(2 * MAX_CALLS)], b"", Cost())
    with pytest.raises(TooCostly, match="bytes"):
        measure(lambda payload: len(bytearray(2 * MAX_BYTES)), b"", Cost())


def test_what_a_decoder_must_not_raise_is_noticed() -> None:
    def careless(payload: bytes) -> bool:
        return bool(JSON.decode(payload)["a"]["b"])

    with pytest.raises((KeyError, TypeError, ValueError, RecursionError)):
        feed(Target("careless", [b'{"a": {"b": 1}}'], JSON, careless), NUM_INPUTS, 0, Tally())
