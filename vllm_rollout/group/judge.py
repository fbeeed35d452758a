"""Scores in, verdicts out; rewards in, better verdicts out.

Invariant: a candidate is judged once, while it runs, with what was known before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_rollout.group.learning import Learning, label_weight
from vllm_rollout.group.ledger import Ledger, LedgerEntry, Reward, RewardStatus
from vllm_rollout.group.lifecycle import Group
from vllm_rollout.group.memory import Memory
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.types import Assessment, Observation


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a candidate is judged, and under which name its reward comes."""

    rollout_id: str
    prompt_id: str
    seed: int
    """Chance depends on (seed, prompt_id, index)."""
    plan: PruningPlan
    teaches: bool = True
    """A reward may come for it. False for candidates whose reward has no door (OpenAI endpoints, joined requests): what
    a reward would need is not kept."""


@dataclass(frozen=True, slots=True)
class Label:
    """A rewarded candidate, with all that calibration and head need of it."""

    detection_length: int
    request_id: str
    """Names its features in the worker."""
    prompt_id: str
    observation: Observation
    assessment: Assessment
    num_tokens: int
    positive: bool
    active: bool
    """Pruning was active: it is there by survival, with its probability."""

    @property
    def weight(self) -> float:
        """Of its loss: 1 / survival probability, where survival was at stake."""
        return label_weight(self.assessment.survival_probability if self.active else 1.0)


class Judge:
    """Judges by what one engine has learned, and keeps the candidates it may still learn from."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.memory = Memory()
        self.num_evicted: Counter[int] = Counter()
        """Labels whose features were gone when their reward came, by detection length."""

    def judge(
        self, group: Group, scoring: Scoring, due: Mapping[int, tuple[LedgerEntry | None, Observation]]
    ) -> list[int]:
        """Judge running siblings that are due in one step; returns those to stop, which the group now counts as pruned.

        Without an entry (its reward has no door) a candidate is judged as its siblings are. Nothing is judged at more
        than `MAX_DETECTION_LENGTHS` different detection lengths that rewards are awaited for, nor twice: a token that
        the engine drops and samples again shows its candidate once more.
        """
        plan = scoring.plan
        due = {index: seen for index, seen in due.items() if index not in group.assessments}
        learning = self._learning_at(plan.detection_length)
        if learning is None or not due:
            return []
        assessments = learning.assess(
            plan,
            {index: observation for index, (_, observation) in due.items()},
            group.assessments,
            seed=scoring.seed,
            group=scoring.prompt_id,
            at_least=group.num_needed(len(due), 1 if plan.allow_fewer else group.terms.group_size),
        )
        group.assessments.update(assessments)
        for index, (entry, observation) in due.items():
            if entry is not None:
                entry.observation, entry.assessment = observation, assessments[index]
        if plan.mode == "shadow":
            return []
        pruned = [index for index, assessment in assessments.items() if not assessment.keep]
        group.prune(pruned)
        return pruned

    def reward(self, rollout_id: str, rewards: Sequence[Reward]) -> tuple[int, list[RewardStatus], list[Label]] | None:
        """Learn from rewards.

        Returns the rollout's detection length, each one's status and what the head can train on; None when no rollout
        of that id is remembered.
        """
        detection_length = self.ledger.detection_length(rollout_id)
        if detection_length is None:
            return None
        statuses: list[RewardStatus] = []
        labels: list[Label] = []
        for prompt_id, index, reward, positive in rewards:
            status, entry = self.ledger.reward(rollout_id, prompt_id, index, reward)
            statuses.append(status)
            if entry is not None:
                labels.append(_label(rollout_id, entry, positive))
        self.learn(labels)
        return detection_length, statuses, labels

    def learn(self, labels: Sequence[Label]) -> None:
        """Teach calibration, and keep account for the report."""
        for label in labels:
            learning = self._learning_at(label.detection_length)
            if learning is not None:
                learning.reward(
                    label.observation,
                    label.assessment,
                    label.num_tokens,
                    positive=label.positive,
                    group_key=label.prompt_id,
                    active=label.active,
                )

    def _learning_at(self, detection_length: int) -> Learning | None:
        return self.memory.learning(detection_length, self.ledger.awaits)


def _label(rollout_id: str, entry: LedgerEntry, positive: bool) -> Label:
    return Label(
        detection_length=entry.plan.detection_length,
        request_id=entry.request_id,
        prompt_id=f"{rollout_id}/{entry.prompt_id}",
        observation=entry.observation,
        assessment=entry.assessment,
        num_tokens=entry.num_tokens,
        positive=positive,
        active=entry.plan.mode == "active",
    )
