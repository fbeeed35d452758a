"""Success rates of prompts from rewards, over groups and epochs.

Each prompt has two decaying sums over rewarded candidates: their number, and the number of successes. A survivor that
was kept with probability p counts as 1 / p candidates, so that pruning does not change the rate.

Invariant: a history depends only on its rewards and their order. Sums are finite, and no prompt has more successes than
rewards. A restored history goes on as the saved one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vllm_rollout.checks import listed, number, text
from vllm_rollout.config import HISTORY_KEY_CHARS
from vllm_rollout.parts.memories.rules import MAX_HISTORY_PROMPTS, rows_in_parts

MAX_LABEL_WEIGHT = 20.0
"""Largest weight of a label, 1 / survival probability. With the default `min_survival` of 0.05 no weight is clipped."""

SUCCESS_HALF_LIFE = 32.0
"""Candidates after which the weight of a reward has halved: two groups of 16, since a prompt comes back with another
policy."""
MAX_SUM = 2 * SUCCESS_HALF_LIFE + MAX_LABEL_WEIGHT
"""Largest sum in a state. Decaying sums stay below half_life / ln 2 plus the newest weight."""


class PromptSuccess(NamedTuple):
    """Rewards of one prompt. Older ones count less."""

    num_rewarded: float
    """Number of rewarded candidates, with those that survivors represent."""
    num_successful: float

    @property
    def rate(self) -> float | None:
        return self.num_successful / self.num_rewarded if self.num_rewarded else None


NO_REWARDS = PromptSuccess(0.0, 0.0)


class SuccessHistory:
    """Decaying sums of rewards by prompt. The prompts rewarded longest ago are forgotten first."""

    def __init__(self, max_prompts: int = MAX_HISTORY_PROMPTS) -> None:
        assert max_prompts >= 1, "the prompt just rewarded is always remembered"
        self._max_prompts = max_prompts
        self._prompts: dict[str, tuple[float, float]] = {}
        """Sums by prompt, the last rewarded one last. Plain tuples of numbers keep the garbage collector fast."""

    def __len__(self) -> int:
        return len(self._prompts)

    def observe(self, key: str, positive: bool, weight: float = 1.0) -> None:
        """Add one reward. `weight`: number of candidates that it represents, 1 / survival probability."""
        num_rewarded, num_successful = self._prompts.pop(key, NO_REWARDS)
        decay = 0.5 ** (weight / SUCCESS_HALF_LIFE)
        self._prompts[key] = (decay * num_rewarded + weight, decay * num_successful + weight * positive)
        if len(self._prompts) > self._max_prompts:
            del self._prompts[next(iter(self._prompts))]

    def of(self, key: str) -> PromptSuccess:
        return PromptSuccess(*self._prompts.get(key, NO_REWARDS))

    def prompts(self, size: int) -> Iterator[list[list[Any]]]:
        """The state: rows of prompts, the one rewarded longest ago first. The history may change in between."""
        return rows_in_parts(self._prompts, size)

    @classmethod
    def from_state(cls, rows: Iterable[Any], max_prompts: int = MAX_HISTORY_PROMPTS) -> SuccessHistory:
        """Restore a history. Raises: ValueError for a state that no history can have."""
        history = cls(max_prompts)
        for row in rows:
            key, rewarded, successful = listed(row, "a prompt of a success history", length=3)
            key = text(key, "the key of a prompt of a success history", HISTORY_KEY_CHARS)
            if key in history._prompts:
                raise ValueError(f"a prompt of a success history comes twice: {key!r:.80}")
            num_rewarded = number(rewarded, "num_rewarded of a success history", 0.0, MAX_SUM, above=True)
            num_successful = number(successful, "num_successful of a success history", 0.0, num_rewarded)
            history._prompts[key] = (num_rewarded, num_successful)
            if len(history._prompts) > max_prompts:
                raise ValueError(f"a success history has at most {max_prompts} prompts")
        return history
