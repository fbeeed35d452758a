"""Trajectories and candidates for answers, made from the engine's reports. Invariant: content that was not requested
is left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any

from vllm_rollout.kernel.http.answers import Candidate, StoppedCandidate, TokensEvent, Trajectory
from vllm_rollout.kernel.http.engine import CandidateEnd, CandidateTokens
from vllm_rollout.kernel.http.protocol import Included
from vllm_rollout.kernel.rules.rewards import Grade


def trajectory_of(
    end: CandidateEnd,
    included: Set[Included],
    of_parts: Mapping[str, Any],
    current_version: str | None = None,
    grade: Grade | None = None,
) -> Trajectory:
    """A selected candidate as the answer has it. `of_parts`: fields of parts. `current_version`: the weights that its
    rollout began with. `grade`: None if it has not come."""
    mean, std = end.confidence or (None, None)
    return Trajectory(
        index=end.ending.index,
        num_tokens=end.ending.num_tokens,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        mean_confidence=mean,
        std_confidence=std,
        num_resumed_tokens=end.ending.num_resumed,
        off_policy=is_off_policy(
            {span["version"] for span in end.weight_versions}, end.ending.num_resumed, current_version
        ),
        **_content(end, included),
        **of_parts,
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


def candidate_of(end: CandidateEnd, included: Set[Included], of_parts: Mapping[str, Any]) -> Candidate:
    fields = {
        "index": end.ending.index,
        "num_tokens": end.ending.num_tokens,
        "state": end.ending.state,
        "error": end.error,
        **of_parts,
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
        "weight_versions": list(end.weight_versions),
    }


def reward_of(grade: Grade) -> dict[str, Any]:
    return {
        "reward": grade.reward,
        "reward_parts": grade.parts,
        "reward_status": grade.status,
        "reward_reason": grade.reason,
        "reward_s": grade.seconds,
    }
