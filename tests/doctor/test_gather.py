"""What is read from pages and dates, and that nothing in them is trusted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.doctor.exposition import engine_of, read_metrics
from kvcourier.doctor.facts import ClockOffset, Engine
from kvcourier.doctor.gather import read_place
from kvcourier.doctor.pages import clock_offset

KEYS = ("engine_id", "host", "port")


def test_ours_and_vllms_names_are_the_same_facts() -> None:
    ours = read_metrics(
        """# TYPE kvcourier_post_seconds histogram
kvcourier_post_seconds_bucket{operation="READ",le="+Inf"} 4
kvcourier_post_seconds_sum{operation="READ"} 0.5
kvcourier_post_seconds_count{operation="READ"} 4
# TYPE kvcourier_leases_expired counter
kvcourier_leases_expired_total{rank="pp0tp0"} 2
kvcourier_leases_expired_total{rank="pp0tp1"} 1
# TYPE kvcourier:kv_cache_usage_perc gauge
kvcourier:kv_cache_usage_perc{model_name="m"} 0.25
"""
    )
    vllms = read_metrics(
        """# TYPE vllm:nixl_post_time_seconds histogram
vllm:nixl_post_time_seconds_sum{engine="0"} 0.5
vllm:nixl_post_time_seconds_count{engine="0"} 4
# TYPE vllm:nixl_num_kv_expired_reqs counter
vllm:nixl_num_kv_expired_reqs_total{engine="0"} 3
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""
    )
    for each in (ours, vllms):
        assert (each.post_s, each.posts, each.cache_usage) == (0.5, 4, 0.25)
        assert each.troubles == {"leases expired": 3}


def test_run_lengths_of_all_sides_and_ranks() -> None:
    metrics = read_metrics(
        """# TYPE kvcourier_block_run_length histogram
kvcourier_block_run_length_bucket{side="hold",le="1.0"} 2
kvcourier_block_run_length_bucket{side="want",le="1.0"} 1
kvcourier_block_run_length_bucket{side="hold",le="+Inf"} 5
kvcourier_block_run_length_count{side="hold"} 5
kvcourier_block_run_length_sum{side="hold"} 40
"""
    )
    assert metrics.run_buckets[0] == (1.0, 3.0) and metrics.run_buckets[-1][1] == 5.0
    assert metrics.run_blocks / metrics.runs == 8


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert read_metrics(text).post_s >= 0


@pytest.mark.parametrize(
    ("tells", "names", "expected"),
    [
        (True, (), Engine.EMBEDDED),
        (False, ("vllm:num_requests_waiting", "kvcourier:repairs"), Engine.VLLM_WITH_COURIER),
        (False, ("vllm:nixl_bytes_transferred",), Engine.VLLM_WITH_NIXL),
        (False, ("vllm:num_requests_waiting",), Engine.VLLM_WITHOUT),
        (False, ("http_requests",), Engine.UNKNOWN),
    ],
)
def test_who_serves_a_page(tells: bool, names: tuple[str, ...], expected: Engine) -> None:
    assert engine_of(tells, names) is expected


def test_an_http_date_bounds_the_difference_of_clocks() -> None:
    date = "Tue, 14 Nov 2023 22:13:20 GMT"  # 1,700,000,000
    offset = clock_offset(date, 1_699_999_940.0, 1_699_999_940.5)
    assert offset == ClockOffset(59.5, 62.0)
    assert offset.least_s == 59.5
    behind = clock_offset(date, 1_700_000_060.0, 1_700_000_060.1)
    assert behind is not None and behind.least_s == 58.0


@given(st.floats(1e9, 2e9), st.floats(-100, 100), st.floats(0, 0.9), st.floats(0, 3))
def test_the_true_difference_is_always_among_the_possible(
    now: float, skew: float, stale: float, took: float
) -> None:
    import email.utils

    written = now + took / 2 + skew
    date = email.utils.formatdate(written - stale, usegmt=True)
    offset = clock_offset(date, now, now + took)
    assert offset is not None
    assert offset.low_s - 1e-6 <= skew <= offset.high_s + 1e-6


@given(st.text(max_size=40))
def test_what_is_no_date_tells_nothing(text: str) -> None:
    clock_offset(text, 0.0, 1.0)


@given(
    st.dictionaries(
        st.sampled_from(KEYS),
        st.none() | st.integers() | st.text() | st.booleans() | st.lists(st.text()),
    )
)
def test_a_place_is_whole_or_none(body: dict[str, object]) -> None:
    place = read_place(body, KEYS, "a test")
    assert place is None or (0 < place.port < 65536 and isinstance(place.host, str))
