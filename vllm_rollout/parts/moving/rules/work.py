"""Remaining work of candidates, and the sum of it on a rank.

One more token in a step makes the step longer for all candidates on the rank. It adds computation, and the context
that is read for it. So two sums describe the work that a group adds to a rank, and a profile gives their weights.

Invariant: sums are integers, so that work that is added and removed again leaves exactly zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vllm_rollout.parts.shaping.rules.cost import CostModel
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, expected_remaining


class Work(NamedTuple):
    """Remaining work of the candidates of one group."""

    num_candidates: int
    tokens: int | None = None
    """Predicted remaining output tokens of all candidates together. None: no prediction."""
    contexts: int = 0
    """Sum, over these tokens, of the number of tokens before each."""

    @classmethod
    def of(
        cls, num_tokens: Iterable[int], lengths: LengthMoments | None, max_tokens: int | None, prompt_tokens: int
    ) -> Work:
        """The work of candidates with these output tokens. `lengths`: of their prompt, or else of the data set."""
        ages = list(num_tokens)
        if lengths is None:
            return cls(len(ages))
        remaining = {age: expected_remaining(age, lengths, max_tokens) for age in set(ages)}
        contexts = sum(remaining[age] * (prompt_tokens + age + remaining[age] / 2) for age in ages)
        return cls(len(ages), round(sum(remaining[age] for age in ages)), round(contexts))


class TokenCost(NamedTuple):
    """Cost of one more token in a step, for the other candidates of the step."""

    token: float = 1.0
    context: float = 0.0
    """Extra cost for each token of context before it."""

    @classmethod
    def of(cls, cost: CostModel) -> TokenCost:
        """Costs in seconds: slopes from one candidate to a full rank, and from no context to the longest profiled
        one."""
        context = cost.curves[-1][0]
        batch_size = max(2, cost.max_num_seqs or max(curve.batch_sizes[-1] for _, curve in cost.curves))

        def slope(context: float) -> float:
            return max(0.0, (cost.ptl(batch_size, context) - cost.ptl(1, context)) / (batch_size - 1))

        token = slope(0)
        per_context = max(0.0, (slope(context) - token) / context) if context else 0.0
        return cls(token, per_context) if token or per_context else cls()


@dataclass(slots=True)
class RankWork:
    """Sums of the predicted work on a rank."""

    num_predicted: int = 0
    """Candidates with a prediction."""
    tokens: int = 0
    contexts: int = 0

    def add(self, work: Work, sign: int = 1) -> None:
        """Add work, unless it has no prediction. `sign` -1: remove it."""
        if work.tokens is None:
            return
        self.num_predicted += sign * work.num_candidates
        self.tokens += sign * work.tokens
        self.contexts += sign * work.contexts

    def cost(self, token_cost: TokenCost) -> float:
        """Cost of the predicted work, in the unit of `token_cost`."""
        return token_cost.token * self.tokens + token_cost.context * self.contexts
