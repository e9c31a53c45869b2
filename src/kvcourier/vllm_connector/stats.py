"""Statistics on their way from a worker to vLLM's `/metrics`.

Decides which of vLLM's `vllm:nixl_*` metrics our events fill, and what is told of the moment.
Refuses to know when they happen.

A worker records, vLLM carries the record of each step to its API process and observes it there.
Where it has several API processes, each record goes to one of them. So a record tells of all that
is not zero at the moment, and what it does not tell of is zero: nobody has to have seen those
before it.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvcourier.core.histories import Miss
from kvcourier.core.outcomes import Side
from kvcourier.core.workspace import Counted
from kvcourier.layout.geometry import Int64Array
from kvcourier.runtime.metrics import HELP, RUN_LENGTH_HELP, RUN_LENGTHS
from kvcourier.vllm_connector.turns import miss_key

_SECONDS = [0.0005, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5, 1.0, 3.0, 5.0]
_BYTES = [float(1 << exponent) for exponent in range(10, 37, 2)]
_PIECES = [float(4**exponent) for exponent in range(9)]

SAMPLES: Mapping[str, tuple[str, str, list[float]]] = {
    "transfer_duration": (
        "vllm:nixl_xfer_time_seconds",
        "Time from posting a transfer until it was done.",
        _SECONDS,
    ),
    "post_duration": (
        "vllm:nixl_post_time_seconds",
        "Time the courier thread spent posting a transfer.",
        _SECONDS,
    ),
    "bytes_transferred": ("vllm:nixl_bytes_transferred", "Bytes of one transfer.", _BYTES),
    "num_descriptors": ("vllm:nixl_num_descriptors", "Descriptors of one transfer.", _PIECES),
    "block_run_length": ("kvcourier:block_run_length", RUN_LENGTH_HELP, list(RUN_LENGTHS)),
}
"""Key of a list of samples, to the histogram it fills: name, help, buckets."""

_FROM_CORE: Mapping[str, Counted] = {
    "num_kv_expired_reqs": Counted.LEASES_EXPIRED,
    "num_notifications_after_expiry": Counted.STALE_REFUSED,
    # What vLLM has no name for has ours.
    "num_histories_expired": Counted.HISTORIES_EXPIRED,
    "num_registrations_expired": Counted.REGISTRATIONS_EXPIRED,
    "num_registrations_refused": Counted.REGISTRATIONS_REFUSED,
    "num_references_refused": Counted.REFERENCES_REFUSED,
    "num_repairs": Counted.REPAIRS,
    "num_integrity_checks": Counted.INTEGRITY_CHECKS,
    "num_integrity_failures": Counted.INTEGRITY_FAILURES,
    "num_quarantines_expired": Counted.QUARANTINES_EXPIRED,
    "num_peers_lost": Counted.PEERS_LOST,
    "num_peers_silent": Counted.PEERS_SILENT,
    "num_peers_not_allowed": Counted.PEERS_NOT_ALLOWED,
}
"""Key of a number, to what the core counts under it."""

COUNTS: Mapping[str, tuple[str, str]] = {
    "num_failed_transfers": (
        "vllm:nixl_num_failed_transfers",
        "Transfers that could not be posted or did not complete.",
    ),
    "num_failed_notifications": (
        "vllm:nixl_num_failed_notifications",
        "Messages that were not delivered, or not believed.",
    ),
    "num_kv_expired_reqs": (
        "vllm:nixl_num_kv_expired_reqs",
        "Prompts whose lease ran out before their KV was collected.",
    ),
    "num_notifications_after_expiry": (
        "vllm:nixl_num_notifications_after_expiry",
        "Messages about KV that was no longer held or wanted.",
    ),
    "num_histories_kept": ("kvcourier:histories_kept", "Answers whose KV was kept."),
    "num_histories_collected": (
        "kvcourier:histories_collected",
        "Kept KV that a later turn has fetched.",
    ),
    "num_histories_given_up": (
        "kvcourier:histories_given_up",
        "Kept KV given up for want of blocks.",
    ),
    "num_histories_expired": ("kvcourier:histories_expired", HELP[Counted.HISTORIES_EXPIRED]),
    "num_histories_fetched": (
        "kvcourier:histories_fetched",
        "Prompts whose history's KV was fetched.",
    ),
    **{
        miss_key(miss): (
            f"kvcourier:history_misses_{miss.value}",
            f"Prompts whose history's KV was offered and not fetched: {miss.value}.",
        )
        for miss in Miss
    },
    "num_registrations_expired": (
        "kvcourier:registrations_expired",
        HELP[Counted.REGISTRATIONS_EXPIRED],
    ),
    "num_registrations_refused": (
        "kvcourier:registrations_refused",
        HELP[Counted.REGISTRATIONS_REFUSED],
    ),
    "num_references_refused": (
        "kvcourier:references_refused",
        HELP[Counted.REFERENCES_REFUSED],
    ),
    "num_repairs": ("kvcourier:repairs", HELP[Counted.REPAIRS]),
    "num_integrity_checks": ("kvcourier:integrity_checks", HELP[Counted.INTEGRITY_CHECKS]),
    "num_integrity_failures": ("kvcourier:integrity_failures", HELP[Counted.INTEGRITY_FAILURES]),
    "num_quarantines_expired": (
        "kvcourier:quarantines_expired",
        HELP[Counted.QUARANTINES_EXPIRED],
    ),
    "num_peers_lost": ("kvcourier:peers_lost", HELP[Counted.PEERS_LOST]),
    "num_peers_silent": ("kvcourier:peers_silent", HELP[Counted.PEERS_SILENT]),
    "num_peers_not_allowed": ("kvcourier:peers_not_allowed", HELP[Counted.PEERS_NOT_ALLOWED]),
}
"""Key of a number, to the counter it adds to: name, help."""

GAUGES: Mapping[str, tuple[str, str, Callable[[Iterable[float]], float]]] = {
    "holds": ("kvcourier:holds", "Prompts and answers whose blocks are kept for somebody.", sum),
    "operations_in_flight": (
        "kvcourier:operations_in_flight",
        HELP["operations_in_flight"],
        sum,
    ),
    "quarantined_bytes": (
        "kvcourier:quarantined_bytes",
        "Memory that nobody may use because something may still touch it.",
        sum,
    ),
    "quarantined_perc": (
        "kvcourier:quarantined_perc",
        "Part of the KV cache that this is, 0 to 1, on the rank where it is most.",
        max,
    ),
}
"""Key of a size at the moment, to its gauge: name, help, what those of one engine come to."""

_AT_THE_MOMENT = "gauges"
"""Key of the sizes: of each rank that tells any, and of the scheduler, by name."""

MAX_RUNS = 64
"""Samples of one request's runs: evenly many from the short ones to the long ones."""
MAX_SAMPLED_RUNS = 1024
"""Samples of one interval; what is handed over after that is not looked at."""


@dataclass
class CourierStats(KVConnectorStats):
    """What happened in one interval, as `data`: lists of samples, numbers, and sizes at its end.

    What is not in it is empty or zero. vLLM makes one of several in two ways, by the same method:
    of the ranks in one step, and of the steps since its last line in the log. So sizes are kept by
    who told them, and of one's the later ones count.
    """

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether there is nothing to tell. That all sizes are back at zero is something."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> "CourierStats":
        """Take a later interval's, or another rank's, record in."""
        for key, value in other.data.items():
            if key == _AT_THE_MOMENT:
                self.data[key] = {**self.data.get(key, {}), **value}
            else:
                self.data[key] = self.data.get(key, type(value)()) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line's worth for vLLM's log."""
        durations, sizes = self._samples("transfer_duration"), self._samples("bytes_transferred")
        now = sizes_of(self.data)
        return {
            "Num transfers": len(durations),
            "Avg transfer (ms)": round(1e3 * _mean(durations), 3),
            "Avg post (ms)": round(1e3 * _mean(self._samples("post_duration")), 3),
            "Avg MB per transfer": round(_mean(sizes) / 1e6, 3),
            "Avg descriptors": round(_mean(self._samples("num_descriptors")), 1),
            "Failed": self.data.get("num_failed_transfers", 0),
            "Expired": self.data.get("num_kv_expired_reqs", 0),
            "Held now": int(now["holds"]),
            "Quarantined MB now": round(now["quarantined_bytes"] / 1e6, 3),
        }

    def _samples(self, key: str) -> list[float]:
        return list(self.data.get(key, ()))


def sizes_of(data: Mapping[str, Any]) -> dict[str, float]:
    """What a record's sizes come to for the whole engine, by keys of `GAUGES`."""
    told = [{}, *data.get(_AT_THE_MOMENT, {}).values()]
    return {
        key: combined(sizes.get(key, 0) for sizes in told)
        for key, (_, _, combined) in GAUGES.items()
    }


def _mean(samples: list[float]) -> float:
    return sum(samples) / max(1, len(samples))


class SizeTeller:
    """Decides when one process of an engine tells sizes: while one of them is not zero, and once
    more when all are, as vLLM may have nothing to ask for after that."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._at_zero = True

    def tell(self, sizes: Mapping[str, float]) -> dict[str, Any]:
        """What to put into a record of sizes as they are now, by keys of `GAUGES`."""
        was_at_zero, self._at_zero = self._at_zero, not any(sizes.values())
        return {} if was_at_zero and self._at_zero else {_AT_THE_MOMENT: {self._name: dict(sizes)}}


class StatsRecorder:
    """Listens to a courier (`runtime.metrics.CourierObserver`); thread-safe."""

    def __init__(self, rank: str = "") -> None:
        self._sizes = SizeTeller(rank)
        self._lock = threading.Lock()
        self._samples: dict[str, list[float]] = {key: [] for key in SAMPLES}
        self._counts = dict.fromkeys(COUNTS, 0)
        self._told = dict.fromkeys(_FROM_CORE, 0)

    def posted(self, operation: str, seconds: float, num_bytes: int, num_pieces: int) -> None:
        """An operation runs."""
        with self._lock:
            self._samples["post_duration"].append(seconds)
            self._samples["bytes_transferred"].append(num_bytes)
            self._samples["num_descriptors"].append(num_pieces)

    def completed(self, operation: str, seconds: float) -> None:
        """An operation has moved everything."""
        with self._lock:
            self._samples["transfer_duration"].append(seconds)

    def count(self, key: str) -> None:
        """One more of something in `COUNTS`."""
        with self._lock:
            self._counts[key] += 1

    def failed(self, operation: str) -> None:
        """An operation could not be posted or did not complete."""
        with self._lock:
            self._counts["num_failed_transfers"] += 1

    def dropped(self, why: str) -> None:
        """A message was not delivered, or not believed."""
        with self._lock:
            self._counts["num_failed_notifications"] += 1

    def handed_over(self, side: Side, lengths: Int64Array) -> None:
        """vLLM has handed blocks of a request over."""
        places = np.linspace(0, len(lengths) - 1, min(MAX_RUNS, len(lengths)), dtype=np.int64)
        sampled = np.sort(lengths)[places].tolist()
        with self._lock:
            samples = self._samples["block_run_length"]
            samples += sampled[: MAX_SAMPLED_RUNS - len(samples)]

    def take(
        self, counts: Mapping[Counted, int], sizes: Mapping[str, float]
    ) -> CourierStats | None:
        """The record since the last time, with what the core counted meanwhile.

        Args:
            sizes: of this rank at the moment, by keys of `GAUGES`.
        """
        with self._lock:
            for key, counted in _FROM_CORE.items():
                total = counts.get(counted, 0)
                self._counts[key] += total - self._told[key]
                self._told[key] = total
            happened = {k: v for k, v in (self._samples | self._counts).items() if v}
            data = happened | self._sizes.tell(sizes)
            self._samples = {key: [] for key in SAMPLES}
            self._counts = dict.fromkeys(COUNTS, 0)
        return CourierStats(data) if data else None


class CourierPromMetrics(KVConnectorPromMetrics):
    """The metrics in vLLM's API process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            key: self._per_engine(
                self._histogram_cls(
                    name=name, documentation=text, buckets=buckets, labelnames=labelnames
                )
            )
            for key, (name, text, buckets) in SAMPLES.items()
        }
        self._counters = {
            key: self._per_engine(
                self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            )
            for key, (name, text) in COUNTS.items()
        }
        self._gauges = {
            key: self._per_engine(
                self._gauge_cls(
                    name=name,
                    documentation=text,
                    # As vLLM's own gauges, where it has several API processes.
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                )
            )
            for key, (name, text, _) in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step of one engine, all its ranks."""
        for key, histograms in self._histograms.items():
            for value in transfer_stats_data.get(key, ()):
                histograms[engine_idx].observe(value)
        for key, counters in self._counters.items():
            if count := transfer_stats_data.get(key, 0):
                counters[engine_idx].inc(count)
        for key, size in sizes_of(transfer_stats_data).items():
            self._gauges[key][engine_idx].set(size)

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }
