"""`stats` in the classes that vLLM asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvxfer.vllm import stats as numbers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["KvxferPromMetrics", "KvxferStats"]

# Seconds: hooks take microseconds, hand-offs milliseconds and more.
_HOOK_BUCKETS = (
    2e-6,
    5e-6,
    1e-5,
    2e-5,
    5e-5,
    1e-4,
    2e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    1e-2,
    2e-2,
    5e-2,
    0.1,
    0.2,
    0.5,
)
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0, 300.0)


class KvxferStats(KVConnectorStats):  # type: ignore[misc]
    """One interval's numbers."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forgets them."""
        self.data = {}

    def aggregate(self, other: KvxferStats) -> KvxferStats:
        """Adds another rank's, or a later step's."""
        numbers.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The log line."""
        return numbers.reduce(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return numbers.is_empty(self.data)


class KvxferPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters and histograms with the label of the engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = per_engine_labelvalues
        self._counters = {
            name: metric_types[Counter](name=metric, documentation=text, labelnames=labelnames)
            for name, (metric, text) in numbers.COUNTERS.items()
        }
        self._gauges = {
            name: metric_types[Gauge](name=metric, documentation=text, labelnames=labelnames)
            for name, (metric, text) in numbers.GAUGES.items()
        }
        self._series = {
            name: metric_types[Histogram](
                name=metric, documentation=text, labelnames=labelnames, buckets=_BUCKETS
            )
            for name, (metric, text) in numbers.SERIES.items()
        }
        self._levels: dict[tuple[str, int], int] = {}
        metric, text = numbers.HOOK_METRIC
        self._hooks = metric_types[Histogram](
            name=metric, documentation=text, labelnames=[*labelnames, "hook"], buckets=_HOOK_BUCKETS
        )
        # So that each is there from the start, at 0.
        for values in per_engine_labelvalues.values():
            for item in (*self._counters.values(), *self._gauges.values(), *self._series.values()):
                item.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one step's numbers."""
        values = self._values[engine_idx]
        for name, counter in self._counters.items():
            if amount := transfer_stats_data.get(name):
                counter.labels(*values).inc(amount)
        for name, gauge in self._gauges.items():
            if change := transfer_stats_data.get(name):
                # Ray's gauges can only be set.
                level = self._levels.get((name, engine_idx), 0) + change
                self._levels[name, engine_idx] = level
                gauge.labels(*values).set(level)
        for name, histogram in self._series.items():
            for seconds in transfer_stats_data.get(name, ()):
                histogram.labels(*values).observe(seconds)
        for hook, times in transfer_stats_data.get("hooks", {}).items():
            for seconds in times:
                self._hooks.labels(*values, hook).observe(seconds)
