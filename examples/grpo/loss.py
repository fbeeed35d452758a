"""One update: advantages within groups, the clipped policy gradient of GRPO or DAPO. Invariant: knows no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from examples.grpo.model import answer_logprobs, micro_batches
from vllm_rollout.group.rewards.estimates import Estimator, advantages
from vllm_rollout.training.stream import StepResult, StreamTrainer


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    """Of its tokens, as they were sampled."""
    reward: float | None
    """None teaches nothing: its grader failed."""


class Group(NamedTuple):
    prompt_ids: list[int]
    answers: list[Answer]

    @property
    def teaches(self) -> bool:
        return len({answer.reward for answer in self.answers} - {None}) > 1


@dataclass(frozen=True, slots=True)
class Terms:
    """How an update is made. Sources: DeepSeekMath 4.1 (GRPO), DAPO 3.1 and 3.3, Dr. GRPO 3 (no division by std)."""

    estimator: Estimator
    unit: Literal["answer", "token"]
    """What counts the same: each answer, or each token of the step."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """On policy a ratio is 1 and nothing is clipped; what a round resumes was sampled by earlier weights."""


ALGORITHMS = {
    "grpo": Terms("grpo", "answer"),
    "dapo": Terms("grpo", "token", clip_high=0.28),
    "dr_grpo": Terms("mean", "token"),
}


class Row(NamedTuple):
    prompt_ids: list[int]
    answer: Answer
    advantage: float


def rows_of(group: Group, terms: Terms) -> tuple[list[Row], int]:
    """What has a gradient, and what the group counts in the mean that the loss is, which is something either way."""
    graded = [answer for answer in group.answers if answer.reward is not None]
    each = advantages([answer.reward for answer in graded], terms.estimator)
    rows = [Row(group.prompt_ids, answer, advantage or 0.0) for answer, advantage in zip(graded, each, strict=True)]
    weight = sum(len(answer.token_ids) for answer in graded) if terms.unit == "token" else len(graded)
    return [row for row in rows if row.advantage and row.answer.token_ids], weight


def clipped_loss(logprobs: torch.Tensor, sampled: torch.Tensor, advantage: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Loss per token, of the shape of the log probabilities: the policy's, and those that it was sampled with."""
    ratio = torch.exp(logprobs - sampled)
    clipped = ratio.clamp(1 - terms.clip_low, 1 + terms.clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


class Update:
    """One optimizer step from groups that come together or one by one: the gradient is the same."""

    def __init__(self, trainer: StreamTrainer, model: Any, terms: Terms, micro_tokens: int) -> None:
        self.trainer, self.model, self.terms, self.micro_tokens = trainer, model, terms, micro_tokens
        self.difference_sum, self.difference_max, self.num_tokens = 0.0, 0.0, 0
        """Of log probabilities, the policy's to those of who sampled: other weights show at once."""
        self._unsaid, self._teaches = 0, False
        trainer.abandon()  # the gradients of an attempt that died
        trainer.begin(0)

    def add(self, groups: Sequence[Group]) -> None:
        """Their backward pass, a micro-batch at a time."""
        rows: list[Row] = []
        for group in groups:
            its_rows, weight = rows_of(group, self.terms)
            rows, self._unsaid = rows + its_rows, self._unsaid + weight
        lengths = [len(row.prompt_ids) + len(row.answer.token_ids) for row in rows]
        for batch in micro_batches(lengths, self.micro_tokens):
            self._backward([rows[i] for i in batch])

    def _backward(self, rows: Sequence[Row]) -> None:
        logprobs, mask = answer_logprobs(self.model, [r.prompt_ids for r in rows], [r.answer.token_ids for r in rows])
        sampled = logprobs.detach().clone()
        sampled[mask > 0] = sampled.new_tensor([p for row in rows for p in row.answer.logprobs])
        difference = (logprobs.detach() - sampled).abs()
        self.difference_sum, self.num_tokens = (
            self.difference_sum + difference.sum().item(),
            self.num_tokens + mask.sum(),
        )
        self.difference_max = max(self.difference_max, difference.max().item())
        loss = (
            clipped_loss(logprobs, sampled, logprobs.new_tensor([[row.advantage] for row in rows]), self.terms) * mask
        )
        total = loss.sum() if self.terms.unit == "token" else (loss.sum(1) / mask.sum(1)).sum()
        self.trainer.add_sum(total, self._unsaid)
        self._unsaid, self._teaches = 0, True

    @property
    def difference(self) -> float:
        return self.difference_sum / max(int(self.num_tokens), 1)

    def finish(self) -> StepResult | None:
        """None when no group taught: nothing is updated. Raises: FloatingPointError for a gradient that is none."""
        if not self._teaches:
            self.trainer.abandon()
            return None
        if self._unsaid:
            self.trainer.add_sum(0 * self.trainer.parameters[0].sum(), self._unsaid)
        return self.trainer.finish()
