"""Scores, audits and rewards of simulated groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_rollout.config import REWARD_THRESHOLD
from vllm_rollout.kernel.rules.rows import rows
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.types import GroupResult
from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.audit import AuditTurns, with_audits
from vllm_rollout.parts.pruning.rules.fields import PruningFields
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import Observation, PruningPlan, make_pruning_plan
from vllm_rollout.parts.pruning.rules.step import PRUNING, SCORING, TERMS, PruningStep
from vllm_rollout.parts.pruning.rules.terms import PruningTerms
from vllm_rollout.simulator.planner import PlannedRollout
from vllm_rollout.simulator.race import PoolCandidate, Race
from vllm_rollout.simulator.settings import Setting

FIELDS = rows(PruningFields)


def plan_of(given: Mapping[str, Any]) -> PruningPlan:
    """Plan of these fields. Raises: PlanError."""
    return make_pruning_plan(given)


def described(plan: PruningPlan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    return {field: getattr(plan, field) for field in FIELDS}


def words(plan: PruningPlan) -> list[str]:
    """The plan in the name of a setting: name and value of each field that differs from its default."""
    default = PruningPlan(plan.detection_length)
    unlike = ((field, value) for field, value in described(plan).items() if value != getattr(default, field))
    return [f"pruned at {plan.detection_length}", *(f"{field} {value}".lower() for field, value in unlike)]


class Scores:
    """Scores of a group's candidates, as the trace has them."""

    part = PRUNING

    def __init__(self, plan: PruningPlan) -> None:
        self._length = plan.detection_length

    def length(self, future: PoolCandidate) -> int | None:
        """Tokens after which a candidate is scored, or None if it has no score."""
        return None if future.score is None else self._length

    def seen(self, future: PoolCandidate) -> Observation:
        """Observation with the trace's score. A trace does not name its scores. As confidence they are standardised,
        then calibrated."""
        return Observation(Confidence(future.score, future.score, future.score))


def score(race: Race, rollout_id: str, seed: int) -> None:
    """Let this group be scored."""
    race.said = SCORING.value(Scoring(rollout_id, race.prompt_id, seed))
    race.scores = Scores(race.plan.pruning)


def terms(plan: PruningPlan) -> dict[str, PruningTerms]:
    """Terms of groups with this plan, by part."""
    return TERMS.value(PruningTerms(plan))


class Audits:
    """Chooses the audit groups of rollouts under one setting."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self._setting, self._seed = setting, seed
        self._turns = AuditTurns()

    def planned(self, planned: Sequence[PlannedRollout], contents: Sequence[str]) -> Sequence[PlannedRollout]:
        """Plans of the next rollout. `contents`: of each prompt."""
        ratio = self._setting.audit_ratio
        if self._setting.audit_unit == "group":
            return with_audits(planned, ratio, self._seed, contents)
        return [its.audited() for its in planned] if self._turns.take("", ratio) else planned


def reward(
    learned: GroupSteps, others: Sequence[GroupSteps], rollout_id: str, results: Mapping[Race, GroupResult]
) -> None:
    """Reward returned trajectories after the rollout. Every engine learns the rewards. `others`: all engines."""
    rewards = []
    for race, result in results.items():
        for index in result.selected:
            value = race.pool[index].reward
            if value is not None:
                rewards.append((race.prompt_id, index, value, value > REWARD_THRESHOLD))
    judge = _judge(learned)
    if not rewards or (told := judge.reward(rollout_id, rewards)) is None:
        return
    for other in map(_judge, others):
        if other is not judge:
            other.learn(told[2])


def _judge(steps: GroupSteps) -> Judge:
    return steps.part(PruningStep).judge
