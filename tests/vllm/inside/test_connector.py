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
    MAX_RUNS,
    MAX_SAMPLED_RUNS,
    SAMPLES,
    StatsRecorder,
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


def test_metrics_with_the_classes_of_prometheus(instance) -> None:
    classes = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    registry = prometheus_client.CollectorRegistry()
    metrics = CourierConnector.build_prom_metrics(
        instance.core.vllm_config,
        {each: partial(each, registry=registry) for each in classes},
        ["model_name", "engine"],
        {0: ["tiny", "0"]},
    )
    data = {key: [0.25, 0.5] for key in SAMPLES} | dict.fromkeys(COUNTS, 3)
    metrics.observe(CourierConnector.build_kv_connector_stats(data).data)
    labels = {"model_name": "tiny", "engine": "0"}
    for name, *_ in SAMPLES.values():
        assert registry.get_sample_value(f"{name}_sum", labels) == 0.75
        assert registry.get_sample_value(f"{name}_count", labels) == 2
    for name, _ in COUNTS.values():
        assert registry.get_sample_value(f"{name}_total", labels) == 3


def test_what_several_workers_tell_is_told_as_one() -> None:
    outputs = [
        ModelRunnerOutput.with_kv_conn_output_only(KVConnectorOutput(kv_connector_worker_meta=news))
        for news in (None, WorkerNews(frozenset({"d1"})), WorkerNews(frozenset({"d1", "d2"})))
    ]
    told = KVOutputAggregator(expected_finished_count=3).aggregate(outputs, output_rank=1)
    assert told.kv_connector_output.kv_connector_worker_meta == WorkerNews(frozenset({"d1", "d2"}))


def test_what_the_core_counts_is_told_as_what_has_been_added() -> None:
    recorder = StatsRecorder()
    assert recorder.take({Counted.PEERS_PROBED: 4}) is None, "of interest to developers only"
    taken = recorder.take({Counted.PEERS_SILENT: 2, Counted.LEASES_EXPIRED: 1})
    assert taken is not None
    assert (taken.data["num_peers_silent"], taken.data["num_kv_expired_reqs"]) == (2, 1)
    taken = recorder.take({Counted.PEERS_SILENT: 5, Counted.LEASES_EXPIRED: 1})
    assert taken is not None
    assert (taken.data["num_peers_silent"], taken.data["num_kv_expired_reqs"]) == (3, 0)


def test_samples_of_runs_are_bounded_and_show_short_and_long_ones() -> None:
    recorder = StatsRecorder()
    recorder.handed_over(Side.HOLD, np.array([3, 1, 2]))
    taken = recorder.take({})
    assert taken is not None and taken.data["block_run_length"] == [1, 2, 3]
    recorder.handed_over(Side.WANT, np.arange(1, 1001))
    taken = recorder.take({})
    assert taken is not None
    samples = taken.data["block_run_length"]
    assert len(samples) == MAX_RUNS
    assert (samples[0], samples[-1]) == (1, 1000)
    for _ in range(2 * MAX_SAMPLED_RUNS // MAX_RUNS):
        recorder.handed_over(Side.WANT, np.ones(1000, np.int64))
    taken = recorder.take({})
    assert taken is not None and len(taken.data["block_run_length"]) == MAX_SAMPLED_RUNS
    recorder.handed_over(Side.WANT, np.array([], np.int64))
    assert recorder.take({}) is None
