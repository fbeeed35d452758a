"""Compares detection lengths by candidates that were scored at several of them, and recommends one (ARRoL Fig. 2d).

A later score is more accurate and saves less. The value of pruning at a length is defined as

    value = saving * (2 AUC - 1)

saving: share of all tokens that is not generated if 1 - keep_ratio of the candidates that get there are stopped there.
2 AUC - 1: quality of the score's choice, from 0 (random) to 1 (always right). The value is 0 if nothing is saved, or if
the score predicts nothing, and needs no assumed price of a token or an error. The recommended length is the shortest
whose value is within a standard error of the best. Siblings resemble each other, so standard errors are those of a
sample of prompts. A trial is evaluated many times, so the best length has to exceed chance by more than in one test.

Invariant: all lengths are compared by the same candidates, each score given before its reward was known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, sqrt
from typing import Any, NamedTuple

from vllm_rollout.checks import MAX_SCORE, flag, integer, listed, shown, text
from vllm_rollout.config import MAX_DETECTION_LENGTH, MAX_TRIAL_LENGTHS
from vllm_rollout.kernel.rules.types import Signal
from vllm_rollout.parts.pruning.rules.pruning_plan import SIGNALS, PruningPlan
from vllm_rollout.parts.pruning.rules.report import MAX_GROUP_CHARS, Prediction, by_signal, within_group_auc

TRIAL_WINDOW = 2048
"""Newest rewarded candidates in a trial."""
MIN_OF_EACH = 64
"""Right and wrong answers that a signal must have scored at every length before a recommendation. An AUC is then
known to some 0.05."""
MIN_OF_EACH_WHEN_FULL = 8
"""Right and wrong answers that are enough once the window is full, since more may never come. Lengths with fewer are
left out then."""
MIN_ERRORS = 3.0
"""Standard errors by which the best length's AUC must exceed chance, at each of many evaluations."""

DEFAULT_KEEP_RATIO = PruningPlan(1).keep_ratio


class TriedCandidate(NamedTuple):
    """A rewarded candidate that was to be scored at several lengths."""

    lengths: tuple[int, ...]
    """Detection lengths of its trial, ascending."""
    scores: tuple[Mapping[Signal, float], ...]
    """Scores at each length. Empty if it ended before. The head's are standardized by its version's scale."""
    positive: bool
    num_tokens: int
    group: str


@dataclass(frozen=True, slots=True)
class TriedLength:
    """Value of one detection length."""

    detection_length: int
    num_positive: int
    num_negative: int
    """Right and wrong answers of candidates that reached the length and were scored."""
    auc: float | None
    auc_error: float | None
    """Standard error for a sample of prompts, not of answers (Obuchowski 1997)."""
    within_group_auc: float | None
    cost_ratio: float
    """Share of all tokens that is generated before any candidate can be stopped."""
    saving_ratio: float
    """Share of all tokens that is not generated if 1 - keep_ratio of the candidates that reach the length are
    stopped."""
    value: float | None
    """saving_ratio * (2 AUC - 1). None without an AUC."""


@dataclass(frozen=True, slots=True)
class LengthTrialReport:
    """State of a length trial."""

    num_candidates: int
    signal: Signal
    """Signal of the scores: the quality head once it has scored enough candidates, before that trace confidence."""
    keep_ratio: float
    lengths: Sequence[TriedLength]
    recommended: int | None
    reason: str
    """Reason for the recommendation, or for its absence."""


def tried_from_state(values: Any) -> TriedCandidate:
    """Restore a tried candidate. Raises: ValueError for a state that no tried candidate can have."""
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
    """Values of the lengths that most of these candidates tried, for pruning that keeps `keep_ratio`, in (0, 1]."""
    if not candidates:
        reason = 'no trial so far: name several lengths, "detection_length": [16, 48, 128], and post rewards'
        return LengthTrialReport(0, "head", keep_ratio, (), None, reason)
    lengths, _ = Counter(candidate.lengths for candidate in candidates).most_common(1)[0]
    is_full = len(candidates) >= TRIAL_WINDOW
    candidates = [candidate for candidate in candidates if candidate.lengths == lengths]
    by_signal = {
        signal: [_tried(place, signal, candidates, keep_ratio) for place in range(len(lengths))] for signal in SIGNALS
    }
    known = (s for s in SIGNALS if all(map(_is_known, by_signal[s])))
    signal = next(known, max(SIGNALS, key=lambda s: by_signal[s][0].num_positive + by_signal[s][0].num_negative))
    tried = by_signal[signal]
    recommended, reason = _recommended(tried, is_full=is_full)
    return LengthTrialReport(len(candidates), signal, keep_ratio, tried, recommended, reason)


def chosen(plan: PruningPlan, recommended: int | None) -> PruningPlan:
    """The plan that `auto` means now: the recommended length, or a trial while there is none.

    Audit groups still try all lengths, so that the recommendation can change later.
    """
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


def _is_known(tried: TriedLength, min_of_each: int = MIN_OF_EACH) -> bool:
    return min(tried.num_positive, tried.num_negative) >= min_of_each


def _recommended(tried: Sequence[TriedLength], *, is_full: bool) -> tuple[int | None, str]:
    """`is_full`: no more labels may come."""
    min_of_each = MIN_OF_EACH_WHEN_FULL if is_full else MIN_OF_EACH
    known = [each for each in tried if _is_known(each, min_of_each)]
    unknown = next((each for each in tried if each not in known), None)
    if unknown is not None and not (known and is_full):
        return None, (
            f"{unknown.num_positive} right and {unknown.num_negative} wrong answers were scored at "
            f"{unknown.detection_length} tokens so far, {min_of_each} of each are needed"
        )
    best = max(known, key=lambda each: (each.value, -each.detection_length))
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
    shortest = next(each for each in known if each.value is not None and each.value >= least)
    if shortest is best:
        return best.detection_length, "it is worth most"
    return shortest.detection_length, (
        f"the shortest within a standard error of {best.detection_length}, which is worth most"
    )


def _auc(seen: Sequence[tuple[float, TriedCandidate]]) -> tuple[float | None, float | None]:
    """AUC and its standard error. None without both kinds of labels, or the error of a single prompt.

    Each prompt moves the AUC by the sum of its answers' contributions, and prompts are independent.

    Source: Obuchowski 1997. The error is that of DeLong et al. 1988 if each prompt has one answer.
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
    """Share of `ordered` below the score. Ties count half."""
    return (bisect_left(ordered, score) + bisect_right(ordered, score)) / (2 * len(ordered))
