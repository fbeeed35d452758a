"""Counts of scoring in one rollout, and warnings about it. Invariant: a warning stands once in an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_rollout.kernel.http.answers import GroupAnswer
from vllm_rollout.kernel.http.engine import CandidateEnd, PreparedPrompt
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.pruning.rules.assessment import scores_of
from vllm_rollout.parts.pruning.rules.learning_report import LearningReport
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.memory import MAX_DETECTION_LENGTHS
from vllm_rollout.parts.pruning.rules.pruning_plan import SIGNALS, PruningPlan
from vllm_rollout.parts.pruning.rules.step import SCORING


@dataclass(slots=True)
class ScoringLog:
    """Counts over the groups of a rollout with pruning."""

    group: GroupPlan
    plan: PruningPlan
    num_prompts: int = 0
    num_scored: int = 0
    num_cold: int = 0
    """Candidates that were scored and kept because there were too few labels."""
    num_too_short: int = 0
    """Prompts for which nothing was scored, because their `max_tokens` is not above `detection_length`."""
    max_tokens: int | None = None
    """The largest `max_tokens` of these prompts."""
    longest: int = 0
    """Number of tokens of the longest candidate, without resumed ones."""
    num_resumed: int = 0
    """Candidates that had passed `detection_length` in an earlier round, so that this one cannot score them."""

    def said(self, rollout_id: str, prompt_id: str, seed: int, prompt_key: str) -> dict[str, Any]:
        """Values that candidates carry. Rewards name a candidate by rollout, prompt and index. Random choices depend
        only on the seed, the prompt and the index. The prompt's rewards are remembered under `prompt_key`.
        """
        return SCORING.value(Scoring(rollout_id, prompt_id, seed, prompt_key=prompt_key))

    def group_over(self, prompt: PreparedPrompt, ends: Iterable[CandidateEnd]) -> None:
        ends = list(ends)
        assessments = [its for end in ends if (its := scores_of(end.parts).assessment) is not None]
        self.num_prompts += 1
        self.num_scored += len(assessments)
        self._count_lengths((end.ending.num_tokens, end.ending.num_resumed) for end in ends)
        self.num_cold += sum(assessment.cold for assessment in assessments)
        if not assessments and prompt.max_tokens is not None and prompt.max_tokens <= self.plan.detection_length:
            self.num_too_short += 1
            self.max_tokens = max(self.max_tokens or 0, prompt.max_tokens)

    def ended_before(self, group: GroupAnswer) -> None:
        """Count a group that was complete when its round was interrupted."""
        ends = [*group.trajectories, *group.candidates]
        self.num_prompts += 1
        self.num_scored += sum(end.score is not None for end in ends)
        num_resumed = max((end.num_resumed_tokens for end in group.trajectories), default=0)
        self._count_lengths((end.num_tokens, num_resumed) for end in ends)

    def _count_lengths(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Count candidates. Each has its number of tokens, and of tokens from an earlier round among them."""
        for num_tokens, num_resumed in lengths:
            if num_resumed >= self.plan.detection_length:
                self.num_resumed += 1
            else:
                self.longest = max(self.longest, num_tokens)

    def warnings(self, report: LearningReport | None) -> list[str]:
        """Warnings about what the user did not get, each with a remedy. `report` has the numbers of labels."""
        return [warning for warning in (self._unscored(), self._unjudged(report)) if warning is not None]

    def _unscored(self) -> str | None:
        length = self.plan.detection_length
        if self.num_too_short:
            return (
                f"detection_length ({length}) is not below max_tokens ({self.max_tokens}): nothing was scored for "
                f"{self.num_too_short} of {self.num_prompts} prompts. Lower detection_length."
            )
        if self.num_scored:
            return None
        if self.longest > length:
            return (
                f"nothing was scored: this server judges at {MAX_DETECTION_LENGTHS} different values of "
                f"detection_length, and {length} is one too many. Use one of the others, or post the rewards that they "
                "await."
            )
        if self.num_resumed:
            return (
                f"nothing was scored: {self.num_resumed} candidates went on from an earlier round, in which they had "
                f"passed detection_length ({length}). Their rewards only count in the success of their prompt. Without "
                "resume they are scored."
            )
        return (
            f"no candidate reached detection_length ({length}) while it ran: nothing was scored. The longest had "
            f"{self.longest} tokens. Lower detection_length."
        )

    def _unjudged(self, report: LearningReport | None) -> str | None:
        plan, group = self.plan, self.group
        if plan.keep_ratio == 1:
            return None
        if self.num_cold:
            return (
                f"cold start: {self.num_cold} of {self.num_scored} scored candidates were kept because there are too "
                f"few labels{self._labels(report)}, min_labels {plan.min_labels} of each. Post rewards to "
                "/v1/rollouts/{id}/rewards."
            )
        if self.num_scored and plan.mode == "shadow" and not plan.allow_fewer and not group.redundancy:
            return (
                f"nothing would ever be pruned: all {group.num_candidates} candidates are needed for a group of "
                f"{group.group_size}. Ask for spare candidates (redundancy), or set pruning.allow_fewer to true."
            )
        return None

    def _labels(self, report: LearningReport | None) -> str:
        """Label counts of the signal that lacks least. Confidence may stand in for the head."""
        wanted = SIGNALS if self.plan.signal == "head" else ("confidence",)
        known = [report.signals[signal] for signal in wanted if signal in report.signals] if report else []
        if not known:
            return ""
        best = max(known, key=lambda signal: min(signal.num_positive, signal.num_negative))
        return f": {best.num_positive} positive and {best.num_negative} negative"
