"""What a simulated run measures. Invariant: generated tokens = returned tokens + wasted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_rollout.group.rounds.rounds import RoundKind
from vllm_rollout.simulator.rounds.settings import RoundSetting


@dataclass(frozen=True, slots=True)
class ReturnedPrompt:
    """A prompt that came back."""

    prompt_id: str
    epoch: int
    handed_in: int
    """The round that it was handed in for."""
    round: int
    """The one that returned it."""
    lengths: tuple[int, ...]
    """Of its returned trajectories, in tokens."""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """One round."""

    number: int
    kind: RoundKind
    is_last: bool
    """Too few prompts were left for a short round."""
    seconds: float
    returned: tuple[ReturnedPrompt, ...]
    num_started: int
    num_deferred: int
    generated_tokens: int
    num_moves: int = 0
    freed_rank_s: float = 0.0
    """Seconds for which ranks that were emptied stayed so until the round was over, summed."""

    @property
    def lengths(self) -> list[int]:
        return [length for prompt in self.returned for length in prompt.lengths]

    @property
    def returned_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_tokens(self) -> int:
        return max(self.lengths, default=0)


@dataclass(frozen=True)
class RunOutcome:
    """One setting over all epochs. On an ideal machine seconds are steps."""

    setting: RoundSetting
    rounds: tuple[RoundOutcome, ...]
    num_preemptions: int = 0
    whole_epochs: bool = False
    """Everything of an epoch came back before the next one began."""

    def of(self, kind: RoundKind) -> list[RoundOutcome]:
        """Full rounds of a kind."""
        return [its for its in self.full_rounds if its.kind == kind]

    @cached_property
    def full_rounds(self) -> Sequence[RoundOutcome]:
        """Whole periods: up to the last long round that the queue filled; without any, or with whole epochs, all of
        them. Of synchronous rounds those that return all that they should."""
        if self.whole_epochs:
            return self.rounds
        full = [its for its in self.rounds if not its.is_last]
        longs = [position for position, its in enumerate(full) if its.kind == "long"]
        if longs:
            return full[: longs[-1] + 1]
        return full if full and self.setting.is_synchronous else self.rounds

    @property
    def has_full_period(self) -> bool:
        if self.whole_epochs or self.setting.is_synchronous:
            return True
        return any(its.kind == "long" and not its.is_last for its in self.rounds)

    @cached_property
    def round_s(self) -> float:
        """Mean of a round of whole periods."""
        return float(np.mean([its.seconds for its in self.full_rounds]))

    @cached_property
    def prompt_s(self) -> float:
        """Of these rounds per prompt that they return: a long round may return fewer than a short one."""
        return sum(its.seconds for its in self.full_rounds) / sum(len(its.returned) for its in self.full_rounds)

    @property
    def seconds(self) -> float:
        """Of the whole run, its last rounds too."""
        return sum(its.seconds for its in self.rounds)

    @cached_property
    def generated_tokens(self) -> int:
        return sum(its.generated_tokens for its in self.rounds)

    @cached_property
    def returned_tokens(self) -> int:
        return sum(its.returned_tokens for its in self.rounds)

    @property
    def num_moves(self) -> int:
        return sum(its.num_moves for its in self.rounds)

    @property
    def freed_rank_s(self) -> float:
        return sum(its.freed_rank_s for its in self.rounds)

    @property
    def wasted_tokens(self) -> int:
        return self.generated_tokens - self.returned_tokens

    @cached_property
    def returned(self) -> Sequence[ReturnedPrompt]:
        """In the order of rounds."""
        return [prompt for its in self.rounds for prompt in its.returned]


def mean_seconds(rounds: Sequence[RoundOutcome]) -> float | None:
    return float(np.mean([its.seconds for its in rounds])) if rounds else None


def mean_of_longest(rounds: Sequence[RoundOutcome]) -> float | None:
    """Mean over rounds of their longest returned trajectory."""
    return float(np.mean([its.max_tokens for its in rounds])) if rounds else None


def percentile_of_lengths(rounds: Sequence[RoundOutcome], percent: float) -> float | None:
    """Over all returned trajectories of these rounds."""
    lengths = [length for its in rounds for length in its.lengths]
    return float(np.percentile(lengths, percent)) if lengths else None
