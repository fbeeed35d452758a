"""Which detection length is best: candidates that were scored at several, and what became of them (ARRoL Fig. 2d).

A later score knows more and saves less. What pruning is worth at a length is taken to be

    value = saving * (2 AUC - 1)

saving: share of all tokens that are not generated when 1 - keep_ratio of those that get there are stopped there;
2 AUC - 1: how far the score's choice is from a throw of dice, 0, to one that never errs, 1. It is 0 where nothing is
saved and where nothing is known, and asks for no guess of what a token or an error costs. The recommended length is the
shortest whose value is within a standard error of the best. Siblings resemble each other, so errors are those of a
sample of prompts; and since a trial is looked at again and again, the best length has to be better than chance by more
than one look would ask for.

Invariant: all lengths are compared by the same candidates, each score given before its reward was known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, sqrt
from typing import Any, NamedTuple

from vllm_rollout.config import MAX_DETECTION_LENGTH, MAX_TRIAL_LENGTHS
from vllm_rollout.group.checks import MAX_SCORE, flag, integer, listed, shown, text
from vllm_rollout.group.judging.report import MAX_GROUP_CHARS, Prediction, by_signal, within_group_auc
from vllm_rollout.group.plans.pruning_plan import SIGNALS, PruningPlan
from vllm_rollout.group.types import Signal

TRIAL_WINDOW = 2048
"""Newest rewarded candidates that a trial speaks about."""
MIN_OF_EACH = 64
"""Right and wrong answers that a signal has to have scored at every length before one is recommended: an AUC is then
known to some 0.05."""
MIN_ERRORS = 3.0
"""Standard errors by which the best length's AUC has to differ from chance, at each of many looks."""

DEFAULT_KEEP_RATIO = PruningPlan(1).keep_ratio


class TriedCandidate(NamedTuple):
    """A rewarded candidate that was to be scored at several lengths."""

    lengths: tuple[int, ...]
    """What was tried, ascending."""
    scores: tuple[Mapping[Signal, float], ...]
    """Scores at each length; empty where it ended before. The head's are as its version's scale had them."""
    positive: bool
    num_tokens: int
    group: str


@dataclass(frozen=True, slots=True)
class TriedLength:
    """What one length would be worth."""

    detection_length: int
    num_positive: int
    num_negative: int
    """Right and wrong answers among those that got there and were scored."""
    auc: float | None
    auc_error: float | None
    """Standard error, prompts being drawn and not answers (Obuchowski 1997)."""
    within_group_auc: float | None
    cost_ratio: float
    """Share of all tokens that is generated before anybody can be stopped."""
    saving_ratio: float
    """Share of all tokens that is not generated when 1 - keep_ratio of those that get there are stopped."""
    value: float | None
    """saving_ratio * (2 AUC - 1)."""


@dataclass(frozen=True, slots=True)
class LengthTrialReport:
    """A trial so far."""

    num_candidates: int
    signal: Signal
    """What the scores are of: the quality head's once it has scored enough, before that trace confidence."""
    keep_ratio: float
    lengths: Sequence[TriedLength]
    recommended: int | None
    reason: str
    """Why that one, or why none."""


def tried_from_state(values: Any) -> TriedCandidate:
    """Raises: ValueError for what no tried candidate can have been."""
    lengths, scores, positive, num_tokens, group = listed(values, "a tried candidate", length=5)
    lengths = tuple(
        integer(length, "a tried length", 1, MAX_DETECTION_LENGTH)
        for length in listed(lengths, "tried lengths", MAX_TRIAL_LENGTHS)
    )
    if list(lengths) != sorted(set(lengths)):
        raise ValueError(f"tried lengths must ascend, got {shown(lengths)}")
    return TriedCandidate(
        lengths,
        tuple(
            by_signal(its, "a score of a tried candidate", -MAX_SCORE, MAX_SCORE)
            for its in listed(scores, "scores of a tried candidate", length=len(lengths))
        ),
        flag(positive, "a tried candidate's success"),
        integer(num_tokens, "num_tokens of a tried candidate"),
        text(group, "group of a tried candidate", MAX_GROUP_CHARS),
    )


def length_trial_report(
    candidates: Sequence[TriedCandidate], keep_ratio: float = DEFAULT_KEEP_RATIO
) -> LengthTrialReport:
    """What the lengths are worth that most of these tried, by pruning that keeps `keep_ratio`, in (0, 1]."""
    if not candidates:
        reason = 'no trial so far: name several lengths, "detection_length": [16, 48, 128], and post rewards'
        return LengthTrialReport(0, "head", keep_ratio, (), None, reason)
    lengths, _ = Counter(candidate.lengths for candidate in candidates).most_common(1)[0]
    candidates = [candidate for candidate in candidates if candidate.lengths == lengths]
    by_signal = {
        signal: [_tried(place, signal, candidates, keep_ratio) for place in range(len(lengths))] for signal in SIGNALS
    }
    known = (s for s in SIGNALS if all(map(_is_known, by_signal[s])))
    signal = next(known, max(SIGNALS, key=lambda s: by_signal[s][0].num_positive + by_signal[s][0].num_negative))
    tried = by_signal[signal]
    recommended, reason = _recommended(tried)
    return LengthTrialReport(len(candidates), signal, keep_ratio, tried, recommended, reason)


def chosen(plan: PruningPlan, recommended: int | None) -> PruningPlan:
    """What a plan with `auto` means now: the recommended length, or, while there is none, a trial. Audit groups go on
    trying all of them, so that the choice can be another one later."""
    if recommended is None:
        return replace(plan, auto=False, mode="shadow")
    others = {plan.detection_length, *plan.trial_lengths} - {recommended}
    return replace(plan, auto=False, detection_length=recommended, trial_lengths=tuple(sorted(others)))


def _tried(place: int, signal: Signal, candidates: Sequence[TriedCandidate], keep_ratio: float) -> TriedLength:
    length = candidates[0].lengths[place]
    seen = [(c.scores[place][signal], c) for c in candidates if signal in c.scores[place]]
    num_positive = sum(c.positive for _, c in seen)
    auc, error = _auc(seen)
    total = sum(c.num_tokens for c in candidates)
    before = sum(min(length, c.num_tokens) for c in candidates)
    cost = before / total if total else 1.0
    saving = (1 - keep_ratio) * (1 - cost)
    return TriedLength(
        detection_length=length,
        num_positive=num_positive,
        num_negative=len(seen) - num_positive,
        auc=auc,
        auc_error=error,
        within_group_auc=within_group_auc(Prediction(score, None, c.positive, 1.0, c.group) for score, c in seen),
        cost_ratio=cost,
        saving_ratio=saving,
        value=None if auc is None else saving * (2 * auc - 1),
    )


def _is_known(tried: TriedLength) -> bool:
    return min(tried.num_positive, tried.num_negative) >= MIN_OF_EACH


def _recommended(tried: Sequence[TriedLength]) -> tuple[int | None, str]:
    unknown = next((each for each in tried if not _is_known(each)), None)
    if unknown is not None:
        return None, (
            f"{unknown.num_positive} right and {unknown.num_negative} wrong answers were scored at "
            f"{unknown.detection_length} tokens so far, {MIN_OF_EACH} of each are needed"
        )
    best = max(tried, key=lambda each: (each.value, -each.detection_length))
    # Where enough is known, there are labels of both kinds.
    assert best.auc is not None
    assert best.value is not None
    if best.auc_error is None:
        return (
            None,
            "all rewards are of answers of one prompt, which says nothing of others: those of more are needed",
        )
    if best.auc - MIN_ERRORS * best.auc_error <= 0.5:
        return None, f"no length tells right from wrong better than chance: at best AUC {best.auc:.2f}"
    least = best.value - 2 * best.saving_ratio * best.auc_error
    shortest = next(each for each in tried if each.value is not None and each.value >= least)
    if shortest is best:
        return best.detection_length, "it is worth most"
    return shortest.detection_length, (
        f"the shortest within a standard error of {best.detection_length}, which is worth most"
    )


def _auc(seen: Sequence[tuple[float, TriedCandidate]]) -> tuple[float | None, float | None]:
    """AUC and its standard error; None without both kinds, or of one prompt.

    Each prompt moves the AUC by the sum of what its answers do, and prompts are independent.
    Source: Obuchowski 1997, whose error is that of DeLong et al. 1988 where each prompt has one answer.
    """
    rights = sorted(score for score, c in seen if c.positive)
    wrongs = sorted(score for score, c in seen if not c.positive)
    if not rights or not wrongs:
        return None, None
    below = [(_share_below(wrongs, s) if c.positive else 1 - _share_below(rights, s), c) for s, c in seen]
    auc = fsum(share for share, c in below if c.positive) / len(rights)
    moves: defaultdict[str, float] = defaultdict(float)
    for share, c in below:
        moves[c.group] += (share - auc) / len(rights if c.positive else wrongs)
    if len(moves) < 2:
        return auc, None
    return auc, sqrt(fsum(move * move for move in moves.values()) * len(moves) / (len(moves) - 1))


def _share_below(ordered: Sequence[float], score: float) -> float:
    """Ties count half."""
    return (bisect_left(ordered, score) + bisect_right(ordered, score)) / (2 * len(ordered))
