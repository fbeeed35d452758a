"""Calibration and rules of one detection length: observations give assessments, rewards improve them.

Invariant: an assessment depends only on the plan, the observations, earlier and later siblings, the prompt's past, the
seed arguments and the two calibrators. A restored Learning decides as the saved one.

Scores of several versions of a head are distinguished by the version in an observation. A calibrator makes them
comparable. Confidence has no versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, isfinite
from typing import Any, TypeVar

from vllm_rollout.checks import fields_of, flag, integer, listed, shown
from vllm_rollout.config import MAX_DETECTION_LENGTH
from vllm_rollout.kernel.rules.types import Signal
from vllm_rollout.parts.pruning.rules.assessment import Assessment
from vllm_rollout.parts.pruning.rules.calibration import Calibrator
from vllm_rollout.parts.pruning.rules.gradient import Population, gradient_rule, population_of
from vllm_rollout.parts.pruning.rules.pruning import Point, compress, group_rule, solve_paper
from vllm_rollout.parts.pruning.rules.pruning_plan import SIGNALS, WHOLE, Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.race_bias import AuditReport, AuditTally, LabelOrigin
from vllm_rollout.parts.pruning.rules.report import RewardedCandidate
from vllm_rollout.parts.pruning.rules.success import MAX_LABEL_WEIGHT, NO_REWARDS, PromptSuccess
from vllm_rollout.parts.pruning.rules.survivors import choose_survivors

REPORT_WINDOW = 4096
"""Newest rewarded candidates, and verdicts, in a report."""

POPULATION_WINDOW = 1024
"""Newest rewarded candidates in the population of the gradient rule. New rewards cost a millisecond."""

Solution = TypeVar("Solution")


@dataclass(frozen=True, slots=True)
class Siblings:
    """State of a group when some of its candidates are judged."""

    seed: int
    group: str
    """Random draws depend on (seed, group, index)."""
    at_least: int
    """Smallest number of the candidates judged now that must be kept."""
    earlier: Mapping[int, Assessment] = field(default_factory=dict)
    """Assessments of earlier siblings, by index."""
    num_to_come: int = 0
    """Number of siblings that may be judged later."""
    past: PromptSuccess = NO_REWARDS
    """Rewards of the prompt's earlier groups."""


class Learning:
    """Calibrators and statistics of one detection length, or of `WHOLE`."""

    def __init__(self, detection_length: int) -> None:
        self.detection_length = detection_length
        self.calibrators: dict[Signal, Calibrator] = {signal: Calibrator(signal) for signal in SIGNALS}
        self._audits = AuditTally()
        self._outcomes: deque[RewardedCandidate] = deque(maxlen=REPORT_WINDOW)
        self._verdicts: deque[bool] = deque(maxlen=REPORT_WINDOW)
        """Newest verdicts of active pruning, without cold starts. True: kept."""
        self._solved: dict[tuple[Signal, PruningPlan | str], tuple[int, Any]] = {}
        """(version of the calibrator, solution), by signal and plan."""
        self._populations: dict[Signal, tuple[tuple[float, ...], Population]] = {}
        """(table of the calibrator, population), by signal."""

    def assess(
        self,
        plan: PruningPlan,
        observations: Mapping[int, Observation],
        siblings: Siblings,
    ) -> dict[int, Assessment]:
        """Judge the candidates of one group that are due in the same step."""
        seen = {index: self._observe(observations[index]) for index in sorted(observations)}
        warm = self._warm_signals(plan)
        # One sibling whose score is no number falls back, or is kept, by itself.
        usable = {index: next((s for s in warm if s in scores), None) for index, scores in seen.items()}
        signals = {index: signal for index, signal in usable.items() if signal is not None}
        unjudged = {
            index: _kept(observations[index], plan.signal, cold=not warm) for index in seen if index not in signals
        }
        if not signals:
            return unjudged
        successes = {i: self._success(signal, seen[i][signal], observations[i]) for i, signal in signals.items()}
        best = min(signals.values(), key=warm.index)
        wanted = self._survival(plan, best, successes, siblings)
        floor = max(0, siblings.at_least - len(unjudged))
        survivors = choose_survivors(wanted, seed=siblings.seed, group=siblings.group, at_least=floor)
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

    def value(self, observation: Observation, survival_probability: float) -> Assessment:
        """Assess a score without a decision. `survival_probability`: probability that earlier decisions kept it."""
        scores = self._observe(observation)
        assessment = _kept(observation, "head", cold=True, survival_probability=survival_probability)
        signal = assessment.signal
        if signal not in scores or not self.calibrators[signal].is_warm(DEFAULT_MIN_LABELS):
            return assessment
        return replace(assessment, success_probability=self._success(signal, scores[signal], observation), cold=False)

    def predicted(self, observation: Observation, assessment: Assessment) -> dict[Signal, float]:
        """Success probability of a scored candidate by each warm signal, as known before its reward.

        Every reward changes the tables that this needs, so predict all of a batch before the first is added.
        """
        successes: dict[Signal, float] = {}
        for signal, score in scores_of(observation).items():
            if signal == assessment.signal:
                if assessment.success_probability is not None:
                    successes[signal] = assessment.success_probability
            elif self.calibrators[signal].is_warm(DEFAULT_MIN_LABELS):
                successes[signal] = self._success(signal, score, observation)
        return successes

    def reward(
        self,
        observation: Observation,
        assessment: Assessment,
        num_tokens: int,
        positive: bool,
        group_key: str,
        active: bool,
        origin: LabelOrigin = "plain",
        survival_before: float = 1.0,
        predicted: Mapping[Signal, float] | None = None,
    ) -> RewardedCandidate:
        """Add the reward of a scored candidate. `predicted`: its success by `predicted`. None: as of now.

        With active pruning, it also represents candidates that were pruned here. In any mode, it represents those
        pruned in earlier rounds (`survival_before`).
        """
        weight = label_weight(survival_before * (assessment.survival_probability if active else 1.0))
        scores = scores_of(observation)
        successes = self.predicted(observation, assessment) if predicted is None else predicted
        comparable = dict(scores)
        if "head" in scores:
            comparable["head"] = self.calibrators["head"].standardize(scores["head"], observation.head_version)
        for signal, score in scores.items():
            self.calibrators[signal].add(score, positive, weight, version_of(signal, observation), origin)
        if scores:
            self._audits.add(positive, weight, origin)
            for calibrator in self.calibrators.values():
                calibrator.begin_intercept(self.most_audited.intercept.value)
        rewarded = RewardedCandidate(
            scores=comparable,
            success_probabilities=successes,
            positive=bool(positive),
            weight=weight,
            group=group_key,
            active=active,
            keep=assessment.keep,
            survival_probability=assessment.survival_probability,
            cold=assessment.cold,
            tokens_after=max(0, num_tokens - self.detection_length),
            is_sample=origin != "race",
        )
        self._outcomes.append(rewarded)
        return rewarded

    def begin_head(self, version: int) -> None:
        """Start a new head. Its scores are not comparable with those of the earlier one, even with the same version."""
        self.calibrators["head"].begin_version(version)

    @property
    def num_judged(self) -> int:
        """Number of verdicts of active pruning in the window."""
        return len(self._verdicts)

    @property
    def num_pruned(self) -> int:
        """Number of these verdicts that pruned."""
        return len(self._verdicts) - sum(self._verdicts)

    def outcomes(self) -> list[RewardedCandidate]:
        """The newest rewarded candidates."""
        return list(self._outcomes)

    @property
    def most_audited(self) -> Calibrator:
        """The calibrator of the signal that predicts audits with the highest precision. The head's in a tie."""
        return max(self.calibrators.values(), key=lambda calibrator: calibrator.rate_intercept.precision)

    def audit_report(self) -> AuditReport:
        best = self.most_audited
        return self._audits.report(best.offset, exp(best.rate_intercept.value))

    def to_state(self) -> dict[str, Any]:
        """JSON-able state, bounded by the windows. The caller owns its lists. Their entries never change."""
        return {
            "detection_length": self.detection_length,
            "calibrators": [self.calibrators[signal].to_state() for signal in SIGNALS],
            "outcomes": list(self._outcomes),
            "verdicts": list(self._verdicts),
            "audits": self._audits.to_state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Learning:
        """Restore a Learning. Raises: ValueError for a state that `to_state` cannot have written."""
        state = fields_of(state, STATE_FIELDS, "a learning")
        learning = cls(
            integer(state["detection_length"], "detection_length of a learning", WHOLE, MAX_DETECTION_LENGTH)
        )
        saved = [Calibrator.from_state(each) for each in listed(state["calibrators"], "calibrators of a learning")]
        if [calibrator.signal for calibrator in saved] != list(SIGNALS):
            got = [calibrator.signal for calibrator in saved]
            raise ValueError(f"calibrators of a learning must be for {', '.join(SIGNALS)}, got {shown(got)}")
        learning.calibrators = {calibrator.signal: calibrator for calibrator in saved}
        learning._audits = AuditTally.from_state(state["audits"])
        learning._outcomes.extend(
            RewardedCandidate.from_state(values)
            for values in listed(state["outcomes"], "outcomes of a learning", REPORT_WINDOW)
        )
        learning._verdicts.extend(
            flag(kept, "a verdict of a learning")
            for kept in listed(state["verdicts"], "verdicts of a learning", REPORT_WINDOW)
        )
        return learning

    def _observe(self, observation: Observation) -> dict[Signal, float]:
        """Add the candidate's usable scores to the calibrators, and return them."""
        scores = scores_of(observation)
        for signal, score in scores.items():
            self.calibrators[signal].observe(score, version_of(signal, observation))
        return scores

    def _warm_signals(self, plan: PruningPlan) -> list[Signal]:
        """Signals with enough labels, best first: the plan's signal, and confidence as a fallback of the head.

        Empty: a cold start.
        """
        wanted: tuple[Signal, ...] = ("head", "confidence") if plan.signal == "head" else ("confidence",)
        return [signal for signal in wanted if self.calibrators[signal].is_warm(plan.min_labels)]

    def _success(self, signal: Signal, score: float, observation: Observation) -> float:
        return self.calibrators[signal].success_probability(score, version_of(signal, observation))

    def _survival(
        self,
        plan: PruningPlan,
        signal: Signal,
        successes: Mapping[int, float],
        siblings: Siblings,
    ) -> dict[int, float]:
        if plan.keep_ratio >= 1:
            return dict.fromkeys(successes, 1.0)
        if plan.rule == "paper":
            rule = self._solution((signal, plan), lambda points: solve_paper(points, plan))
        else:
            # in one order: floating-point sums must not depend on that of the mapping
            decided = sorted(
                (a.success_probability, a.keep) for a in siblings.earlier.values() if a.success_probability is not None
            )
            batch = [successes[index] for index in sorted(successes)]
            if plan.rule == "balance":
                rule = group_rule(batch, decided, self._solution((signal, "balance"), compress), plan)
            else:
                population = self._population(signal)
                rule = gradient_rule(
                    batch, decided, population, plan, past=siblings.past, num_to_come=siblings.num_to_come
                )
        return {index: rule.survival(q) for index, q in successes.items()}

    def _population(self, signal: Signal) -> Population:
        """The newest rewarded candidates, weighted so that they represent all.

        Scores without rewards do not change it, so that a repeated request gets the same verdicts until the next label.
        """
        calibrator = self.calibrators[signal]
        table, population = self._populations.get(signal, (None, None))
        if population is None or table is not calibrator.table():
            population = population_of(calibrator.labelled_points(POPULATION_WINDOW))
            self._populations[signal] = (calibrator.table(), population)
        return population

    def _solution(self, key: tuple[Signal, PruningPlan | str], solve: Callable[[list[Point]], Solution]) -> Solution:
        """Result of `solve` on the signal's recent scores, cached until the scores or labels change."""
        calibrator = self.calibrators[key[0]]
        solution: Solution
        changes, solution = self._solved.get(key, (-1, None))
        if changes != calibrator.num_changes:
            solution = solve(calibrator.points())
            if len(self._solved) >= MAX_SOLVED:
                self._solved.clear()
            self._solved[key] = (calibrator.num_changes, solution)
        return solution


DEFAULT_MIN_LABELS = PruningPlan(1).min_labels

STATE_FIELDS = ("detection_length", "calibrators", "outcomes", "verdicts", "audits")

MAX_SOLVED = 64
"""Most cached solutions, so that a client that varies its plan cannot fill the memory."""


def label_weight(survival_probability: float) -> float:
    """Number of scored candidates that a survivor's label stands for, at most `MAX_LABEL_WEIGHT`."""
    return min(MAX_LABEL_WEIGHT, 1 / survival_probability)


def scores_of(observation: Observation) -> dict[Signal, float]:
    """The finite scores of an observation: the head's logit if there is one, and the confidence."""
    scores: dict[Signal, float] = {}
    if observation.logit is not None and isfinite(observation.logit):
        scores["head"] = observation.logit
    if isfinite(observation.confidence.bottom_windows):
        scores["confidence"] = observation.confidence.bottom_windows
    return scores


def version_of(signal: Signal, observation: Observation) -> int:
    """Version of the source of the score. Scores of one version are comparable without a scale."""
    return observation.head_version if signal == "head" else 0


def _kept(observation: Observation, wanted: Signal, *, cold: bool, survival_probability: float = 1.0) -> Assessment:
    """Assessment of a candidate whose success probability is unknown: it is kept."""
    scores = scores_of(observation)
    signal: Signal = wanted if wanted in scores else "confidence"
    return Assessment(
        signal=signal,
        score=scores.get(signal, 0.0),
        success_probability=None,
        survival_probability=survival_probability,
        keep=True,
        head_version=observation.head_version,
        confidence=observation.confidence,
        cold=cold,
    )
