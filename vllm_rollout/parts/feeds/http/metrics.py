"""Metrics of feeds."""

from __future__ import annotations

from vllm_rollout.kernel.http.metrics import LATENCY_BUCKETS_S, MetricMaker, PartMetrics
from vllm_rollout.parts.feeds.rules.bias import FATES, Fate

STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)


class FeedMetrics(PartMetrics):
    def __init__(self, make: MetricMaker) -> None:
        self._groups = make.counter("feed_groups", "Groups of feeds that are over, by fate.", fate=FATES)
        self._staleness = make.histogram(
            "feed_staleness", "Weights updates between the start of a group and its batch.", STALENESS_BUCKETS
        )
        self._waits = make.histogram(
            "feed_batch_wait_seconds", "Time for which a trainer has waited for a batch.", LATENCY_BUCKETS_S
        )

    def over(self, fate: Fate) -> None:
        self._groups.labels(fate).inc()

    def taken(self, staleness: int) -> None:
        self._staleness.observe(staleness)

    def waited(self, seconds: float) -> None:
        self._waits.observe(seconds)
