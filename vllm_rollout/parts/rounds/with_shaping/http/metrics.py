"""Metrics of the engine's size between rounds."""

from __future__ import annotations

from vllm_rollout.kernel.http.metrics import LATENCY_BUCKETS_S, MetricMaker, PartMetrics


class ParallelismMetrics(PartMetrics):
    """Metrics of --rollout-parallelism auto."""

    def __init__(self, make: MetricMaker) -> None:
        self._totals = make.totals
        self._size = make.gauge(
            "tensor_parallel_size", "Tensor-parallel size of the engine, with --rollout-parallelism auto."
        )
        self._rebuilds = make.counter(
            "engine_rebuilds",
            "Rebuilds of the engine at another tensor-parallel size, by outcome. After a failed rebuild the engine "
            "has its former size.",
            outcome=(),
        )
        self._rebuild_time = make.histogram(
            "engine_rebuild_seconds",
            "Time from when requests begin to wait until the engine runs again.",
            LATENCY_BUCKETS_S,
        )

    def engine_sized(self, size: int) -> None:
        self._size.set(size)

    def engine_rebuilt(self, outcome: str, seconds: float) -> None:
        self._totals.engine_replaced()
        self._rebuilds.labels(outcome).inc()
        self._rebuild_time.observe(seconds)
