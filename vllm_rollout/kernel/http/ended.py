"""Trajectories and candidates for answers, made from the engine's reports. Invariant: content that was not requested
is left out."""

from __future__ import annotations

from collections.abc import Collection, Set
from math import isfinite
from typing import Any

from vllm_rollout.kernel.http.answers import Candidate, ConfidenceAnswer, StoppedCandidate, TokensEvent, Trajectory
from vllm_rollout.kernel.http.engine import CandidateEnd, CandidateTokens
from vllm_rollout.kernel.http.protocol import Included
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.kernel.rules.types import Confidence


def trajectory_of(
    end: CandidateEnd,
    included: Set[Included],
    plan: GroupPlan,
    current_version: str | None = None,
    grade: Grade | None = None,
) -> Trajectory:
    """A selected candidate as the answer has it. `current_version`: the weights that its rollout began with.
    `grade`: None if it has not come."""
    mean, std = end.confidence or (None, None)
    scoring = _scoring(end, plan)
    survival = scoring.get("survival_probability", 1.0)
    return Trajectory(
        index=end.ending.index,
        num_tokens=end.ending.num_tokens,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        mean_confidence=mean,
        std_confidence=std,
        weight_versions=list(end.weight_versions),
        num_resumed_tokens=end.ending.num_resumed,
        off_policy=is_off_policy(
            {span["version"] for span in end.weight_versions}, end.ending.num_resumed, current_version
        ),
        inclusion_probability=survival if plan.returns_all else None,
        **_final(end),
        **_content(end, included),
        **scoring,
        **({} if grade is None else reward_of(grade)),
    )


def is_off_policy(versions: Collection[str], num_resumed: int, current: str | None) -> bool:
    """True if weights other than those of its rollout sampled, or may have sampled, some of a trajectory's tokens.

    Args:
        versions: weight versions of the trajectory's tokens.
        num_resumed: tokens of the trajectory from an earlier rollout.
        current: the version at the beginning of the rollout. None: unknown, and the weights count as changed since the
            earlier rollout.
    """
    if not num_resumed:
        return len(set(versions)) > 1
    return current is None or set(versions) != {current}


def candidate_of(end: CandidateEnd, included: Set[Included], plan: GroupPlan) -> Candidate:
    fields = {
        "index": end.ending.index,
        "num_tokens": end.ending.num_tokens,
        "state": end.ending.state,
        "error": end.error,
        **_scoring(end, plan),
    }
    if "stopped" not in included:
        return Candidate(**fields)
    return StoppedCandidate(**fields, **_content(end, included), ended_by_itself=end.ending.ended_by_itself)


def tokens_of(prompt_id: str, tokens: CandidateTokens, included: Set[Included]) -> TokensEvent:
    return TokensEvent(
        prompt_id=prompt_id,
        index=tokens.index,
        offset=tokens.offset,
        token_ids=list(tokens.token_ids),
        logprobs=list(tokens.logprobs) if "logprobs" in included and tokens.logprobs is not None else None,
    )


def _content(end: CandidateEnd, included: Set[Included]) -> dict[str, Any]:
    return {
        "token_ids": list(end.token_ids),
        "logprobs": list(end.logprobs) if "logprobs" in included and end.logprobs is not None else None,
        "text": end.text if "text" in included else None,
    }


def reward_of(grade: Grade) -> dict[str, Any]:
    return {
        "reward": grade.reward,
        "reward_parts": grade.parts,
        "reward_status": grade.status,
        "reward_reason": grade.reason,
        "reward_s": grade.seconds,
    }


def _scoring(end: CandidateEnd, plan: GroupPlan) -> dict[str, Any]:
    """Fields about the score. Empty without pruning.

    A trainer weights a trajectory by 1 / `survival_probability`. Shadow mode stops no candidate, so there it is 1, or
    the probability from earlier rounds.
    """
    pruning = plan.pruning
    if pruning is None:
        return {}
    shadow = pruning.mode == "shadow"
    assessment = end.assessment
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
        "score_weight_version": version_of_token(end, pruning.detection_length - 1),
    }
    if shadow:
        fields["would_prune"] = not assessment.keep
        fields["shadow_survival_probability"] = assessment.survival_probability
    return fields


def _final(end: CandidateEnd) -> dict[str, Any]:
    """Fields about the score at the last token. Empty without a trained head."""
    if end.final is None or end.final.head_version == 0:
        return {}
    return {"final_score": end.final.score, "final_success_probability": end.final.success_probability}


def _confidence(confidence: Confidence) -> ConfidenceAnswer | None:
    """The confidence, or None if a part of it was not observed: JSON has no NaN."""
    return ConfidenceAnswer(**confidence._asdict()) if all(map(isfinite, confidence)) else None


def version_of_token(end: CandidateEnd, position: int) -> str | None:
    """The weight version that sampled the output token at `position`. None if the engine does not know it."""
    spans = (span for span in end.weight_versions if span["start"] <= position < span["end"])
    return next((span["version"] for span in spans), None)
