"""What vLLM asks of the class itself, and of its worker side, with vLLM's own types."""

from functools import partial

import numpy as np
import prometheus_client
import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvcourier.core.outcomes import Side
from kvcourier.core.workspace import Counted
from kvcourier.vllm_connector import CourierConnector
from kvcourier.vllm_connector.stats import (
    COUNTS,
    GAUGES,
    MAX_RUNS,
    MAX_SAMPLED_RUNS,
    SAMPLES,
    CourierStats,
    StatsRecorder,
    sizes_of,
)
from kvcourier.vllm_connector.worker_side import WorkerNews

from .engine_rig import BLOCK, HEAD_DIM, KV_HEADS, LAYERS, NUM_BLOCKS


@pytest.fixture
def instance(make):
    return make("p", "kv_both")


def test_vllm_finds_the_class_by_its_module(instance) -> None:
    config = instance.core.vllm_config.kv_transfer_config
    assert KVConnectorFactory.get_connector_class(config) is CourierConnector
    assert type(instance.scheduler.connector) is CourierConnector
    assert type(instance.worker.connector) is CourierConnector


def test_caches_as_the_cpu_backend_shapes_them(instance) -> None:
    facts = instance.worker.connector.get_handshake_metadata().facts
    assert {tensor.shape for tensor in instance.worker.caches.values()} == {
        (NUM_BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM)
    }
    assert facts.num_layers == LAYERS
    assert facts.num_kv_heads == KV_HEADS
    assert facts.cache_format == f"CPU_ATTN/float32/blocks of {BLOCK}"


@pytest.mark.parametrize("setting", ["auto", "bfloat16"])
def test_auto_is_the_element_type_that_the_cache_has(make, setting) -> None:
    instance = make("p", "kv_both", dtype="bfloat16", kv_cache_dtype=setting, exact=False)
    facts = instance.worker.connector.get_handshake_metadata().facts
    assert facts.cache_format == f"CPU_ATTN/bfloat16/blocks of {BLOCK}"


@pytest.fixture
def scraped(instance):
    """The metrics in vLLM's API process, and what a scrape finds there by name."""
    classes = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    registry = prometheus_client.CollectorRegistry()
    metrics = CourierConnector.build_prom_metrics(
        instance.core.vllm_config,
        {each: partial(each, registry=registry) for each in classes},
        ["model_name", "engine"],
        {0: ["tiny", "0"]},
    )
    labels = {"model_name": "tiny", "engine": "0"}
    return metrics, lambda name: registry.get_sample_value(name, labels)


def test_metrics_with_the_classes_of_prometheus(scraped) -> None:
    metrics, sample = scraped
    data = {key: [0.25, 0.5] for key in SAMPLES} | dict.fromkeys(COUNTS, 3)
    metrics.observe(CourierConnector.build_kv_connector_stats(data).data)
    for name, *_ in SAMPLES.values():
        assert sample(f"{name}_sum") == 0.75
        assert sample(f"{name}_count") == 2
    for name, _ in COUNTS.values():
        assert sample(f"{name}_total") == 3
    for name, *_ in GAUGES.values():
        assert sample(name) == 0


def step_of(*workers: CourierStats | None) -> CourierStats | None:
    """What vLLM makes of the records of an engine's workers in one step."""
    outputs = [
        ModelRunnerOutput.with_kv_conn_output_only(KVConnectorOutput(kv_connector_stats=stats))
        for stats in workers
    ]
    aggregator = KVOutputAggregator(expected_finished_count=len(workers))
    return aggregator.aggregate(outputs, output_rank=0).kv_connector_output.kv_connector_stats


def test_sizes_of_ranks_add_up_and_those_of_steps_do_not(scraped) -> None:
    metrics, sample = scraped
    ranks = [StatsRecorder(f"pp0tp{rank}") for rank in range(2)]
    full = {"quarantined_bytes": 100, "quarantined_perc": 0.5, "operations_in_flight": 3}
    half = {"quarantined_bytes": 50, "quarantined_perc": 0.25, "operations_in_flight": 0}
    none = dict.fromkeys(full, 0)
    steps = [
        step_of(*(rank.take({}, sizes) for rank, sizes in zip(ranks, now, strict=True)))
        for now in ((full, half), (full, half), (none, half))
    ]
    seen = []
    for step in steps:
        metrics.observe(step.data)
        seen.append([sample(f"kvcourier:{key}") for key in full])
    assert seen == [[150, 0.5, 3], [150, 0.5, 3], [50, 0.25, 0]]
    whole = steps[0].aggregate(steps[1]).aggregate(steps[2])
    assert whole.reduce()["Quarantined MB now"] == 0.0, "what vLLM's log says of all three"
    assert sizes_of(whole.data)["quarantined_bytes"] == 50


def test_sizes_are_told_until_they_are_zero_and_once_more() -> None:
    recorder = StatsRecorder("pp0tp0")
    told = [recorder.take({}, {"quarantined_bytes": size}) for size in (0, 5, 5, 0, 0, 0)]
    assert [stats and sizes_of(stats.data)["quarantined_bytes"] for stats in told] == [
        *(None, 5, 5, 0, None, None)
    ]
    assert told[3] is not None and not told[3].is_empty()


def test_what_several_workers_tell_is_told_as_one() -> None:
    outputs = [
        ModelRunnerOutput.with_kv_conn_output_only(KVConnectorOutput(kv_connector_worker_meta=news))
        for news in (None, WorkerNews(frozenset({"d1"})), WorkerNews(frozenset({"d1", "d2"})))
    ]
    told = KVOutputAggregator(expected_finished_count=3).aggregate(outputs, output_rank=1)
    assert told.kv_connector_output.kv_connector_worker_meta == WorkerNews(frozenset({"d1", "d2"}))


def test_what_the_core_counts_is_told_as_what_has_been_added() -> None:
    recorder = StatsRecorder()
    assert recorder.take({Counted.PEERS_PROBED: 4}, {}) is None, "of interest to developers only"
    taken = recorder.take({Counted.PEERS_SILENT: 2, Counted.LEASES_EXPIRED: 1}, {})
    assert taken is not None
    assert taken.data == {"num_peers_silent": 2, "num_kv_expired_reqs": 1}
    taken = recorder.take({Counted.PEERS_SILENT: 5, Counted.LEASES_EXPIRED: 1}, {})
    assert taken is not None
    assert taken.data == {"num_peers_silent": 3}


def test_samples_of_runs_are_bounded_and_show_short_and_long_ones() -> None:
    recorder = StatsRecorder()
    recorder.handed_over(Side.HOLD, np.array([3, 1, 2]))
    taken = recorder.take({}, {})
    assert taken is not None and taken.data["block_run_length"] == [1, 2, 3]
    recorder.handed_over(Side.WANT, np.arange(1, 1001))
    taken = recorder.take({}, {})
    assert taken is not None
    samples = taken.data["block_run_length"]
    assert len(samples) == MAX_RUNS
    assert (samples[0], samples[-1]) == (1, 1000)
    for _ in range(2 * MAX_SAMPLED_RUNS // MAX_RUNS):
        recorder.handed_over(Side.WANT, np.ones(1000, np.int64))
    taken = recorder.take({}, {})
    assert taken is not None and len(taken.data["block_run_length"]) == MAX_SAMPLED_RUNS
    recorder.handed_over(Side.WANT, np.array([], np.int64))
    assert recorder.take({}, {}) is None
