"""One update: the clipped policy gradient of GRPO or DAPO over groups that the server graded. It calls no server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from vllm_rollout.answers import GroupAnswer, StoppedCandidate, Trajectory
from vllm_rollout.rewards import Estimator, advantages
from vllm_rollout.training.logprobs import answer_logprobs, micro_batches
from vllm_rollout.training.off_policy import Correction, decoupled_loss, effective_sample_size, importance_weights
from vllm_rollout.training.stream import StepResult, StreamTrainer


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings of an update. Sources: DeepSeekMath 4.1 (GRPO), DAPO 3.1 and 3.3, Dr. GRPO 3 (no division by std)."""

    estimator: Estimator  # of advantages, which the server computes
    unit: Literal["answer", "token"]  # equal weight for each answer, or for each token of the step
    clip_high: float = 0.2
    """On policy, ratios are 1 and nothing is clipped. Answers that a round resumes were sampled by earlier weights."""
    correction: Correction | None = None  # of tokens that older weights sampled; None: the ratio is clipped


ALGORITHMS = {
    "grpo": Terms("grpo", "answer"),
    "dapo": Terms("grpo", "token", clip_high=0.28),
    "dr_grpo": Terms("mean", "token"),
}
CORRECTIONS = {
    "clip": None,
    "tis": Correction(),
    "icepop": Correction("token", None, {"token": (0.5, 5.0)}),
    "none": Correction(None),
}


class Row(NamedTuple):
    prompt_ids: list[int]
    answer: Trajectory | StoppedCandidate
    advantage: float


def rows_of(group: GroupAnswer, terms: Terms) -> tuple[list[Row], int]:
    """Rows that have a gradient, and the group's weight in the mean loss: its number of answers, or of their tokens.

    A group whose advantages are all 0 has weight, but no rows. A candidate that was stopped in mid-answer
    (`--stopped-teach`) has its success probability as reward, or 0 without one. A candidate that lost a tie after it
    ended by itself does not count.
    """
    assert group.rewards is not None  # a reward was asked for
    its, stopped = group.rewards.advantages, [c for c in group.candidates if isinstance(c, StoppedCandidate)]
    stopped = [c for c in stopped if c.state in ("surplus", "pruned") and c.token_ids and not c.ended_by_itself]
    if stopped:
        expected = [candidate.success_probability or 0.0 for candidate in stopped]
        its = advantages([t.reward for t in group.trajectories] + expected, terms.estimator)
    told = [(t, a) for t, a in zip([*group.trajectories, *stopped], its, strict=True) if a is not None]
    rows = [Row(group.prompt_token_ids, t, a) for t, a in told if a and t.token_ids]
    return rows, sum(answer.num_tokens for answer, _ in told) if terms.unit == "token" else len(told)


class Update:
    """One optimizer step. The gradient is the same whether groups are added together or one by one."""

    def __init__(self, trainer: StreamTrainer, model: Any, terms: Terms, micro_tokens: int) -> None:
        self.trainer, self.model, self.terms, self.micro_tokens = trainer, model, terms, micro_tokens
        self.differences = [torch.zeros(1)]  # of log probabilities, from those at sampling time
        self.weights = [torch.ones(0)]  # of tokens, by the correction
        trainer.abandon()  # the gradients of an attempt that died
        trainer.begin(0)

    def add(self, groups: Sequence[GroupAnswer]) -> None:
        """Run the groups' backward pass, one micro-batch at a time."""
        rows: list[Row] = []
        for group in groups:
            its_rows, weight = rows_of(group, self.terms)
            rows += its_rows
            self.trainer.count(weight)
        lengths = [len(row.prompt_ids) + row.answer.num_tokens for row in rows]
        for batch in micro_batches(lengths, self.micro_tokens):
            self._backward([rows[i] for i in batch])

    def _backward(self, rows: Sequence[Row]) -> None:
        logprobs, mask = answer_logprobs(self.model, [r.prompt_ids for r in rows], [r.answer.token_ids for r in rows])
        sampled = logprobs.detach().clone()
        sampled[mask > 0] = sampled.new_tensor([p for row in rows for p in row.answer.logprobs or ()])
        self.differences.append((logprobs.detach() - sampled)[mask > 0].abs().cpu())
        its = logprobs.new_tensor([[row.advantage] for row in rows])
        correction = self.terms.correction
        importance = importance_weights(logprobs, sampled, mask, correction or Correction(None))
        if correction:
            self.weights.append(importance.weights[importance.counted].cpu())
        proximal = logprobs.detach() if correction else sampled  # one update per step: u is 1
        loss = decoupled_loss(logprobs, proximal, its, importance, clip_high=self.terms.clip_high)
        total = loss.sum() if self.terms.unit == "token" else (loss.sum(1) / mask.sum(1)).sum()
        self.trainer.add_sum(total, 0)  # what it is divided by was counted

    @property
    def ess_share(self) -> float | None:
        """Effective sample size of the tokens, as a share of them. None without a correction."""
        weights = torch.cat(self.weights)
        return effective_sample_size(weights) / len(weights) if len(weights) else None

    def finish(self) -> StepResult | None:
        """Make the optimizer step. None, without an update, if no group had a row. Raises: FloatingPointError."""
        if not self.differences[1:]:  # no group had a row
            self.trainer.abandon()
            return None
        return self.trainer.finish()
