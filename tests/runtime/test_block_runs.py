"""Runs of blocks against a walk along the list, and their histogram against a plain count."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvcourier.core.events import BlocksReserved, HoldBegun, PrefillFinished
from kvcourier.core.outcomes import Side
from kvcourier.ids import BlockId, HoldId, RequestId
from kvcourier.layout import TokenSpan
from kvcourier.runtime.block_runs import hand_over, run_lengths
from kvcourier.runtime.metrics import RUN_LENGTH, RUN_LENGTHS, CourierMetrics

GROUPS = st.lists(st.lists(st.integers(0, 12), max_size=40), max_size=3)


def walked(groups: list[list[int]]) -> list[int]:
    lengths: list[int] = []
    for group in groups:
        for at, block in enumerate(group):
            if at and block == group[at - 1] + 1:
                lengths[-1] += 1
            else:
                lengths.append(1)
    return lengths


@given(groups=GROUPS)
def test_runs_are_those_of_a_walk_along_each_group(groups: list[list[int]]) -> None:
    assert run_lengths(groups).tolist() == walked(groups)


def test_each_side_hands_over_by_its_own_event() -> None:
    blocks = (tuple(map(BlockId, (4, 5, 6, 1))),)
    request, span = RequestId("r"), TokenSpan(0, 64)
    for side, event in (
        (Side.HOLD, PrefillFinished(request, blocks, 64)),
        (Side.WANT, BlocksReserved(request, blocks, span)),
    ):
        found = hand_over(event)
        assert found is not None
        assert (found[0], found[1].tolist()) == (side, [3, 1])
    assert hand_over(HoldBegun(request, HoldId("h"), None)) is None


@given(groups=st.lists(st.lists(st.integers(1, 5000), max_size=20), max_size=4))
def test_histogram_counts_every_run_once(groups: list[list[int]]) -> None:
    registry = CollectorRegistry()
    metrics = CourierMetrics(registry)
    lengths: list[int] = []
    for starts in groups:
        request = [[block for start in starts for block in range(start, start + start % 40 + 1)]]
        metrics.handed_over(Side.WANT, run_lengths(request))
        lengths += walked(request)

    def value(what: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"{RUN_LENGTH}_{what}", labels)

    assert value("count", side="want") == len(lengths)
    assert value("sum", side="want") == sum(lengths)
    assert value("count", side="hold") == 0
    for bound in RUN_LENGTHS:
        expected = sum(length <= bound for length in lengths)
        assert value("bucket", side="want", le=str(bound)) == expected
