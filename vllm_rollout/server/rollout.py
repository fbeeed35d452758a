"""One rollout on its way: what was asked for, and what has come of it so far.

Invariant: generated + resumed = returned + wasted tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_rollout.group.lengths.receipt import Receipt
from vllm_rollout.group.plans.fields import Migration, OnEngineFailure
from vllm_rollout.group.types import CandidateState, Ending, GroupResult
from vllm_rollout.rewards.values import Grade, RewardStatus
from vllm_rollout.server.answers import GroupAnswer, RanksFreeEvent, RedundancyBudget, Timing, Usage
from vllm_rollout.server.course import Course
from vllm_rollout.server.engine import CandidateEnd, PreparedPrompt
from vllm_rollout.server.engines.scaling import ScaleDownWatch
from vllm_rollout.server.grading.service import Grading
from vllm_rollout.server.protocol import Included
from vllm_rollout.server.resumed import Resumption
from vllm_rollout.server.scoring_log import ScoringLog
from vllm_rollout.server.shaping import PromptPlan
from vllm_rollout.server.tracing import RolloutTrace
from vllm_rollout.server.watch.seen import SeenRollout
from vllm_rollout.trace.rows import RolloutRow


@dataclass(slots=True)
class RolloutOutcome:
    """What has come of a rollout so far."""

    num_ended: int = 0
    """Candidates."""
    freed: RanksFreeEvent | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    versions: set[str] = field(default_factory=set)
    """The versions of the weights that sampled a token."""
    reward_error: str | None = None
    """Why the first trajectory that has no reward has none."""
    error: str | None = None
    """Why the first candidate that failed for a known reason did."""
    off_policy: bool = False
    """Whether any trajectory is."""
    num_forgotten: int = 0
    """Grades that taught nothing, since the engine did not know their candidates any more."""
    receipt: Receipt | None = None
    """None before its end. Its counts of tokens are those of `usage`, which knows groups of an interrupted round."""
    tellings: list[asyncio.Task[None]] = field(default_factory=list)
    """One per group that is over: the engine is told its lengths."""

    @property
    def weight_version(self) -> str | None:
        """The version every token was sampled with; None when there is none or more than one."""
        return next(iter(self.versions)) if len(self.versions) == 1 else None

    def ended_before(self, group: GroupAnswer) -> None:
        """It was complete when its round was interrupted: its tokens are resumed ones."""
        usage = self.usage
        returned = sum(each.num_tokens for each in group.trajectories)
        wasted = sum(each.num_tokens for each in group.candidates)
        usage.returned_tokens += returned
        usage.wasted_tokens += wasted
        usage.resumed_tokens += returned + wasted
        usage.num_candidates += len(group.trajectories) + len(group.candidates)
        usage.num_scored += sum(each.score is not None for each in (*group.trajectories, *group.candidates))
        for candidate in group.candidates:
            self._count_ended(candidate.state)
        for trajectory in group.trajectories:
            self._count_ended("finished")
            self._count_reward(trajectory.reward, trajectory.reward_status, trajectory.reward_reason)
            self.versions.update(span["version"] for span in trajectory.weight_versions)
        self.off_policy |= group.off_policy

    def group_over(
        self, result: GroupResult, ends: Collection[CandidateEnd], grades: Iterable[Grade], latency_s: float
    ) -> None:
        usage = self.usage
        usage.generated_tokens += result.generated_tokens
        usage.returned_tokens += result.returned_tokens
        usage.wasted_tokens += result.wasted_tokens
        usage.resumed_tokens += result.resumed_tokens
        usage.num_candidates += len(result.endings)
        usage.num_scored += sum(end.assessment is not None for end in ends)
        for ending in result.endings:
            self._count_ended(ending.state)
        self.error = self.error or next((end.error for end in ends if end.error is not None), None)
        if self.timing.time_to_first_group_s is None:
            self.timing.time_to_first_group_s = latency_s
        for grade in grades:
            self._count_reward(grade.reward, grade.status, grade.reason)
        self.versions.update(span["version"] for end in ends for span in end.weight_versions)

    def _count_ended(self, state: CandidateState) -> None:
        counter = f"num_{state}"
        setattr(self.usage, counter, getattr(self.usage, counter) + 1)

    def _count_reward(self, reward: float | None, status: RewardStatus | None, reason: str | None) -> None:
        """All None: nothing was to be graded."""
        self.usage.num_rewards += reward is not None
        self.usage.num_reward_timeouts += status == "timeout"
        if status == "error":
            self.usage.num_reward_errors += 1
            self.reward_error = self.reward_error or reason
        self.usage.num_voids += status == "void"


@dataclass(slots=True)
class Rollout:
    """A checked request, ready to run."""

    id: str
    created: int
    namespace: str
    """Of the client that asked for it."""
    model: str
    adapter: str
    """The LoRA adapter's name: what comes of it is learned of that."""
    plans: list[PromptPlan]
    """One per prompt."""
    prompts: list[PreparedPrompt]
    seed_names: Sequence[str]
    """One per prompt: what its seed follows from, with that of the request."""
    included: Set[Included]
    stream_tokens: int | None
    pruning_seed: int
    """What chance depends on, with each prompt's content: the same seeded request gives the same verdicts."""
    scoring: ScoringLog | None
    """None without pruning."""
    course: Course
    migration: Migration = "off"
    """What its groups may move for."""
    on_engine_failure: OnEngineFailure = "fail"
    """What becomes of groups that the engine loses."""
    priority: int = 0
    """A lower number has places earlier."""
    watch: ScaleDownWatch | None = None
    """Frees ranks while it runs."""
    budget: RedundancyBudget | None = None
    """With redundancy "auto" only."""
    warnings: list[str] = field(default_factory=list)
    grading: Grading | None = None
    """None: no reward was asked for."""
    resumption: Resumption | None = None
    """None: neither does anything go on here, nor will it later."""
    outcome: RolloutOutcome = field(default_factory=RolloutOutcome)
    seen: SeenRollout = field(default_factory=SeenRollout)
    """For viewers and the trace."""
    trace: RolloutTrace | None = None
    """None: nobody traces."""

    def group_id(self, position: int) -> str:
        """The engine's name of the group of the prompt at that position."""
        return f"{self.id}-{position}"

    def prompt_of(self, group_id: str) -> PreparedPrompt | None:
        """The prompt of the group that has this name; None for any other name."""
        number = group_id.removeprefix(f"{self.id}-")
        position = int(number) if number.isascii() and number.isdecimal() else len(self.prompts)
        is_known = position < len(self.prompts) and self.group_id(position) == group_id
        return self.prompts[position] if is_known else None

    @property
    def started_s(self) -> list[float | None]:
        """When the group of each prompt got its places; None for one that has none yet."""
        seen = [self.seen.groups.get(position) for position in range(len(self.prompts))]
        return [None if group is None else group.started_s for group in seen]

    @property
    def rewards_decide(self) -> bool:
        """Whether a group is complete: the engine cannot tell."""
        return self.grading is not None and self.grading.until == "variance"

    @property
    def num_responses(self) -> int:
        """Candidates that it begins with."""
        return sum(plan.group.num_candidates for plan in self.plans)

    def envelope(self) -> dict[str, Any]:
        """What every answer and last event says of it, beside its groups."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "weight_version": self.outcome.weight_version,
            "warnings": self.warnings,
            "budget": self.budget,
            "detection_length": None if self.scoring is None else self.scoring.plan.detection_length,
            "off_policy": self.outcome.off_policy,
            "freed": self.outcome.freed,
            "usage": self.outcome.usage,
            "timing": self.outcome.timing,
            "receipt": self.receipt,
        }

    @property
    def receipt(self) -> Receipt | None:
        written, usage = self.outcome.receipt, self.outcome.usage
        names = ("generated_tokens", "returned_tokens", "wasted_tokens", "resumed_tokens")
        return written and replace(written, **{name: getattr(usage, name) for name in names})

    def row(self, *, with_prompts: bool = True, running: bool = False) -> RolloutRow:
        """As a trace has it; with `running` also the groups that are not over."""
        plan, seen = self.plans[0].group, self.seen
        caps = [prompt.max_tokens for prompt in self.prompts if prompt.max_tokens is not None]
        return RolloutRow.model_construct(
            rollout_id=self.id,
            model=self.model,
            group_size=plan.group_size,
            max_tokens=max(caps, default=None),
            detection_length=None if plan.pruning is None else plan.pruning.detection_length,
            began=seen.began,
            seconds=seen.seconds,
            num_prompts=len(self.prompts),
            num_candidates=self.num_responses,
            run=seen.run,
            round=seen.round,
            kind=seen.kind,
            state=seen.state,
            receipt=self.receipt,
            weight_versions=sorted(self.outcome.versions) or None,
            prompts=seen.rows(running=running) if with_prompts else [],
        )

    def candidate_ended(self, position: int, ending: Ending) -> None:
        self.course.candidate_ended(position, ending)
        self.outcome.num_ended += 1
        if self.watch is not None:
            self.watch.candidate_ended()

    def restarted(self, position: int, num_ended: int) -> None:
        """A group runs again of which so many candidates had ended."""
        self.course.restarted(position)
        self.outcome.num_ended -= num_ended
        self.outcome.usage.num_restarted += 1
