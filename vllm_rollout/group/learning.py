"""Learning: observations in, assessments out; rewards in, better assessments out. One per detection length.

Invariant: an assessment depends on the plan, the observations, the siblings decided before, the chance arguments and
the two calibrators, and on nothing else; a restored Learning decides as the saved one.

A head that changes while it trains mixes scores of several versions in its windows. They slide, and the recent scores,
which set the keep ratio, slide fastest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, NamedTuple, TypeVar

from vllm_rollout.config import MAX_DETECTION_LENGTH, MAX_LABEL_WEIGHT
from vllm_rollout.group.calibration import Calibrator
from vllm_rollout.group.checks import MAX_SCORE, fields_of, flag, integer, listed, number, shown, text
from vllm_rollout.group.pruning import Point, choose_survivors, compress, group_rule, solve_paper
from vllm_rollout.group.pruning_plan import SIGNALS, PruningPlan
from vllm_rollout.group.report import Prediction, RulesReport, ShadowReport, signal_report, weighted_mean
from vllm_rollout.group.types import Assessment, Observation, Signal

REPORT_WINDOW = 4096
"""Newest rewarded candidates, and verdicts, that the report speaks about."""

Solution = TypeVar("Solution")


LEAST_SURVIVAL = 1e-9
"""Survival probabilities below are taken as this in the report, whose sums stay finite."""

MAX_GROUP_CHARS = 2**16
"""Longest name of a group in a state."""


class RewardedCandidate(NamedTuple):
    """A rewarded candidate, as the report needs it."""

    scores: Mapping[Signal, float]
    success_probabilities: Mapping[Signal, float]
    """Before the reward was known; only of signals whose calibration knew enough."""
    positive: bool
    weight: float
    """1 / survival probability, clipped; 1 in shadow mode."""
    group: str
    active: bool
    keep: bool
    survival_probability: float
    cold: bool
    tokens_after: int
    """Tokens generated after `detection_length`."""

    @classmethod
    def from_state(cls, values: Any) -> RewardedCandidate:
        """Raises: ValueError."""
        outcome = cls(*listed(values, "an outcome", length=len(cls._fields)))
        return cls(
            scores=_by_signal(outcome.scores, "a score of an outcome", -MAX_SCORE, MAX_SCORE),
            success_probabilities=_by_signal(outcome.success_probabilities, "a success probability", 0.0, 1.0),
            positive=flag(outcome.positive, "an outcome's success"),
            weight=number(outcome.weight, "weight of an outcome", 0.0, MAX_LABEL_WEIGHT, above=True),
            group=text(outcome.group, "group of an outcome", MAX_GROUP_CHARS),
            active=flag(outcome.active, "active of an outcome"),
            keep=flag(outcome.keep, "keep of an outcome"),
            survival_probability=number(outcome.survival_probability, "a survival probability", 0.0, 1.0, above=True),
            cold=flag(outcome.cold, "cold of an outcome"),
            tokens_after=integer(outcome.tokens_after, "tokens_after of an outcome"),
        )


def _by_signal(values: Any, where: str, least: float, most: float) -> dict[Signal, float]:
    if not isinstance(values, Mapping) or not set(values) <= set(SIGNALS):
        raise ValueError(f"{where}: expected numbers by signal ({', '.join(SIGNALS)}), got {shown(values)}")
    return {signal: number(value, where, least, most) for signal, value in values.items()}


class Learning:
    """What one detection length has learned from rewards."""

    def __init__(self, detection_length: int) -> None:
        self.detection_length = detection_length
        self.calibrators: dict[Signal, Calibrator] = {signal: Calibrator(signal) for signal in SIGNALS}
        self._outcomes: deque[RewardedCandidate] = deque(maxlen=REPORT_WINDOW)
        self._verdicts: deque[bool] = deque(maxlen=REPORT_WINDOW)
        """Of active pruning, cold starts left out: was it kept?"""
        self._solved: dict[tuple[Signal, PruningPlan | None], tuple[int, Any]] = {}
        """Solutions, with the state of the calibrator they hold for."""

    def assess(
        self,
        plan: PruningPlan,
        observations: Mapping[int, Observation],
        earlier: Mapping[int, Assessment],
        *,
        seed: int,
        group: str,
        at_least: int,
    ) -> dict[int, Assessment]:
        """Judge the siblings of one group that are due in the same step.

        earlier: the group's assessments so far. at_least: how many of these have to be kept.
        """
        seen = {index: scores_of(observations[index]) for index in sorted(observations)}
        for scores_by_signal in seen.values():
            for signal, score in scores_by_signal.items():
                self.calibrators[signal].observe(score)
        warm = self._warm_signals(plan)
        # One sibling whose score is no number falls back, or is kept, by itself.
        usable = {index: next((s for s in warm if s in scores), None) for index, scores in seen.items()}
        signals = {index: signal for index, signal in usable.items() if signal is not None}
        unjudged = {index: _keep(plan, observations[index], cold=not warm) for index in seen if index not in signals}
        if not signals:
            return unjudged
        successes = {i: self.calibrators[signal].success_probability(seen[i][signal]) for i, signal in signals.items()}
        best = min(signals.values(), key=warm.index)
        wanted = self._survival(plan, best, successes, earlier)
        survivors = choose_survivors(wanted, seed=seed, group=group, at_least=max(0, at_least - len(unjudged)))
        if plan.mode == "active":
            self._verdicts.extend(index in survivors.kept for index in signals)
        return unjudged | {
            index: Assessment(
                signal=signal,
                score=seen[index][signal],
                success_probability=successes[index],
                survival_probability=survivors.probabilities[index],
                keep=index in survivors.kept,
                head_version=observations[index].head_version,
                confidence=observations[index].confidence,
            )
            for index, signal in signals.items()
        }

    def reward(
        self,
        observation: Observation,
        assessment: Assessment,
        num_tokens: int,
        positive: bool,
        group_key: str,
        active: bool,
    ) -> None:
        """The reward of a scored candidate came. In shadow mode nobody was pruned: it stands for itself only."""
        weight = label_weight(assessment.survival_probability if active else 1.0)
        scores = scores_of(observation)
        successes: dict[Signal, float] = {}
        for signal, score in scores.items():
            calibrator = self.calibrators[signal]
            if signal == assessment.signal:
                if assessment.success_probability is not None:
                    successes[signal] = assessment.success_probability
            elif _is_warm(calibrator, DEFAULT_MIN_LABELS):
                successes[signal] = calibrator.success_probability(score)
            calibrator.add(score, positive, weight)
        self._outcomes.append(
            RewardedCandidate(
                scores=scores,
                success_probabilities=successes,
                positive=bool(positive),
                weight=weight,
                group=group_key,
                active=active,
                keep=assessment.keep,
                survival_probability=assessment.survival_probability,
                cold=assessment.cold,
                tokens_after=max(0, num_tokens - self.detection_length),
            )
        )

    @property
    def num_judged(self) -> int:
        """Newest verdicts of active pruning."""
        return len(self._verdicts)

    @property
    def num_pruned(self) -> int:
        """How many of those."""
        return len(self._verdicts) - sum(self._verdicts)

    def outcomes(self) -> list[RewardedCandidate]:
        """The newest rewarded candidates."""
        return list(self._outcomes)

    def report(self) -> RulesReport:
        return rules_report(self._outcomes, self.num_judged, self.num_pruned)

    def to_state(self) -> dict[str, Any]:
        """JSON-able; bounded by the windows. Its lists are the caller's, their entries never change."""
        return {
            "detection_length": self.detection_length,
            "calibrators": [self.calibrators[signal].to_state() for signal in SIGNALS],
            "outcomes": list(self._outcomes),
            "verdicts": list(self._verdicts),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Learning:
        """Raises: ValueError for what `to_state` cannot have written."""
        fields_of(state, STATE_FIELDS, "a learning")
        learning = cls(integer(state["detection_length"], "detection_length of a learning", 1, MAX_DETECTION_LENGTH))
        saved = [Calibrator.from_state(each) for each in listed(state["calibrators"], "calibrators of a learning")]
        if [calibrator.signal for calibrator in saved] != list(SIGNALS):
            got = [calibrator.signal for calibrator in saved]
            raise ValueError(f"calibrators of a learning must be for {', '.join(SIGNALS)}, got {shown(got)}")
        learning.calibrators = {calibrator.signal: calibrator for calibrator in saved}
        learning._outcomes.extend(
            RewardedCandidate.from_state(values)
            for values in listed(state["outcomes"], "outcomes of a learning", REPORT_WINDOW)
        )
        learning._verdicts.extend(
            flag(kept, "a verdict of a learning")
            for kept in listed(state["verdicts"], "verdicts of a learning", REPORT_WINDOW)
        )
        return learning

    def _warm_signals(self, plan: PruningPlan) -> list[Signal]:
        """What can be judged by, best first: the plan's signal, and confidence in place of a head that knows too
        little. None of them: a cold start."""
        wanted: tuple[Signal, ...] = ("head", "confidence") if plan.signal == "head" else ("confidence",)
        return [signal for signal in wanted if _is_warm(self.calibrators[signal], plan.min_labels)]

    def _survival(
        self,
        plan: PruningPlan,
        signal: Signal,
        successes: Mapping[int, float],
        earlier: Mapping[int, Assessment],
    ) -> dict[int, float]:
        if plan.keep_ratio >= 1:
            return dict.fromkeys(successes, 1.0)
        if plan.rule == "paper":
            rule = self._solution((signal, plan), lambda points: solve_paper(points, plan))
        else:
            decided = [(a.success_probability, a.keep) for a in earlier.values() if a.success_probability is not None]
            # in the order of indices: floating-point sums must not depend on the order of the mapping
            batch = [successes[index] for index in sorted(successes)]
            rule = group_rule(batch, sorted(decided), self._solution((signal, None), compress), plan)
        return {index: rule.survival(q) for index, q in successes.items()}

    def _solution(self, key: tuple[Signal, PruningPlan | None], solve: Callable[[list[Point]], Solution]) -> Solution:
        """What `solve` makes of the signal's recent scores, kept until they or the labels change."""
        calibrator = self.calibrators[key[0]]
        changes, solution = self._solved.get(key, (-1, None))
        if changes != calibrator.num_changes:
            solution = solve(calibrator.points())
            if len(self._solved) >= MAX_SOLVED:
                self._solved.clear()
            self._solved[key] = (calibrator.num_changes, solution)
        return solution


DEFAULT_MIN_LABELS = PruningPlan(1).min_labels

STATE_FIELDS = ("detection_length", "calibrators", "outcomes", "verdicts")

MAX_SOLVED = 64
"""Plans whose solution is kept; a client that varies its plan endlessly must not fill memory."""


def label_weight(survival_probability: float) -> float:
    """How many scored candidates a survivor's label stands for; clipped at `MAX_LABEL_WEIGHT`."""
    return min(MAX_LABEL_WEIGHT, 1 / survival_probability)


def scores_of(observation: Observation) -> dict[Signal, float]:
    """The usable scores: the head's logit when there is one, and the confidence; never NaN or infinite."""
    scores: dict[Signal, float] = {}
    if observation.logit is not None and isfinite(observation.logit):
        scores["head"] = observation.logit
    if isfinite(observation.confidence.bottom_windows):
        scores["confidence"] = observation.confidence.bottom_windows
    return scores


def _is_warm(calibrator: Calibrator, min_labels: int) -> bool:
    return min(calibrator.num_positive, calibrator.num_negative) >= min_labels


def _keep(plan: PruningPlan, observation: Observation, *, cold: bool) -> Assessment:
    """Not judged: a cold start, or no score that is a number."""
    scores = scores_of(observation)
    signal: Signal = plan.signal if plan.signal in scores else "confidence"
    return Assessment(
        signal=signal,
        score=scores.get(signal, 0.0),
        success_probability=None,
        survival_probability=1.0,
        keep=True,
        head_version=observation.head_version,
        confidence=observation.confidence,
        cold=cold,
    )


def rules_report(outcomes: Iterable[RewardedCandidate], num_judged: int, num_pruned: int) -> RulesReport:
    """Over the newest rewarded candidates, and the newest verdicts of active pruning."""
    outcomes = list(outcomes)
    judged = [outcome for outcome in outcomes if not outcome.cold]
    return RulesReport(
        signals={signal: signal_report(_predictions(outcomes, signal)) for signal in SIGNALS},
        active=_active_report([o for o in judged if o.active], num_judged, num_pruned),
        shadow=_shadow_report([o for o in judged if not o.active]),
    )


def _predictions(outcomes: Iterable[RewardedCandidate], signal: Signal) -> list[Prediction]:
    return [
        Prediction(
            outcome.scores[signal],
            outcome.success_probabilities.get(signal),
            outcome.positive,
            outcome.weight,
            outcome.group,
        )
        for outcome in outcomes
        if signal in outcome.scores
    ]


def _active_report(outcomes: list[RewardedCandidate], num_judged: int, num_pruned: int) -> ShadowReport:
    # a survivor kept with probability p stands for (1 - p) / p pruned candidates like it
    odds = [(1 / max(o.survival_probability, LEAST_SURVIVAL) - 1, float(o.tokens_after)) for o in outcomes]
    tokens_each = weighted_mean(odds)
    return ShadowReport(
        num_scored=num_judged,
        num_pruned=num_pruned,
        tokens_saved=round(num_pruned * (tokens_each or 0.0)),
        positive_ratio=weighted_mean((o.weight, float(o.positive)) for o in outcomes),
        survivors_positive_ratio=weighted_mean((1.0, float(o.positive)) for o in outcomes),
    )


def _shadow_report(outcomes: list[RewardedCandidate]) -> ShadowReport:
    marked = [o for o in outcomes if not o.keep]
    return ShadowReport(
        num_scored=len(outcomes),
        num_pruned=len(marked),
        tokens_saved=sum(o.tokens_after for o in marked),
        positive_ratio=weighted_mean((1.0, float(o.positive)) for o in outcomes),
        survivors_positive_ratio=weighted_mean((1.0, float(o.positive)) for o in outcomes if o.keep),
    )
