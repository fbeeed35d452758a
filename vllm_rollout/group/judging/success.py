"""Rewards -> how often each prompt succeeds, over groups and epochs.

Per prompt two decaying sums, over candidates that were rewarded: how many, and how many of them succeeded. A survivor
that was kept with probability p stands for 1 / p candidates, so that pruning does not move the rate.

Invariant: what a history says depends on the rewards it saw and their order only; sums are finite, and no prompt has
succeeded more often than it was rewarded; a restored history goes on as the saved one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vllm_rollout.config import HISTORY_KEY_CHARS, MAX_LABEL_WEIGHT
from vllm_rollout.group.checks import listed, number, text
from vllm_rollout.group.lengths.history import MAX_HISTORY_PROMPTS, rows_in_parts

SUCCESS_HALF_LIFE = 32.0
"""Candidates after which a reward counts half: two groups of 16, since a prompt comes back with another policy."""
MAX_SUM = 2 * SUCCESS_HALF_LIFE + MAX_LABEL_WEIGHT
"""No decaying sum of weights comes near it: their limit is half_life / ln 2 and the newest weight."""


class PromptSuccess(NamedTuple):
    """Rewards of one prompt, of which the older count less."""

    num_rewarded: float
    """Candidates, those that survivors stand for included."""
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
        """The last rewarded comes last. Plain tuples, as in LengthHistory."""

    def __len__(self) -> int:
        return len(self._prompts)

    def observe(self, key: str, positive: bool, weight: float = 1.0) -> None:
        """One reward. `weight`: how many candidates it stands for, 1 / survival probability."""
        num_rewarded, num_successful = self._prompts.pop(key, NO_REWARDS)
        decay = 0.5 ** (weight / SUCCESS_HALF_LIFE)
        self._prompts[key] = (decay * num_rewarded + weight, decay * num_successful + weight * positive)
        if len(self._prompts) > self._max_prompts:
            del self._prompts[next(iter(self._prompts))]

    def of(self, key: str) -> PromptSuccess:
        return PromptSuccess(*self._prompts.get(key, NO_REWARDS))

    def prompts(self, size: int) -> Iterator[list[list[Any]]]:
        """The state: rows of prompts, the one rewarded longest ago first; the history may go on in between."""
        return rows_in_parts(self._prompts, size)

    @classmethod
    def from_state(cls, rows: Iterable[Any], max_prompts: int = MAX_HISTORY_PROMPTS) -> SuccessHistory:
        """Raises: ValueError for what no history can have been."""
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
