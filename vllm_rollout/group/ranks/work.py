"""What candidates still have to do, and how much of it a rank has.

A token more in a step makes the step longer for everybody on the rank: by its share of the computation, and by the
context that is read for it. So two sums say what a group adds to a rank, and a profile says how they weigh.

Invariant: sums are whole numbers, so that what is added and taken away again leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vllm_rollout.group.lengths.cost import CostModel
from vllm_rollout.group.lengths.moments import LengthMoments, expected_remaining


class Work(NamedTuple):
    """What candidates of one group still have to do."""

    num_candidates: int
    tokens: int | None = None
    """Predicted output tokens still to come, of all together; None: nothing predicts them."""
    contexts: int = 0
    """Tokens before each of these, summed."""

    @classmethod
    def of(
        cls, num_tokens: Iterable[int], lengths: LengthMoments | None, max_tokens: int | None, prompt_tokens: int
    ) -> Work:
        """The work of candidates that have so many output tokens; `lengths`: of their prompt, else of the data set."""
        ages = list(num_tokens)
        if lengths is None:
            return cls(len(ages))
        remaining = {age: expected_remaining(age, lengths, max_tokens) for age in set(ages)}
        contexts = sum(remaining[age] * (prompt_tokens + age + remaining[age] / 2) for age in ages)
        return cls(len(ages), round(sum(remaining[age] for age in ages)), round(contexts))


class TokenCost(NamedTuple):
    """What a token costs whoever shares its step."""

    token: float = 1.0
    context: float = 0.0
    """What each token before it adds."""

    @classmethod
    def of(cls, cost: CostModel) -> TokenCost:
        """Seconds, as the secants from one candidate to a full rank, and from no context to the longest profiled."""
        context = cost.curves[-1][0]
        batch_size = max(2, cost.max_num_seqs or max(curve.batch_sizes[-1] for _, curve in cost.curves))

        def slope(context: float) -> float:
            return max(0.0, (cost.ptl(batch_size, context) - cost.ptl(1, context)) / (batch_size - 1))

        token = slope(0)
        per_context = max(0.0, (slope(context) - token) / context) if context else 0.0
        return cls(token, per_context) if token or per_context else cls()


@dataclass(slots=True)
class RankWork:
    """Work on a rank: added up, of candidates that are predicted and of others."""

    num_predicted: int = 0
    num_others: int = 0
    tokens: int = 0
    contexts: int = 0

    def add(self, work: Work, sign: int = 1) -> None:
        """-1 takes it away."""
        if work.tokens is None:
            self.num_others += sign * work.num_candidates
            return
        self.num_predicted += sign * work.num_candidates
        self.tokens += sign * work.tokens
        self.contexts += sign * work.contexts

    def cost(self, token_cost: TokenCost) -> float:
        """What the predicted ones cost, in the unit of `token_cost`."""
        return token_cost.token * self.tokens + token_cost.context * self.contexts
