"""Metrics of lengths, step times and redundancy "auto"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vllm_rollout.kernel.http.engine import Engine
from vllm_rollout.kernel.http.engine_totals import Reading
from vllm_rollout.kernel.http.metrics import MetricMaker, PartMetrics
from vllm_rollout.kernel.rules.types import RankCounts
from vllm_rollout.parts.memories.http import KnownAdapters
from vllm_rollout.parts.shaping.http.engine import ShapingPart
from vllm_rollout.parts.shaping.rules.allocation import PromptAllocation

ALLOCATION_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)


class ShapingMetrics(PartMetrics):
    def __init__(self, make: MetricMaker) -> None:
        self.adapters = make.shared(KnownAdapters)
        self._allocated = make.histogram(
            "allocated_candidates", 'Candidates per prompt with redundancy "auto".', ALLOCATION_BUCKETS
        )
        self._at_upper_bound = make.counter(
            "prompts_at_upper_bound", 'Prompts whose redundancy "auto" reached its upper bound.'
        )
        self._length_mean = make.gauge("length_mean_tokens", "Mean length of candidates, moving average.", "adapter")
        self._length_std = make.gauge(
            "length_std_tokens", "Standard deviation of candidates' lengths, moving average.", "adapter"
        )
        self._drift = make.gauge(
            "step_time_drift_ratio",
            "Live time of decode steps over the profile's, medians of recent steps. 1: no drift.",
            "batch_sizes",
        )

    def prompts_allocated(self, allocations: Sequence[PromptAllocation]) -> None:
        for allocation in allocations:
            self._allocated.observe(allocation.num_candidates)
        self._at_upper_bound.inc(sum(allocation.at_upper_bound for allocation in allocations))

    async def refresh(self, engine: Engine, ranks: Mapping[int, RankCounts]) -> Iterable[Reading]:
        for adapter in self.adapters:
            dataset = (await engine.part(ShapingPart).length_history([], adapter)).dataset
            if dataset is not None:
                self._length_mean.labels(adapter).set(dataset.mean)
                self._length_std.labels(adapter).set(dataset.std)
        for drift in await engine.part(ShapingPart).step_drift():
            self._drift.labels(f"{drift.smallest}-{drift.largest}").set(drift.ratio)
        return ()
