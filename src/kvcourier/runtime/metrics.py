"""Metrics of one instance's endpoint, in Prometheus form.

Decides names, units and labels; every one is listed in docs/metrics.md. Refuses to know when
anything happens. Request ids are never labels: they go into logs and stories.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvcourier.core.outcomes import Side
from kvcourier.layout.geometry import Int64Array

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BYTES = tuple(float(1 << exponent) for exponent in range(12, 37, 3))
_PIECES = tuple(float(4**exponent) for exponent in range(11))
RUN_LENGTH = "kvcourier_block_run_length"
RUN_LENGTH_HELP = "Blocks per run of consecutive ids of one request, as the engine hands them over."
RUN_LENGTHS = tuple(float(1 << exponent) for exponent in range(13))

Snapshot = tuple[Mapping[str, int], Mapping[str, int]]
"""(counters, gauges) of one rank's core, by name."""


class CourierObserver(Protocol):
    """Told by couriers of what happens, on their threads; must be quick."""

    def posted(self, operation: str, seconds: float, num_bytes: int, num_pieces: int) -> None:
        """An operation runs; `seconds` is how long posting took."""

    def completed(self, operation: str, seconds: float) -> None:
        """An operation has moved everything, so long after it was posted."""

    def failed(self, operation: str) -> None:
        """An operation could not be posted or did not complete."""

    def dropped(self, why: str) -> None:
        """A message was not delivered, or not believed."""

    def handed_over(self, side: Side, lengths: Int64Array) -> None:
        """An engine has handed blocks of a request over, in runs of these lengths."""


class RunLengths(Collector):
    """Lengths of runs of blocks, by side; thread-safe.

    A request may have a thousand runs, which the client library would take one by one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {side: np.zeros(len(RUN_LENGTHS) + 1, np.int64) for side in Side}
        self._sums = dict.fromkeys(Side, 0)

    def observe(self, side: Side, lengths: Int64Array) -> None:
        """Count the runs of one request."""
        places = np.searchsorted(RUN_LENGTHS, lengths)
        counts = np.bincount(places, minlength=len(RUN_LENGTHS) + 1)
        with self._lock:
            self._counts[side] += counts
            self._sums[side] += int(lengths.sum())

    def collect(self) -> Iterator[Metric]:
        """One family, one histogram a side."""
        metric = HistogramMetricFamily(RUN_LENGTH, RUN_LENGTH_HELP, labels=["side"])
        with self._lock:
            for side, counts in self._counts.items():
                bounds = [*map(str, RUN_LENGTHS), "+Inf"]
                buckets = list(zip(bounds, counts.cumsum().tolist(), strict=True))
                metric.add_metric([side], buckets, self._sums[side])
        yield metric


class CourierMetrics:
    """What couriers observe as it happens; one set for all ranks, thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("operation",)
        self.post_seconds = Histogram(
            "kvcourier_post_seconds",
            "Time the courier spent handing one operation to the transport.",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self.transfer_seconds = Histogram(
            "kvcourier_transfer_seconds",
            "Time from posting an operation until the transport called it done.",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self.transfer_bytes = Histogram(
            "kvcourier_transfer_bytes",
            "Bytes of one operation.",
            labels,
            buckets=_BYTES,
            registry=registry,
        )
        self.transfer_pieces = Histogram(
            "kvcourier_transfer_pieces",
            "Descriptors of one operation after merging neighbours.",
            labels,
            buckets=_PIECES,
            registry=registry,
        )
        self.failed_transfers = Counter(
            "kvcourier_failed_transfers",
            "Operations that could not be posted or did not complete.",
            labels,
            registry=registry,
        )
        self.outcomes = Counter(
            "kvcourier_outcomes",
            "Terminal outcomes reported to the engine.",
            ("outcome",),
            registry=registry,
        )
        self.dropped_messages = Counter(
            "kvcourier_dropped_messages",
            "Messages that were malformed, came from the wrong sender, or could not be sent.",
            ("why",),
            registry=registry,
        )

        self.run_lengths = RunLengths()
        registry.register(self.run_lengths)

    def posted(self, operation: str, seconds: float, num_bytes: int, num_pieces: int) -> None:
        """See CourierObserver."""
        self.post_seconds.labels(operation).observe(seconds)
        self.transfer_bytes.labels(operation).observe(num_bytes)
        self.transfer_pieces.labels(operation).observe(num_pieces)

    def completed(self, operation: str, seconds: float) -> None:
        """See CourierObserver."""
        self.transfer_seconds.labels(operation).observe(seconds)

    def failed(self, operation: str) -> None:
        """See CourierObserver."""
        self.failed_transfers.labels(operation).inc()

    def dropped(self, why: str) -> None:
        """See CourierObserver."""
        self.dropped_messages.labels(why).inc()

    def handed_over(self, side: Side, lengths: Int64Array) -> None:
        """See CourierObserver."""
        self.run_lengths.observe(side, lengths)


class CoreCollector(Collector):
    """Reads counters and gauges of the cores when somebody scrapes."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Snapshot]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """One family a name, one sample a rank."""
        snapshots = self._snapshot()
        for index, family in ((0, CounterMetricFamily), (1, GaugeMetricFamily)):
            names = sorted({name for snapshot in snapshots.values() for name in snapshot[index]})
            for name in names:
                metric = family(
                    f"kvcourier_{name}", HELP.get(name, name.replace("_", " ")), labels=["rank"]
                )
                for rank, snapshot in snapshots.items():
                    metric.add_metric([rank], snapshot[index].get(name, 0))
                yield metric


HELP: Mapping[str, str] = {
    "leases_expired": "Holds whose lease ran out before the KV was collected.",
    "histories_expired": "Histories that no later turn came for as long as they were kept.",
    "registrations_expired": "Registrations whose prompt never came to this instance.",
    "registrations_refused": "Registrations answered with a failure.",
    "registrations_resent": "Registrations sent again for want of an acknowledgement.",
    "repairs": "Failed transfers that were tried again, one way or another.",
    "integrity_checks": "Transfers whose KV was compared with what their source holds.",
    "integrity_failures": "Transfers of which it differed; none of them was accepted.",
    "stale_refused": "Messages about KV that is no longer, or never was, held or wanted.",
    "references_refused": "Requests that named other blocks than those of the KV they named.",
    "messages_ignored": "Well-formed messages that fitted no request.",
    "quarantines_expired": "Memory given back although a silent peer had never confirmed.",
    "peers_lost": "Peers that went away or were replaced.",
    "peers_silent": "Peers whose transfers failed because they gave no sign of life.",
    "peers_probed": "Closer looks at a peer that was silent, or whose connection broke.",
    "peers_not_allowed": "Peers refused because the allow-list does not name them.",
    "holds": "Prompts held for somebody.",
    "wants": "Requests waiting for somebody's KV.",
    "waiting_registrations": "Registrations whose prompt has not come yet.",
    "operations_in_flight": "Operations posted and not terminal.",
    "peers": "Peers connected or being connected.",
    "watched_peers": "Ranks of peers that transfers wait for, which are asked for signs of life.",
    "quarantined_blocks": "Blocks that nobody may use because something may still touch them.",
    "quarantined_bytes": "The memory of these blocks.",
    "staging_slots_used": "Slots of staging memory, for either direction, that are in use.",
}


def text(registry: CollectorRegistry) -> bytes:
    """The Prometheus text format of everything in the registry."""
    return generate_latest(registry)
