"""How busy an instance says it is.

Decides which of an instance's metrics count, by their names in the embedded engine and in vLLM.
Refuses to know who asks, and what follows from it (`policy`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

FULL = 0.95
"""From this part of its KV cache in use on, one more request would soon wait for blocks."""

_REQUESTS = (
    *("kvcourier:num_requests_running", "kvcourier:num_requests_waiting"),
    *("kvcourier:num_requests_waiting_remote",),
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
)
# The last is the name in vLLM before 0.10.
_KV_USED = (
    "kvcourier:kv_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
)
_NAMES = frozenset((*_REQUESTS, *_KV_USED))


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance had to do at one moment.

    Attributes:
        num_requests: running and waiting, whoever sent them.
        kv_used: part of its KV cache in use, 0 to 1.
    """

    num_requests: int = 0
    kv_used: float = 0.0


def read_load(text: str, dp_rank: int | None = None) -> Load | None:
    """The load in a page of metrics; None if it has none of those that count.

    vLLM shows each data-parallel rank behind an address with a label of its own: with `dp_rank`
    only that one counts, else all together, and the fullest cache.

    Raises:
        ValueError: the page is no Prometheus text.
    """
    # A page has hundreds of lines, and parsing is slow.
    lines = [line for line in text.splitlines() if line.partition("{")[0].split(" ")[0] in _NAMES]
    num_requests, kv_used = 0.0, 0.0
    found = False
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if not _is_meant(sample.labels, dp_rank) or not 0 <= sample.value < 1e9:
                continue
            found = True
            if sample.name in _REQUESTS:
                num_requests += sample.value
            else:
                kv_used = max(kv_used, min(sample.value, 1.0))
    return Load(round(num_requests), kv_used) if found else None


def _is_meant(labels: Mapping[str, str], dp_rank: int | None) -> bool:
    return dp_rank is None or labels.get("engine", str(dp_rank)) == str(dp_rank)
