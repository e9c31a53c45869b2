"""What the router counts.

Decides metric names, labels and buckets, in a registry of its own. Refuses to know when. Request
and transfer ids are no labels.
"""

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcourier.router.breaker import BreakerState
from kvcourier.router.events import LegName
from kvcourier.router.sides import Side

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class RouterMetrics:
    """The router's metrics; one set per app."""

    def __init__(self, sides: Mapping[LegName, Side] | None = None) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(InstanceCollector(sides or {}))
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
            "Further dispatches after a failure that another instance may not share",
            ["leg"],
            registry=self.registry,
        )
        self.skipped = Counter(
            "kvcourier_router_skipped",
            "Calls that went to a decode instance alone, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.rebinds = Counter(
            "kvcourier_router_rebinds",
            "Prompts offered to another decode instance, by how the one before failed",
            ["kind"],
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
        self.file_errors = Counter(
            "kvcourier_router_instances_file_errors",
            "Changes of the instances file that could not be used",
            registry=self.registry,
        )
        self.turns = Counter(
            "kvcourier_router_turns",
            "Calls of conversations, by whether a turn before told of KV that is kept",
            ["state"],
            registry=self.registry,
        )
        self.states_asked = Counter(
            "kvcourier_router_states_asked",
            "Streamed turns whose answer told of no KV, by what asking on the side channel gave",
            ["outcome"],
            registry=self.registry,
        )
        self.conversations = Gauge(
            "kvcourier_router_conversations",
            "Conversations of which a turn's state is kept",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvcourier_router_in_flight", "Calls being served", registry=self.registry
        )

    def text(self) -> bytes:
        """All metrics in Prometheus text format."""
        return generate_latest(self.registry)


class InstanceCollector(Collector):
    """What is known of each instance; they come and go."""

    def __init__(self, sides: Mapping[LegName, Side]) -> None:
        self._sides = sides

    def collect(self) -> Iterator[Metric]:
        """One family per fact, one sample per instance."""
        labels = ("leg", "address")
        up = GaugeMetricFamily(
            "kvcourier_router_instance_up",
            "1 if the instance may be sent requests: reachable, not drained, breaker not open",
            labels=labels,
        )
        in_flight = GaugeMetricFamily(
            "kvcourier_router_instance_in_flight", "Legs running on the instance", labels=labels
        )
        requests = GaugeMetricFamily(
            "kvcourier_router_instance_requests",
            "Requests on the instance as far as is known: it said so, or this router sent them",
            labels=labels,
        )
        opened = CounterMetricFamily(
            "kvcourier_router_breaker_opened",
            "Times that the instance was left alone because it kept failing",
            labels=labels,
        )
        now = time.monotonic()
        for leg, side in self._sides.items():
            for one in side.instances:
                named = (leg, one.name)
                is_open = one.breaker.state(now) is BreakerState.OPEN
                up.add_metric(named, one.reachable and not one.is_draining and not is_open)
                in_flight.add_metric(named, one.work.in_flight)
                requests.add_metric(named, one.work.num_requests)
                opened.add_metric(named, one.breaker.num_opened)
        yield from (up, in_flight, requests, opened)
