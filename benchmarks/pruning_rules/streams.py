"""Streams of groups that are pruned by what their own rewards have taught, and what the trainer gets of them.

Groups come in steps; a step's rewards are posted when it is over, and teach what the next one is pruned by. The first
groups of a stream are left out: its cold start, and the window of labels before survivors fill it. A pruned candidate
has generated `DETECTION_SHARE` of an answer, every other one a whole answer, so that tokens are counted in answers.

Invariant: all ways of a world see the same groups, and a way learns from survivors' rewards only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchmarks.pruning_rules.world import GROUP_SIZE, Groups, no_variance, quality
from vllm_rollout.group.judging.advice import Advice, advise
from vllm_rollout.group.judging.audit import draw_audit
from vllm_rollout.group.judging.learning import Learning, Siblings
from vllm_rollout.group.judging.survivors import choose_survivors
from vllm_rollout.group.plans.pruning_plan import PruningPlan
from vllm_rollout.group.types import Assessment, Confidence, Observation

GROUPS_PER_STEP = 16
DETECTION_SHARE = 1 / 8
"""Of a mean answer, generated when a candidate is scored."""
SHARPER = 2.0
"""By what a head's logits are multiplied when it is swapped."""
NO_CONFIDENCE = Confidence(float("nan"), float("nan"), float("nan"))
PLAN = PruningPlan(detection_length=1, allow_fewer=True)


@dataclass(frozen=True, slots=True)
class Way:
    """How a stream is pruned."""

    plan: PruningPlan | None = PLAN
    """None: by no score."""
    keep_ratio: float = PLAN.keep_ratio
    """Without a score."""
    group_size: int = GROUP_SIZE
    """Candidates that are launched, of which these are the first."""
    audit_ratio: float = 0.0
    swaps_head: bool = False
    """In front of the groups that are measured the head's version changes, and all of its logits."""


WAYS: Mapping[str, Way] = {
    "none": Way(None, 1.0),
    "fewer": Way(None, 1.0, group_size=round(PLAN.keep_ratio * GROUP_SIZE)),
    "random": Way(None),
    "paper": Way(replace(PLAN, rule="paper")),
    "balance": Way(replace(PLAN, rule="balance")),
    "gradient": Way(),
    "audits": Way(audit_ratio=0.05),
    "swap": Way(swaps_head=True),
}
"""The last two are the gradient rule, the default, as "gradient" is."""


class Stream(NamedTuple):
    kept: np.ndarray
    """[num_groups, group_size], bool."""
    success: np.ndarray
    """[num_groups, group_size], q as it was believed; NaN: by no score, or during a cold start."""
    advice: Advice | None = None
    """What the report advises when the stream is over."""

    def part(self, chosen: slice) -> Stream:
        return Stream(self.kept[chosen], self.success[chosen])


def stream(groups: Groups, way: Way, num_unmeasured: int, seed: int) -> Stream:
    """Prune groups in their order, and learn from what is left of them."""
    num_groups, group_size = groups.rewards.shape
    stream = Stream(np.ones((num_groups, group_size), dtype=bool), np.full((num_groups, group_size), np.nan))
    if way.plan is None:
        for g in range(num_groups if way.keep_ratio < 1 else 0):
            chosen = choose_survivors(dict.fromkeys(range(group_size), way.keep_ratio), seed=seed, group=str(g))
            stream.kept[g] = [i in chosen.kept for i in range(group_size)]
        return stream
    learning = Learning(way.plan.detection_length)
    awaited: list[tuple[Observation, Assessment, int, bool, str, bool]] = []
    for g, scores in enumerate(groups.scores.tolist()):
        if g % GROUPS_PER_STEP == 0:
            for observation, assessment, tokens, positive, group, active in awaited:
                learning.reward(observation, assessment, tokens, positive, group, active=active)
            awaited.clear()
        is_audited = draw_audit(way.audit_ratio, seed, str(g), g)
        version, factor = (2, SHARPER) if way.swaps_head and g >= num_unmeasured else (1, 1.0)
        observations = {i: Observation(NO_CONFIDENCE, factor * score, version) for i, score in enumerate(scores)}
        plan = way.plan.audited(races=False) if is_audited else way.plan
        assessments = learning.assess(plan, observations, Siblings(seed, str(g), at_least=1))
        for i, assessment in assessments.items():
            if assessment.success_probability is not None:
                stream.success[g, i] = assessment.success_probability
            stream.kept[g, i] = is_audited or assessment.keep
            if stream.kept[g, i]:
                rewarded = round(1 / DETECTION_SHARE), bool(groups.rewards[g, i]), str(g), not is_audited
                awaited.append((observations[i], assessment, *rewarded))
    return stream._replace(advice=advise(learning.outcomes(), way.plan.detection_length))


@dataclass(frozen=True, slots=True)
class Measures:
    """What a way keeps, of one seed."""

    keep_ratio: float
    positive_ratio: float
    """Mean success of survivors."""
    reward_variance: float
    """E[rho (1 - rho)] over groups, of their survivors; without survivors 0."""
    no_variance: float
    """Share of groups that give no gradient."""
    quality: float
    """Signal to noise of a group's GRPO estimate: squared mean over variance."""
    per_token: float
    """The same over the tokens that the group has generated, counted in mean answers."""
    per_token_free: float
    """The same if pruned candidates had generated nothing: the most that pruning could save."""
    error_of_q: float | None
    """Root mean square of q as learned less q as it is; None without q."""


def measure(groups: Groups, stream: Stream, share: float) -> Measures:
    """share: correlation of success with the direction of the gradient."""
    kept = stream.kept
    num_kept = kept.sum(1)
    num_positive = (groups.rewards * kept).sum(1)
    ratio = num_positive / np.maximum(1, num_kept)
    answers = num_kept + DETECTION_SHARE * (kept.shape[1] - num_kept)
    signal_to_noise = quality(groups, kept, share)
    known = ~np.isnan(stream.success)
    errors = stream.success[known] - groups.q[known]
    return Measures(
        keep_ratio=float(kept.mean()),
        positive_ratio=float(num_positive.sum() / num_kept.sum()),
        reward_variance=float((ratio * (1 - ratio)).mean()),
        no_variance=float(no_variance(groups, kept).mean()),
        quality=signal_to_noise,
        per_token=signal_to_noise / float(answers.mean()),
        per_token_free=signal_to_noise / float(num_kept.mean()),
        error_of_q=math.sqrt(float((errors**2).mean())) if errors.size else None,
    )
