"""What a run's rounds will ask of an engine, before any of them. Invariant: a run that was accepted can be expected."""

from __future__ import annotations

from vllm_rollout.group.lengths.moments import LengthMoments
from vllm_rollout.group.ranks.forecast import ExpectedRound, expected_round
from vllm_rollout.server.runs.body import RunRequest

PROMPT_TOKENS = 256
"""Assumed of a prompt; its siblings share them, so that they are little beside the answers."""


def expected_of_run(settings: RunRequest, seen: LengthMoments | None, max_model_len: int) -> ExpectedRound:
    """A short round.

    Args:
        seen: lengths of the data set; None when there are none yet.
        max_model_len: what bounds answers when the run does not.
    """
    terms = settings.terms
    spare = settings.redundancy if isinstance(settings.redundancy, int) else 0
    num_candidates = terms.num_candidates + spare
    max_tokens = (settings.sampling or {}).get("max_tokens") or max_model_len
    return expected_round(
        terms.num_prompts * num_candidates,
        terms.prompts_per_round * terms.group_size,
        min(max_tokens, max_model_len),
        mean_tokens=None if seen is None else seen.mean,
        std_tokens=None if seen is None else seen.std,
        prompt_tokens=PROMPT_TOKENS,
        group_size=num_candidates,
    )
