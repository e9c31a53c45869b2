"""What the server and its engine count, for Prometheus.

Decides names and buckets. Refuses to know how the numbers come about. Names are vLLM's with our
prefix where they mean the same; request ids are never labels.
"""

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "kvcourier:"
_LABELS = ("model_name",)
_REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)

ENGINE_METRICS: Mapping[str, tuple[str, str]] = {
    # Numbers of `stats()`, as (name, help). A name that ends in `_total` is a counter.
    "running": ("num_requests_running", "Requests in the running batch."),
    "waiting": ("num_requests_waiting", "Requests that wait for their turn."),
    "waiting_remote": ("num_requests_waiting_remote", "Requests that wait for KV from a peer."),
    "kv_usage": ("kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1."),
    "kv_blocks": ("kv_blocks", "Blocks of the KV cache."),
    "kv_blocks_used": ("kv_blocks_used", "Blocks of the KV cache in use."),
    "kv_loans": ("kv_loans", "Requests whose blocks the KV endpoint still holds."),
    "steps": ("engine_steps_total", "Forward passes of the model."),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens computed."),
    "generated_tokens": ("generation_tokens_total", "Tokens generated."),
    "finished_requests": ("finished_requests_total", "Requests ended, for whatever reason."),
    "kv_received": ("kv_received_total", "Prompts whose KV came from a peer."),
    "kv_receive_failures": ("kv_receive_failures_total", "Prompts whose KV did not come."),
    "kv_declined": ("kv_declined_total", "Prompts whose KV was offered but not needed."),
    "first_tokens_seeded": (
        "first_tokens_seeded_total",
        "First tokens of answers that came from a peer with the prompt's KV.",
    ),
    "kv_sent": ("kv_sent_total", "Prompts whose KV was collected."),
    "kv_send_failures": ("kv_send_failures_total", "Prompts whose KV was not collected."),
    "histories": ("histories", "Answers whose KV is kept for their conversations' next turns."),
    "history_blocks": ("history_blocks", "Blocks of these; they are given up when others run out."),
    "histories_kept": ("histories_kept_total", "Answers whose KV was kept."),
    "histories_collected": ("histories_collected_total", "Kept KV that a later turn has fetched."),
    "histories_given_up": ("histories_given_up_total", "Kept KV given up for want of blocks."),
    "histories_fetched": (
        "histories_fetched_total",
        "Prompts whose history's KV was fetched.",
    ),
    "history_tokens_fetched": ("history_tokens_fetched_total", "Tokens whose KV came so."),
    "history_misses": (
        "history_misses_total",
        "Prompts whose history's KV was offered and not fetched, by reason.",
    ),
    "ignored_reports": ("ignored_reports_total", "Reports about requests unknown by then."),
    "kv_recalls": ("kv_recalls_total", "Blocks called back from prompts not finished at a peer."),
    "preemptions": ("num_preemptions_total", "Requests put back for lack of blocks."),
    "prefix_queried_tokens": ("prefix_cache_queries_total", "Tokens looked up in the cache."),
    "prefix_hit_tokens": ("prefix_cache_hits_total", "Tokens found in the prefix cache."),
}


class ServerMetrics:
    """Histograms and counters of one server, in `registry`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.now_s = clock

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(PREFIX + name, text, _LABELS, registry=registry, buckets=buckets)
            return family.labels(model_name)

        self.ttft_s = histogram(
            "time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            _REQUEST_BUCKETS_S,
        )
        self.itl_s = histogram(
            "inter_token_latency_seconds",
            "Between two consecutive token events of a request.",
            _TOKEN_BUCKETS_S,
        )
        self.tpot_s = histogram(
            "request_time_per_output_token_seconds",
            "Mean per token after the first, one value per finished request.",
            _TOKEN_BUCKETS_S,
        )
        self.e2e_s = histogram(
            "e2e_request_latency_seconds",
            "From the arrival of a request to its last token.",
            _REQUEST_BUCKETS_S,
        )
        self._finished = Counter(
            PREFIX + "request_success",
            "Answers that ended well, by reason.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        self._failed = Counter(
            PREFIX + "request_failure",
            "HTTP requests that ended with an error object, by status.",
            (*_LABELS, "status"),
            registry=registry,
        )
        self._model_name = model_name

    def count_finished(self, reason: str) -> None:
        """One answer has ended well."""
        self._finished.labels(self._model_name, reason).inc()

    def count_failed(self, status: int) -> None:
        """One HTTP request has ended with an error object."""
        self._failed.labels(self._model_name, str(status)).inc()


class AnswerTimer:
    """Observes the latencies of one answer to a request that came at `arrival_s`."""

    def __init__(self, metrics: ServerMetrics, arrival_s: float) -> None:
        self._metrics = metrics
        self._start_s = arrival_s
        self._first_s: float | None = None
        self._last_s = arrival_s
        self._num_tokens = 0

    def observe_tokens(self, num_tokens: int) -> None:
        """`num_tokens` more tokens have come, together."""
        now_s = self._metrics.now_s()
        if self._first_s is None:
            self._first_s = now_s
            self._metrics.ttft_s.observe(now_s - self._start_s)
        else:
            self._metrics.itl_s.observe(now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += num_tokens

    def observe_end(self, reason: str) -> None:
        """The answer has ended well."""
        self._metrics.e2e_s.observe(self._metrics.now_s() - self._start_s)
        if self._first_s is not None and self._num_tokens > 1:
            self._metrics.tpot_s.observe((self._last_s - self._first_s) / (self._num_tokens - 1))
        self._metrics.count_finished(reason)


class EngineCollector(Collector):
    """Shows the numbers of `stats()`, those of `ENGINE_METRICS` under the names given there.

    Other numbers keep their names: counters where the name ends in `_total`, else gauges.
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """One family per number; numbers `NAME:REASON` are one family, with that label."""
        numbers: dict[str, dict[str, float]] = {}
        for key, value in sorted(self._stats().items()):
            stat, _, reason = key.partition(":")
            numbers.setdefault(stat, {})[reason] = value
        for stat, by_reason in numbers.items():
            other = (stat, f"The engine's {stat.replace('_', ' ')}.")
            name, text = ENGINE_METRICS.get(stat, other)
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            labels = _LABELS if "" in by_reason else (*_LABELS, "reason")
            family = kind(PREFIX + name, text, labels=labels)
            for reason, value in by_reason.items():
                family.add_metric((self._model_name, reason)[: len(labels)], value)
            yield family

    def describe(self) -> list[Metric]:
        """Nothing: the names are known only once the engine runs."""
        return []
