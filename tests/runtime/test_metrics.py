"""Every metric is on the page, with its type and labels, and the text is Prometheus's."""

from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from endpoint_rig import Rig
from kvcourier.core.workspace import Counted
from kvcourier.engine.server.metrics import ENGINE_METRICS, PREFIX, ServerMetrics
from kvcourier.router.metrics import InstanceCollector, RouterMetrics
from kvcourier.runtime.metrics import RUN_LENGTH, CoreCollector, CourierMetrics, Snapshot, text
from kvcourier.runtime.reports import Outcome
from kvcourier.transport.memory import MemoryNetwork, MemoryTransport

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


class Described(NamedTuple):
    """A metric as a reader of the page, or of a scrape, knows it."""

    name: str
    type: str
    labels: tuple[str, ...]


def on_the_page() -> list[Described]:
    rows = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `kvcourier"):
            name, kind, labels, meaning = cells
            assert meaning, f"{name}: no meaning"
            named = tuple(each.strip("` ") for each in labels.split(",") if each)
            rows.append(Described(name.strip("`"), kind, named))
    return rows


def of_instruments(registry: CollectorRegistry) -> set[Described]:
    """What counters, gauges and histograms of a registry declare."""
    return {
        Described(
            each._name + ("_total" if each._type == "counter" else ""),
            each._type,
            tuple(each._labelnames),
        )
        for each in list(registry._collector_to_names)
        if hasattr(each, "_labelnames")
    }


def of_scrape(payload: bytes) -> dict[str, str]:
    """Types by name, as Prometheus reads them."""
    families = text_string_to_metric_families(payload.decode())
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in families
        # When a series was first seen; the client library adds it to each.
        if not family.name.endswith("_created")
    }


@pytest.fixture
def rigs():
    network = MemoryNetwork()

    def factory(name: str) -> MemoryTransport:
        return MemoryTransport(network, name)

    with Rig("p", factory, tp_size=2) as prefill, Rig("d", factory, tp_size=2) as decode:
        yield prefill, decode


@pytest.fixture
def rig(rigs):
    return rigs[0]


BY_REASON = {"history_misses"}
"""Of an engine's counters, those that it tells in parts."""


def in_the_code(rig: Rig) -> set[Described]:
    couriers = CollectorRegistry()
    CourierMetrics(couriers)
    server = CollectorRegistry()
    ServerMetrics(server, "m")
    (_, gauges), *_ = rig.endpoint.snapshots().values()
    return {
        *of_instruments(couriers),
        Described(RUN_LENGTH, "histogram", ("side",)),
        *(Described(f"kvcourier_{name}_total", "counter", ("rank",)) for name in Counted),
        *(Described(f"kvcourier_{name}", "gauge", ("rank",)) for name in gauges),
        *of_instruments(server),
        *(
            Described(
                PREFIX + name,
                "counter" if name.endswith("_total") else "gauge",
                ("model_name", "reason") if stat in BY_REASON else ("model_name",),
            )
            for stat, (name, _) in ENGINE_METRICS.items()
        ),
        *of_instruments(RouterMetrics().registry),
        *of_instances(),
    }


def of_instances() -> set[Described]:
    """What a router shows of each of its instances."""
    return {
        Described(
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            tuple(family._labelnames),
        )
        for family in InstanceCollector({}).collect()
    }


def test_the_page_lists_every_metric_and_no_other(rig):
    listed, existing = on_the_page(), in_the_code(rig)
    assert len(listed) == len(set(listed)), "a metric is listed twice"
    missing, stale = existing - set(listed), set(listed) - existing
    assert not missing, f"add to docs/metrics.md: {sorted(missing)}"
    assert not stale, f"take from docs/metrics.md: {sorted(stale)}"


def test_a_transfer_shows_up_in_the_text(rigs):
    prefill, decode = rigs
    prefill.hold("p1", "t1")
    decode.expect("d1", prefill.prefill("p1", "hello", [5, 0, 3], 40))
    decode.receive("d1", [6, 1, 4], 0, 40)
    decode.wait_for("d1", Outcome.RECEIVED, Outcome.RELEASED)
    prefill.wait_for("p1", Outcome.SENT, Outcome.RELEASED)
    page = {each.name: each.type for each in on_the_page()}
    for rig, outcome in ((prefill, "sent"), (decode, "received")):
        registry = rig.endpoint.registry
        scraped = of_scrape(text(registry))
        assert scraped.items() <= page.items()
        for told in (outcome, "released"):
            assert registry.get_sample_value("kvcourier_outcomes_total", {"outcome": told}) == 1
        for rank in ("pp0tp0", "pp0tp1"):
            assert registry.get_sample_value("kvcourier_holds", {"rank": rank}) == 0
    for rig, side, runs in ((prefill, "hold", 3), (decode, "want", 3)):
        counted = {
            what: rig.endpoint.registry.get_sample_value(f"{RUN_LENGTH}_{what}", {"side": side})
            for what in ("count", "sum")
        }
        assert counted == {"count": 2 * runs, "sum": 2 * 3}, "3 blocks on each of two ranks"
    registry, reads = decode.endpoint.registry, {"operation": "READ"}
    for name in ("post_seconds", "transfer_seconds", "transfer_bytes", "transfer_pieces"):
        assert registry.get_sample_value(f"kvcourier_{name}_count", reads) == 2, "one a rank"
    # 3 whole blocks of 16 tokens, 2 layers, K and V, 4 heads of 4 lanes of 2 bytes, both ranks.
    num_bytes = 3 * 16 * 2 * 2 * 4 * 4 * 2
    assert registry.get_sample_value("kvcourier_transfer_bytes_sum", reads) == num_bytes


def test_every_core_metric_has_a_help_of_its_own(rig):
    (_, gauges), *_ = rig.endpoint.snapshots().values()
    snapshot: Snapshot = (dict.fromkeys(map(str, Counted), 1), gauges)
    for family in CoreCollector(lambda: {"pp0tp0": snapshot}).collect():
        assert family.documentation != family.name.removeprefix("kvcourier_").replace("_", " ")
        assert family.documentation.endswith(".")


def test_a_name_that_one_rank_lacks_counts_zero_there():
    collector = CoreCollector(lambda: {"a": ({"peers_lost": 3}, {}), "b": ({}, {"holds": 2})})
    samples = {
        (sample.name, sample.labels["rank"]): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
    assert samples == {
        ("kvcourier_peers_lost_total", "a"): 3,
        ("kvcourier_peers_lost_total", "b"): 0,
        ("kvcourier_holds", "a"): 0,
        ("kvcourier_holds", "b"): 2,
    }


def test_no_label_holds_a_request(rig):
    for each in in_the_code(rig):
        assert not {"request_id", "transfer_id", "engine_id"} & set(each.labels), each


def test_core_counters_start_at_zero(rig):
    value = rig.endpoint.registry.get_sample_value(
        "kvcourier_leases_expired_total", {"rank": "pp0tp0"}
    )
    assert value == 0
