"""The metric table: name, unit, help (docs/reference/metrics.md). Served with vLLM's own on `/metrics`.

The prefix is `vllm_rollout:`, not `vllm:`: vLLM unregisters every name of that prefix which it does not own. The client
library appends `_total` to counters.

Invariant: the values of a label divide what is counted, so that a sum over them counts nothing twice. Shares and ratios
end in `_ratio`, times in `_seconds`.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.kernel.http.engine_totals import EngineTotals, Reading
from vllm_rollout.kernel.rules.types import (
    BASE_MODEL,
    STOP_STATES,
    Assessment,
    Ending,
    GroupResult,
    GroupStatus,
    HeldGroups,
    Signal,
)
from vllm_rollout.parts.moving.rules.load import EngineLoad
from vllm_rollout.parts.moving.rules.migration import MoveOutcome
from vllm_rollout.parts.pruning.rules.ledger import Reward
from vllm_rollout.parts.pruning.rules.ledger import RewardStatus as PostedStatus
from vllm_rollout.parts.rewards.grading.values import RewardStatus as GradeStatus
from vllm_rollout.parts.rounds.rules.rounds import ROUND_KINDS, Fate, RoundKind
from vllm_rollout.parts.shaping.rules.allocation import PromptAllocation
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.moments import LengthStatistics

if TYPE_CHECKING:
    from vllm_rollout.kernel.http.engine import LearningReport

PREFIX = "vllm_rollout:"
LATENCY_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
GRADING_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
MOVE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
TAIL_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SCORE_BUCKETS = (-8, -4, -2, -1, -0.5, 0, 0.5, 1, 2, 4, 8, 16, 32)
"""Logits of the head lie around 0, confidence in nats between 1 and 30."""
ALLOCATION_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)
SURVIVAL_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)


LeftBy = Literal["rollout", "choices", "joined"]
"""Requests whose client may leave before their end.

rollout  a request to `/v1/rollouts`, or a round
choices  a request to an OpenAI endpoint with a group of its own
joined   a request that joins a group
"""

TokenFate = Literal["returned", "wasted", "deferred"]
"""returned  in a selected trajectory
wasted    all other tokens of a group that is over
deferred  of a group that goes on in a later round, or starts anew there
"""

Metric = TypeVar("Metric", Counter, Histogram)


def begun(metric: Metric, labels: Mapping[str, Iterable[str]]) -> Metric:
    """Give a metric a series for each known value of its label, starting at 0."""
    for value in chain(*labels.values()):
        metric.labels(value)
    return metric


class Metrics:
    """Counters and gauges of an API process: groups, scores and rewards."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, help: str, **labels: Iterable[str]) -> Counter:
            return begun(Counter(f"{PREFIX}{name}", help, tuple(labels), registry=registry), labels)

        def histogram(name: str, help: str, buckets: Sequence[float], **labels: Iterable[str]) -> Histogram:
            return begun(Histogram(f"{PREFIX}{name}", help, tuple(labels), buckets=buckets, registry=registry), labels)

        def gauge(name: str, help: str, *labels: str, each: bool = False) -> Gauge:
            # Of several API processes the one that looked last knows best, unless each counts its own.
            mode: Literal["livesum", "mostrecent"] = "livesum" if each else "mostrecent"
            return Gauge(f"{PREFIX}{name}", help, labels, registry=registry, multiprocess_mode=mode)

        def learning_gauge(name: str, help: str, *labels: str) -> Gauge:
            return gauge(name, help, "adapter", "detection_length", *labels)

        self.adapters = [BASE_MODEL]
        """Names that gauges have a series for: the base model's, which is empty, and the first adapters. A trainer
        may name each step's weights anew, so there is a limit."""

        self._groups = counter("groups", "Groups that are over, by status.", status=get_args(GroupStatus))
        self._audits = counter(
            "audit_groups", "Groups in which no candidate was stopped, so that learned estimates stay true."
        )
        states = ("finished", *STOP_STATES, "failed")
        self._candidates = counter("candidates", "Candidates that ended, by end state.", state=states)
        self._left = counter(
            "clients_left", "Requests whose client left before their end, by kind of request.", request=get_args(LeftBy)
        )
        self._tokens = counter(
            "tokens",
            "Output tokens that candidates generated: returned in trajectories, wasted, or deferred with their group.",
            kind=get_args(TokenFate),
        )
        self._resumed = counter(
            "resumed_tokens",
            "Output tokens that a round took over from an earlier one, where tokens_total counts them as deferred.",
            kind=get_args(TokenFate),
        )
        self._latency = histogram(
            "group_latency_seconds", "Time from the start of the rollout to the end of the group.", LATENCY_BUCKETS_S
        )
        self._tail = histogram("group_wasted_ratio", "Share of a group's tokens that is not returned.", TAIL_BUCKETS)
        self._score = histogram(
            "score",
            "Scores at detection_length: logit of the quality head, or trace confidence in nats.",
            SCORE_BUCKETS,
            signal=get_args(Signal),
        )
        self._survival = histogram(
            "survival_probability",
            "Probability with which a scored candidate was kept, or would have been kept in shadow mode.",
            SURVIVAL_BUCKETS,
        )
        self._rewards = counter("rewards", "Posted rewards, by status.", status=get_args(PostedStatus))
        self._labels = counter(
            "labels",
            "Accepted rewards: above the threshold (positive) or not (negative).",
            outcome=("positive", "negative"),
        )
        self._grades = counter(
            "grades", "Trajectories that the server graded, by reward and status.", reward=(), status=()
        )
        self._grading_time = histogram(
            "grading_seconds", "Time that grading a trajectory took, by reward.", GRADING_BUCKETS_S, reward=()
        )
        self._limit = gauge("grading_limit_seconds", "Largest time limit that the server learned from correct answers.")
        self._to_grade = gauge(
            "trajectories_to_grade", "Trajectories that running rollouts want graded, by reward.", "reward", each=True
        )
        self._brier = learning_gauge("calibration_brier", "Mean squared error of the success probability.", "signal")
        self._auc = learning_gauge("auc", "Area under the ROC curve of scores against rewards.", "signal")
        self._within_group_auc = learning_gauge(
            "within_group_auc", "Area under the ROC curve within each prompt, mean over prompts.", "signal"
        )
        self._head_version = learning_gauge("head_version", "Version of the quality head. 0: there is no head.")
        self._evicted = counter(
            "features_evicted",
            "Hidden states that were dropped before their reward came.",
            adapter=(),
            detection_length=(),
        )
        self._awaiting = learning_gauge("rewards_awaited", "Scored candidates whose reward has not come.")
        self._allocated = histogram(
            "allocated_candidates", 'Candidates per prompt with redundancy "auto".', ALLOCATION_BUCKETS
        )
        self._at_upper_bound = counter(
            "prompts_at_upper_bound", 'Prompts whose redundancy "auto" reached its upper bound.'
        )
        self._length_mean = gauge("length_mean_tokens", "Mean length of candidates, moving average.", "adapter")
        self._length_std = gauge(
            "length_std_tokens", "Standard deviation of candidates' lengths, moving average.", "adapter"
        )
        self._turns = counter("session_turns", "Ended turns of sessions.")
        self._held = gauge(
            "groups_held",
            "Groups in the engine: running, or idle because they wait for requests that are to join them.",
            "state",
        )
        self._races = gauge(
            "races_held", "Rounds of runs in the engine, counted on each rank that has groups of the round."
        )
        self._unmet = counter("joined_groups_unmet", "Groups of joining requests that did not all come to one engine.")
        self._drift = gauge(
            "step_time_drift_ratio",
            "Live time of decode steps over the profile's, medians of recent steps. 1: no drift.",
            "batch_sizes",
        )
        self._moves = counter(
            "moves",
            "Moves of groups to another rank, by outcome: moved, over, stays, failed, lost.",
            outcome=(),
        )
        self._move_seconds = histogram(
            "move_seconds",
            "Time from asking the old rank for a group until the new rank has the group.",
            MOVE_BUCKETS_S,
        )
        self._engine_totals = EngineTotals()
        self._moving = counter("moving_seconds", "Time that a rank spent on groups that leave or arrive.", rank=())
        self._moved_with_kv = counter(
            "groups_moved_in_with_kv", "Groups that arrived at a rank together with their KV blocks.", rank=()
        )
        self._kv_blocks = counter("kv_blocks_moved_in", "KV blocks that a rank took over from other ranks.", rank=())
        self._kv_fallbacks = counter(
            "kv_move_fallbacks", "Groups whose KV a rank could not send or take over. It was computed again.", rank=()
        )
        self._internal_errors = counter(
            "internal_errors",
            "Exceptions in the code of vllm_rollout on a rank. They failed candidates or groups.",
            rank=(),
        )
        self._weight_changes = counter("weight_changes", "Updates of a rank's weights.", rank=())
        self._task_errors = counter(
            "background_task_errors", "Exceptions in background tasks, by task. The exceptions are in the log.", task=()
        )
        self._rounds = counter("rounds", "Rounds of runs that are over, by kind.", kind=ROUND_KINDS)
        self._round_prompts = counter(
            "round_prompts",
            "Prompts of rounds, by outcome: returned, filtered, deferred to a long round, or not started.",
            fate=get_args(Fate),
        )
        self._round_latency = histogram(
            "round_latency_seconds",
            "Time from the start of a round to the end of its last group.",
            LATENCY_BUCKETS_S,
            kind=ROUND_KINDS,
        )
        self._size = gauge(
            "tensor_parallel_size", "Tensor-parallel size of the engine, with --rollout-parallelism auto."
        )
        self._rebuilds = counter(
            "engine_rebuilds",
            "Rebuilds of the engine at another tensor-parallel size, by outcome. After a failed rebuild the engine "
            "has its former size.",
            outcome=(),
        )
        self._rebuild_time = histogram(
            "engine_rebuild_seconds",
            "Time from when requests begin to wait until the engine runs again.",
            LATENCY_BUCKETS_S,
        )

    def group_over(self, result: GroupResult, latency_s: float, *, audit: bool = False) -> None:
        self._groups.labels(result.status).inc()
        self._audits.inc(audit)
        for ending in result.endings:
            self._candidates.labels(ending.state).inc()
        rest: TokenFate = "deferred" if result.status == "deferred" else "wasted"
        selected = set(result.selected)
        for ending in result.endings:
            self._count_tokens(ending, "returned" if ending.index in selected else rest)
        self._latency.observe(latency_s)
        if num_tokens := result.generated_tokens + result.resumed_tokens:
            self._tail.observe(result.wasted_tokens / num_tokens)

    def round_over(self, kind: RoundKind, fates: Iterable[Fate], latency_s: float) -> None:
        self._rounds.labels(kind).inc()
        self._round_latency.labels(kind).observe(latency_s)
        for fate, num_prompts in Counts(fates).items():
            self._round_prompts.labels(fate).inc(num_prompts)

    def group_moved(self, outcome: MoveOutcome, seconds: float) -> None:
        self._moves.labels(outcome).inc()
        if outcome == "moved":
            self._move_seconds.observe(seconds)

    def ranks_moved(self, loads: Sequence[EngineLoad]) -> None:
        """Bring the counters of each rank up to date."""
        self._engine_totals.read(
            Reading(counter, {"rank": str(rank)}, total)
            for rank, load in enumerate(loads)
            for counter, total in (
                (self._moving, load.moving_s),
                (self._moved_with_kv, load.kv.num_groups),
                (self._kv_blocks, load.kv.num_blocks),
                (self._kv_fallbacks, load.kv.num_fallbacks),
                (self._internal_errors, load.num_internal_errors),
                (self._weight_changes, load.num_weight_changes),
            )
        )

    def task_failed(self, task: str) -> None:
        self._task_errors.labels(task).inc()

    def engine_sized(self, size: int) -> None:
        self._size.set(size)

    def engine_rebuilt(self, outcome: str, seconds: float) -> None:
        self._engine_totals.engine_replaced()
        self._rebuilds.labels(outcome).inc()
        self._rebuild_time.observe(seconds)

    def turn_over(self) -> None:
        self._turns.inc()

    def client_left(self, request: LeftBy, endings: Iterable[Ending] = ()) -> None:
        """Count a request whose client left. `endings`: candidates that are not counted elsewhere."""
        self._left.labels(request).inc()
        for ending in endings:
            self._candidates.labels(ending.state).inc()
            self._count_tokens(ending, "wasted")

    def joined_over(self, ending: Ending) -> None:
        """Count one candidate of a group whose members are separate requests. If it finished, its request returns
        it."""
        self._candidates.labels(ending.state).inc()
        self._count_tokens(ending, "returned" if ending.state == "finished" else "wasted")

    def _count_tokens(self, ending: Ending, fate: TokenFate) -> None:
        self._tokens.labels(fate).inc(ending.num_tokens - ending.num_resumed)
        self._resumed.labels(fate).inc(ending.num_resumed)

    def prompts_allocated(self, allocations: Sequence[PromptAllocation]) -> None:
        for allocation in allocations:
            self._allocated.observe(allocation.num_candidates)
        self._at_upper_bound.inc(sum(allocation.at_upper_bound for allocation in allocations))

    def know(self, adapter: str) -> bool:
        """Note an adapter for which something was learned. True if it has series."""
        if adapter not in self.adapters and len(self.adapters) <= MAX_ADAPTERS:
            self.adapters.append(adapter)
        return adapter in self.adapters

    def lengths_reported(self, lengths: LengthStatistics, adapter: str = BASE_MODEL) -> None:
        """Set the gauges. An unknown value leaves its gauge unchanged."""
        if lengths.dataset is not None:
            self._length_mean.labels(adapter).set(lengths.dataset.mean)
            self._length_std.labels(adapter).set(lengths.dataset.std)

    def steps_drifted(self, drift: Sequence[StepDrift]) -> None:
        for found in drift:
            self._drift.labels(f"{found.smallest}-{found.largest}").set(found.ratio)

    def groups_held(self, held: HeldGroups) -> None:
        self._held.labels("running").set(held.num_running)
        self._held.labels("idle").set(held.num_idle)
        self._races.set(held.num_races)
        self._engine_totals.read([Reading(self._unmet, {}, held.num_unmet)])

    def candidate_scored(self, assessment: Assessment) -> None:
        self._score.labels(assessment.signal).observe(assessment.score)
        self._survival.observe(assessment.survival_probability)

    def rewards_posted(self, statuses: Sequence[PostedStatus], rewards: Sequence[Reward]) -> None:
        for status, num_rewards in Counts(statuses).items():
            self._rewards.labels(status).inc(num_rewards)
        accepted = [r.positive for r, status in zip(rewards, statuses, strict=True) if status == "accepted"]
        self._labels.labels("positive").inc(sum(accepted))
        self._labels.labels("negative").inc(len(accepted) - sum(accepted))

    def graded(self, reward: str, status: GradeStatus, seconds: float) -> None:
        self._grades.labels(reward, status).inc()
        self._grading_time.labels(reward).observe(seconds)

    def limits_learned(self, longest_s: float) -> None:
        self._limit.set(longest_s)

    def rewards_promised(self, reward: str, num_trajectories: int) -> None:
        self._to_grade.labels(reward).set(num_trajectories)

    def learning_reported(self, report: LearningReport) -> None:
        """Set the gauges. An unknown value leaves its gauge unchanged."""
        if not self.know(report.adapter):
            return
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
        labels = {"adapter": key[0], "detection_length": key[1]}
        self._engine_totals.read([Reading(self._evicted, labels, report.num_evicted)])
        self._awaiting.labels(*key).set(report.num_awaiting)
