"""Pruning of a group's candidates by the product's quality head, calibration and rule (ARRoL, section 4).

The head sees each candidate's last hidden state after DETECTION_LENGTH tokens. It learns from the rewards of answers
that were trained on. The clock counts no seconds for the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.asynchronous.arms import DETECTION_LENGTH
from benchmarks.asynchronous.sampler import Name
from benchmarks.asynchronous.train import Graded
from vllm_rollout.parts.pruning.rules.assessment import Assessment, Confidence
from vllm_rollout.parts.pruning.rules.learning import Learning, Siblings, label_weight
from vllm_rollout.parts.pruning.rules.pruning_plan import Observation, PruningPlan
from vllm_rollout.parts.pruning.worker.quality_head import QualityHead

NO_CONFIDENCE = Confidence(nan, nan, nan)
"""Only the head scores: its place is not taken by trace confidence while it knows too little."""


class Scored(NamedTuple):
    """A candidate whose reward may come."""

    state: Tensor
    observation: Observation
    assessment: Assessment


class Pruner:
    def __init__(self, hidden_size: int, seed: int) -> None:
        self.head = QualityHead(hidden_size, "policy", DETECTION_LENGTH, seed)
        self.learning, self.plan = Learning(DETECTION_LENGTH), PruningPlan(DETECTION_LENGTH)
        self.seed = seed
        self.scored = dict[Name, Scored]()

    def prune(self, names: Sequence[Name], states: Tensor, at_least: int) -> list[Name]:
        """Score the running candidates of a group. Returns those to stop: half, and all but `at_least` at most.

        states: last hidden states, [len(names), hidden_size].
        """
        logits = self._logits(states)
        seen = {
            name.index: Observation(NO_CONFIDENCE, logit, self.head.version)
            for name, logit in zip(names, logits, strict=True)
        }
        found = self.learning.assess(self.plan, seen, Siblings(self.seed, str(names[0].group), at_least))
        for name, state in zip(names, states, strict=True):
            self.scored[name] = Scored(state, seen[name.index], found[name.index])
        return [name for name in names if not found[name.index].keep]

    def _logits(self, states: Tensor) -> Sequence[float | None]:
        if (weights := self.head.weights) is None:
            return [None] * len(states)
        hidden = torch.relu(torch.addmm(weights.b1, states, weights.w1.T))
        return (hidden @ weights.w2 + weights.b2).tolist()

    def learn(self, groups: Sequence[Graded]) -> None:
        """Learn from the rewards of these groups. The head takes all steps that it plans for them."""
        rewarded = [
            (answer, reward > 0.5, self.scored[answer.name])
            for group in groups
            for answer, reward in zip(group.answers, group.rewards, strict=True)
            if answer.name in self.scored
        ]
        for answer, positive, (_, observation, assessment) in rewarded:
            key, num_tokens = str(answer.name.group), len(answer.token_ids)
            self.learning.reward(observation, assessment, num_tokens, positive, key, active=True)
        if rewarded:
            labels = torch.tensor([positive for _, positive, _ in rewarded])
            weights = [label_weight(scored.assessment.survival_probability) for *_, scored in rewarded]
            self.head.add(torch.stack([scored.state for *_, scored in rewarded]), labels, torch.tensor(weights))
            self.head.train(budget_s=inf)
        over = {answer.name.group for group in groups for answer in group.answers}
        self.scored = {name: scored for name, scored in self.scored.items() if name.group not in over}
