"""Pruning in the life of a rollout: candidates are scored, and some groups are audited."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from vllm_rollout.kernel.http.answers import ConfidenceAnswer, GroupAnswer
from vllm_rollout.kernel.http.clients import owned_name
from vllm_rollout.kernel.http.engine import CandidateEnd, GroupOrder, RequestError
from vllm_rollout.kernel.http.plan_port import Draft, Given, GroupPart, GroupRecord, Over, PlanPart, RolloutPart
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.prompt_key import digest_of, seed_for
from vllm_rollout.parts.pruning.http.scoring_log import ScoringLog
from vllm_rollout.parts.pruning.http.service import LearningService
from vllm_rollout.parts.pruning.rules.assessment import Confidence, scores_of
from vllm_rollout.parts.pruning.rules.audit import AuditTurns, with_audits
from vllm_rollout.parts.pruning.rules.length_trial import chosen
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey, PruningPlan
from vllm_rollout.parts.pruning.rules.step import TERMS
from vllm_rollout.parts.pruning.rules.terms import PruningTerms


class LearningPlan(PlanPart):
    """All rollouts of the service. Overrides: fields, asked."""

    fields = frozenset(("audit_ratio",))

    def __init__(self, given: Given) -> None:
        self.learning = LearningService.of(given.engine, given.metrics, given.clock)
        given.rewards.takers.append(self.learning.rewarded)
        self.audit_ratio = given.audit_ratio
        self.turns = AuditTurns()

    def asked(self, request: RolloutRequest) -> RolloutPart:
        seed = request.sampling_params.get("seed")
        # -1 is none to vLLM, too.
        return ScoredRollout(self, seed if isinstance(seed, int) and seed != -1 else secrets.randbits(62))


class ScoredRollout(RolloutPart):
    """One rollout. Overrides: choose, check, audit, ready, group, ended_before, warn."""

    _rollout: Rollout
    _log: ScoringLog | None = None
    """None without pruning."""

    def __init__(self, service: LearningPlan, seed: int) -> None:
        """`seed`: of random choices, with each prompt's content. The same seeded request gets the same verdicts."""
        self._service = service
        self._seed = seed

    async def choose(self, request: RolloutRequest, plan: GroupPlan, warnings: list[str]) -> GroupPlan:
        """The plan with a detection length in place of "auto". Warns if nothing is known for a choice yet."""
        terms = TERMS.of(plan.parts)
        if terms is None or not terms.plan.auto:
            return plan
        trial = await self._service.learning.length_trial(terms.plan.keep_ratio, request.model)
        pruning = chosen(terms.plan, trial.recommended)
        if trial.recommended is None:
            lengths = ", ".join(map(str, pruning.scored_lengths))
            warnings.append(
                f'detection_length: "auto" cannot choose yet ({trial.reason}). Nothing was pruned, and candidates were '
                f"scored at {lengths}. Post rewards to /v1/rollouts/{{id}}/rewards."
            )
        return replace(plan, parts={**plan.parts, **TERMS.value(PruningTerms(pruning))})

    def check(self, request: RolloutRequest, plan: GroupPlan) -> None:
        if (terms := TERMS.of(plan.parts)) is None:
            return
        if (refusal := self._service.learning.pruning_refusal) is not None:
            raise RequestError(f"pruning: {refusal}", param="pruning")
        self._log = ScoringLog(plan, terms.plan)

    def audit(self, draft: Draft) -> None:
        """Change a share of the plans to those of audit groups."""
        request, plans = draft.request, draft.plans
        learns = self._log is not None or request.tradeoff is not None
        ratio = request.audit_ratio
        if ratio is None:
            ratio = self._service.audit_ratio if learns else 0.0
        if not ratio:
            return
        unit = request.audit_unit
        if unit == "auto":
            unit = "group" if request.stream else "rollout"
        if unit == "group":
            contents = [digest_of(prompt.token_ids) for prompt in draft.prompts]
            draft.plans = with_audits(plans, ratio, self._seed, contents)
            return
        races = any(not plan.group.returns_all for plan in plans)
        if self._service.turns.take((draft.adapter, races), ratio):
            draft.plans = [plan.audited() for plan in plans]

    async def ready(self, request: RolloutRequest, rollout: Rollout) -> None:
        self._rollout = rollout

    def group(self, record: GroupRecord) -> GroupPart | None:
        return None if self._log is None else ScoredGroup(self._rollout, record, self._log, self._seed)

    def ended_before(self, group: GroupAnswer) -> None:
        if self._log is not None:
            self._log.ended_before(group)
            self._rollout.outcome.usage.num_scored = self._log.num_scored

    async def warn(self) -> Sequence[str]:
        if self._log is None:
            return ()
        report = None
        if self._log.num_cold:
            head = HeadKey(self._log.plan.detection_length, self._rollout.adapter)
            report = await self._service.learning.report_if_any(head)
        return self._log.warnings(report)


class ScoredGroup(GroupPart):
    """One group. Overrides: ordered, fields_of, account."""

    def __init__(self, rollout: Rollout, record: GroupRecord, log: ScoringLog, seed: int) -> None:
        """`seed`: of the rollout."""
        self._rollout = rollout
        self._record = record
        self._log = log
        self._seed = seed

    def ordered(self, order: GroupOrder) -> GroupOrder:
        rollout, prompt = self._rollout, self._record.prompt
        name, key = owned_name(rollout.namespace, rollout.id), rollout.plans[self._record.position].key
        seed = seed_for(self._seed, digest_of(prompt.token_ids))
        return replace(order, said={**order.said, **self._log.said(name, prompt.id, seed, key)})

    def fields_of(self, end: CandidateEnd, *, selected: bool) -> Mapping[str, Any]:
        plan = self._record.plan
        terms = TERMS.of(plan.parts)
        assert terms is not None
        fields = _scoring(end, terms.plan)
        if not selected:
            return fields
        of_survivors = {"inclusion_probability": fields["survival_probability"]} if plan.returns_all else {}
        return {**fields, **_final(end), **of_survivors}

    async def account(self, over: Over) -> None:
        self._log.group_over(self._record.prompt, self._record.ends.values())
        self._rollout.outcome.usage.num_scored = self._log.num_scored


def _scoring(end: CandidateEnd, pruning: PruningPlan) -> dict[str, Any]:
    """Fields of every candidate about its score.

    A trainer weights a trajectory by 1 / `survival_probability`. Shadow mode stops no candidate, so there it is 1, or
    the probability from earlier rounds.
    """
    shadow = pruning.mode == "shadow"
    assessment = scores_of(end.parts).assessment
    if assessment is None:
        unscored: dict[str, Any] = {"survival_probability": end.survival_before}
        return {**unscored, "would_prune": False, "shadow_survival_probability": 1.0} if shadow else unscored
    fields = {
        "score": assessment.score,
        "success_probability": assessment.success_probability,
        "survival_probability": end.survival_before * (1.0 if shadow else assessment.survival_probability),
        "signal": assessment.signal,
        "head_version": assessment.head_version,
        "confidence": _confidence(assessment.confidence),
        "score_weight_version": _version_of_token(end, pruning.detection_length - 1),
    }
    if shadow:
        fields["would_prune"] = not assessment.keep
        fields["shadow_survival_probability"] = assessment.survival_probability
    return fields


def _final(end: CandidateEnd) -> dict[str, Any]:
    """Fields of a trajectory about its score at the last token. Empty without a trained head."""
    final = scores_of(end.parts).final
    if final is None or final.head_version == 0:
        return {}
    return {"final_score": final.score, "final_success_probability": final.success_probability}


def _confidence(confidence: Confidence) -> ConfidenceAnswer | None:
    """The confidence, or None if a part of it was not observed: JSON has no NaN."""
    return ConfidenceAnswer(**confidence._asdict()) if all(map(isfinite, confidence)) else None


def _version_of_token(end: CandidateEnd, position: int) -> str | None:
    """The weight version that sampled the output token at `position`. None if the engine does not know it."""
    spans = (span for span in end.weight_versions if span["start"] <= position < span["end"])
    return next((span["version"] for span in spans), None)
