"""Groups with pruning, for tests: terms, values that candidates say, steps with a judge, and what the judge knows."""

from __future__ import annotations

from typing import Any

from tests.support.steps import group_steps
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import EndingNote, RunnerReport
from vllm_rollout.parts.memories.rules import Memories
from vllm_rollout.parts.pruning.rules.assessment import Scores
from vllm_rollout.parts.pruning.rules.judge import Judge, JudgedGroup
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.step import JUDGED, PRUNING, SCORES, SCORING, TERMS, PruningStep
from vllm_rollout.parts.pruning.rules.terms import PruningTerms
from vllm_rollout.parts.pruning.wire import ScoreReport


def pruned_by(plan: PruningPlan | None, audit_ratio: float = 0.0) -> dict[str, PruningTerms]:
    """Terms of a group with this plan of pruning, by part. Empty without one."""
    return {} if plan is None else TERMS.value(PruningTerms(plan, audit_ratio))


def group_terms(
    group_size: int,
    num_candidates: int,
    early_stop: bool = True,
    patience: float | None = None,
    pruning: PruningPlan | None = None,
    *,
    num_replaceable: int = 0,
    audit_ratio: float = 0.0,
) -> GroupTerms:
    parts = pruned_by(pruning, audit_ratio)
    return GroupTerms(group_size, num_candidates, early_stop, patience, num_replaceable, parts)


def said(scoring: Scoring | None) -> dict[str, Any]:
    return {} if scoring is None else SCORING.value(scoring)


def new_memories() -> Memories:
    """Memories with a section of each part that learns."""
    return Memories(dict(faces("memory")))


def new_judge() -> Judge:
    """A judge in memories of all parts that learn."""
    return Judge(new_memories())


def steps_of(judge: Judge, **settings: Any) -> GroupSteps:
    """Steps in which this judge decides."""
    steps = group_steps(**settings)
    steps.memories = judge.memories
    steps.part(PruningStep).judge = judge
    return steps


def judge_of(of: Any) -> Judge:
    """The judge of a scheduler, or of its steps."""
    return getattr(of, "group_steps", of).part(PruningStep).judge


def judged(group: Group) -> JudgedGroup:
    return JUDGED.of(group.parts)


def assessments(group: Group) -> dict[int, Any]:
    return {} if judged(group) is None else judged(group).assessments


def scores(note: EndingNote) -> Scores:
    """Scores of a candidate that has ended. Both are None if it was not scored."""
    return SCORES.of(note.parts) or Scores(None, None)


def scores_in(report: RunnerReport) -> ScoreReport:
    """Scores in a worker's report of a step."""
    return report.parts.get(PRUNING, ScoreReport())
