"""What an instance's /metrics say, in the words of the facts.

Decides which names of ours and of vLLM mean the same. Refuses to know how the text was fetched.
Pure. Nothing in the text is trusted: what cannot be read counts as not there.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvcourier.doctor.facts import Engine, Metrics

# fact: names of its samples, ours and those of vLLM with our connector; of which one side has one.
_SUMS: dict[str, tuple[str, ...]] = {
    "post_s": ("kvcourier_post_seconds_sum", "vllm:nixl_post_time_seconds_sum"),
    "posts": ("kvcourier_post_seconds_count", "vllm:nixl_post_time_seconds_count"),
    "pieces": ("kvcourier_transfer_pieces_sum", "vllm:nixl_num_descriptors_sum"),
    "num_bytes": ("kvcourier_transfer_bytes_sum", "vllm:nixl_bytes_transferred_sum"),
    "transfer_s": ("kvcourier_transfer_seconds_sum", "vllm:nixl_xfer_time_seconds_sum"),
    "runs": ("kvcourier_block_run_length_count", "kvcourier:block_run_length_count"),
    "run_blocks": ("kvcourier_block_run_length_sum", "kvcourier:block_run_length_sum"),
    "waiting": ("kvcourier:num_requests_waiting", "vllm:num_requests_waiting"),
    "outcomes": (
        "kvcourier:kv_sent_total",
        "kvcourier:kv_received_total",
        "vllm:request_success_total",
    ),
}
_USAGE = frozenset({"kvcourier:kv_cache_usage_perc", "vllm:kv_cache_usage_perc"})
_RUN_BUCKETS = frozenset({"kvcourier_block_run_length_bucket", "kvcourier:block_run_length_bucket"})
_QUEUE_BUCKETS = frozenset({"vllm:request_queue_time_seconds_bucket"})

# what went wrong: names of its counters.
_TROUBLES: dict[str, tuple[str, ...]] = {
    "failed transfers": (
        "kvcourier_failed_transfers_total",
        "vllm:nixl_num_failed_transfers_total",
    ),
    "leases expired": ("kvcourier_leases_expired_total", "vllm:nixl_num_kv_expired_reqs_total"),
    "KV that did not come": ("kvcourier:kv_receive_failures_total",),
    "registrations without a prompt": (
        "kvcourier_registrations_expired_total",
        "kvcourier:registrations_expired_total",
    ),
    "quarantines that nothing ended": (
        "kvcourier_quarantines_expired_total",
        "kvcourier:quarantines_expired_total",
    ),
    "silent peers": ("kvcourier_peers_silent_total", "kvcourier:peers_silent_total"),
    "peers not on the allow-list": (
        "kvcourier_peers_not_allowed_total",
        "kvcourier:peers_not_allowed_total",
    ),
}


def read_metrics(text: str) -> Metrics:
    """The facts in a Prometheus text."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    names = set()
    try:
        for family in text_string_to_metric_families(text):
            names.add(family.name)
            for sample in family.samples:
                samples[sample.name].append(sample)
    except (ValueError, KeyError, IndexError):
        pass  # What came before the line that cannot be read counts.
    sums = {fact: _sum(samples[name] for name in of) for fact, of in _SUMS.items()}
    usages = [_finite(each.value) for name in _USAGE for each in samples[name]]
    troubles = {
        trouble: total
        for trouble, of in _TROUBLES.items()
        if (total := _sum(samples[name] for name in of))
    }
    return Metrics(
        names=frozenset(names),
        run_buckets=_buckets(each for name in _RUN_BUCKETS for each in samples[name]),
        queue_buckets=_buckets(each for name in _QUEUE_BUCKETS for each in samples[name]),
        cache_usage=max(usages, default=None),
        troubles=troubles,
        **sums,
    )


def engine_of(tells: bool, names: Iterable[str]) -> Engine:
    """Who serves a page of metrics with these names; `tells` is whether it told of itself at
    /kvcourier/instance."""
    found = set(names)
    if tells:
        return Engine.EMBEDDED
    if not any(name.startswith("vllm:") for name in found):
        return Engine.UNKNOWN
    if any(name.startswith("kvcourier:") for name in found):
        return Engine.VLLM_WITH_COURIER
    nixl = any(name.startswith("vllm:nixl_") for name in found)
    return Engine.VLLM_WITH_NIXL if nixl else Engine.VLLM_WITHOUT


def _sum(groups: Iterable[list[Sample]]) -> float:
    return sum(_finite(sample.value) for group in groups for sample in group)


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _buckets(samples: Iterable[Sample]) -> tuple[tuple[float, float], ...]:
    """(upper bound, how many up to it), ascending, over all sides and ranks."""
    counts: dict[float, float] = defaultdict(float)
    for sample in samples:
        try:
            counts[float(sample.labels["le"])] += _finite(sample.value)
        except (KeyError, ValueError):
            continue
    return tuple(sorted(counts.items()))
