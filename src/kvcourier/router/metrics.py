"""What the router counts.

Decides metric names, labels and buckets, in a registry of its own. Refuses to know when. Request
and transfer ids are no labels.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class RouterMetrics:
    """The router's metrics; one set per app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "kvcourier_router_requests",
            "Calls of clients, by transfer mode and how they ended",
            ["mode", "outcome"],
            registry=self.registry,
        )
        self.failures = Counter(
            "kvcourier_router_failures",
            "Failures of a leg, by leg and kind",
            ["leg", "kind"],
            registry=self.registry,
        )
        self.retries = Counter(
            "kvcourier_router_retries",
            "Further dispatches after a failed connection",
            ["leg"],
            registry=self.registry,
        )
        self.leg_seconds = Histogram(
            "kvcourier_router_leg_seconds",
            "Time from the start of a leg to its end",
            ["leg", "mode"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.first_byte_seconds = Histogram(
            "kvcourier_router_first_byte_seconds",
            "Time from a client's call to the first byte of a good answer",
            ["mode"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvcourier_router_in_flight", "Calls being served", registry=self.registry
        )

    def text(self) -> bytes:
        """All metrics in Prometheus text format."""
        return generate_latest(self.registry)
