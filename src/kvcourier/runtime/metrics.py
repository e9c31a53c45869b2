"""Metrics of one instance's endpoint, in Prometheus form.

Decides names, units and labels; every one is listed in docs/metrics.md. Refuses to know when
anything happens. Request ids are never labels: they go into logs and stories.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BYTES = tuple(float(1 << exponent) for exponent in range(12, 37, 3))
_PIECES = tuple(float(4**exponent) for exponent in range(11))

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
                    f"kvcourier_{name}", _HELP.get(name, name.replace("_", " ")), labels=["rank"]
                )
                for rank, snapshot in snapshots.items():
                    metric.add_metric([rank], snapshot[index].get(name, 0))
                yield metric


_HELP = {
    "leases_expired": "Holds whose lease ran out before the KV was collected.",
    "registrations_expired": "Registrations whose prompt never came to this instance.",
    "registrations_refused": "Registrations answered with a failure.",
    "registrations_resent": "Registrations sent again for want of an acknowledgement.",
    "stale_refused": "Messages about KV that is no longer, or never was, held or wanted.",
    "messages_ignored": "Well-formed messages that fitted no request.",
    "quarantines_expired": "Memory given back although a silent peer had never confirmed.",
    "peers_lost": "Peers that went away or were replaced.",
    "holds": "Prompts held for somebody.",
    "wants": "Requests waiting for somebody's KV.",
    "waiting_registrations": "Registrations whose prompt has not come yet.",
    "operations_in_flight": "Operations posted and not terminal.",
    "peers": "Peers connected or being connected.",
    "quarantined_blocks": "Blocks that nobody may use because something may still touch them.",
}


def text(registry: CollectorRegistry) -> bytes:
    """The Prometheus text format of everything in the registry."""
    return generate_latest(registry)
