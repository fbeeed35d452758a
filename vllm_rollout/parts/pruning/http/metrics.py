"""Metrics of scores, posted rewards, and what is learned from both."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import Gauge

from vllm_rollout.kernel.http.engine_totals import Reading
from vllm_rollout.kernel.http.metrics import MetricMaker, PartMetrics
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.rewards import Reward, RewardStatus
from vllm_rollout.kernel.rules.types import GroupResult, Signal
from vllm_rollout.parts.memories.http import KnownAdapters
from vllm_rollout.parts.pruning.rules.assessment import scores_of
from vllm_rollout.parts.pruning.rules.learning_report import LearningReport

SCORE_BUCKETS = (-8, -4, -2, -1, -0.5, 0, 0.5, 1, 2, 4, 8, 16, 32)
"""Logits of the head lie around 0, confidence in nats between 1 and 30."""
SURVIVAL_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)


class PruningMetrics(PartMetrics):
    def __init__(self, make: MetricMaker) -> None:
        self._learned = LearnedMetrics(make)
        self.adapters, self._totals = make.shared(KnownAdapters), make.totals
        self._audits = make.counter(
            "audit_groups", "Groups in which no candidate was stopped, so that learned estimates stay true."
        )
        self._score = make.histogram(
            "score",
            "Scores at detection_length: logit of the quality head, or trace confidence in nats.",
            SCORE_BUCKETS,
            signal=get_args(Signal),
        )
        self._survival = make.histogram(
            "survival_probability",
            "Probability with which a scored candidate was kept, or would have been kept in shadow mode.",
            SURVIVAL_BUCKETS,
        )
        self._rewards = make.counter("rewards", "Posted rewards, by status.", status=get_args(RewardStatus))
        self._labels = make.counter(
            "labels",
            "Accepted rewards: above the threshold (positive) or not (negative).",
            outcome=("positive", "negative"),
        )

    def group_over(self, result: GroupResult, plan: GroupPlan | None) -> None:
        self._audits.inc(plan is not None and plan.audit)

    def noted(self, parts: Mapping[str, Any]) -> None:
        if (assessment := scores_of(parts).assessment) is not None:
            self._score.labels(assessment.signal).observe(assessment.score)
            self._survival.observe(assessment.survival_probability)

    def rewards_posted(self, statuses: Sequence[RewardStatus], rewards: Sequence[Reward]) -> None:
        for status, num_rewards in Counts(statuses).items():
            self._rewards.labels(status).inc(num_rewards)
        accepted = [r.positive for r, status in zip(rewards, statuses, strict=True) if status == "accepted"]
        self._labels.labels("positive").inc(sum(accepted))
        self._labels.labels("negative").inc(len(accepted) - sum(accepted))

    def learning_reported(self, reports: Iterable[LearningReport]) -> None:
        """Set the gauges. An unknown value leaves its gauge unchanged."""
        readings = [self._learned.shown(each) for each in reports if self.adapters.know(each.adapter)]
        if readings:
            self._totals.read(readings)


class LearnedMetrics:
    """Quality of each detection length's calibration and head, by adapter."""

    def __init__(self, make: MetricMaker) -> None:
        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return make.gauge(name, help, "adapter", "detection_length", *labels)

        self._brier = gauge("calibration_brier", "Mean squared error of the success probability.", "signal")
        self._auc = gauge("auc", "Area under the ROC curve of scores against rewards.", "signal")
        self._within_group_auc = gauge(
            "within_group_auc", "Area under the ROC curve within each prompt, mean over prompts.", "signal"
        )
        self._head_version = gauge("head_version", "Version of the quality head. 0: there is no head.")
        self._awaiting = gauge("rewards_awaited", "Scored candidates whose reward has not come.")
        self._evicted = make.counter(
            "features_evicted",
            "Hidden states that were dropped before their reward came.",
            adapter=(),
            detection_length=(),
        )

    def shown(self, report: LearningReport) -> Reading:
        """Set the gauges. Returns the engine's number of evicted hidden states."""
        key = report.adapter, str(report.detection_length)
        for signal, quality in report.signals.items():
            for gauge, value in (
                (self._brier, quality.brier),
                (self._auc, quality.auc),
                (self._within_group_auc, quality.within_group_auc),
            ):
                if value is not None:
                    gauge.labels(*key, signal).set(value)
        self._head_version.labels(*key).set(0 if report.head is None else report.head.version)
        self._awaiting.labels(*key).set(report.num_awaiting)
        return Reading(self._evicted, {"adapter": key[0], "detection_length": key[1]}, report.num_evicted)
