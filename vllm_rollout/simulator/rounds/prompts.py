"""The data set of a run: prompts, and what their candidates become each time they run.

Invariant: a candidate depends on the seed, its prompt, the epoch, the attempt and its index only, so every setting of a
sweep sees the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from vllm_rollout.simulator.generate import LengthDistribution, draw_length, log_medians
from vllm_rollout.simulator.pool import PoolCandidate, Pools
from vllm_rollout.trace.rows import Trace


@dataclass(frozen=True, slots=True)
class DataPrompt:
    """One prompt of a data set."""

    number: int
    id: str
    prompt_tokens: int
    max_tokens: int | None

    @property
    def history_key(self) -> str:
        return self.id


class DataSet(Protocol):
    """Prompts that a trainer goes through."""

    @property
    def prompts(self) -> Sequence[DataPrompt]: ...

    def candidates(self, prompt: DataPrompt, epoch: int, attempt: int, count: int) -> list[PoolCandidate]:
        """The first `count` of a prompt's candidates.

        attempt: rounds that ended without the prompt since it was handed in; each attempt is another draw.
        """
        ...


class GeneratedDataSet:
    """Prompts of a distribution; every attempt is drawn anew."""

    def __init__(self, distribution: LengthDistribution, seed: int = 0) -> None:
        self._its = distribution
        self._seed = seed
        self._log_medians = log_medians(distribution, Random(f"{seed}/generate"))
        self.prompts = [
            DataPrompt(number, f"prompt-{number}", distribution.prompt_tokens, distribution.max_tokens)
            for number in range(distribution.prompts)
        ]

    def candidates(self, prompt: DataPrompt, epoch: int, attempt: int, count: int) -> list[PoolCandidate]:
        chance = Random(f"{self._seed}/attempt/{prompt.number}/{epoch}/{attempt}")
        log_median, most = self._log_medians[prompt.number], self._its.max_tokens
        lengths = (draw_length(log_median, self._its.sigma, most, chance) for _ in range(count))
        return [PoolCandidate(n, "length" if n == most else "stop", n, False, None, None) for n in lengths]


class TracedDataSet:
    """The prompts of a trace, by name. An epoch sees what was recorded of one rollout; more is resampled from it."""

    def __init__(self, trace: Trace, seed: int = 0) -> None:
        self._pools = Pools(trace, seed)
        self._places: dict[str, list[tuple[int, int]]] = {}
        """Prompt -> (rollout, position), each time that it was recorded."""
        self.prompts: list[DataPrompt] = []
        for rollout, its in enumerate(trace.rollouts):
            for position, prompt in enumerate(its.prompts):
                key = prompt.history_key
                if key not in self._places:
                    self._places[key] = []
                    self.prompts.append(DataPrompt(len(self.prompts), key, prompt.prompt_tokens, prompt.max_tokens))
                self._places[key].append((rollout, position))

    def candidates(self, prompt: DataPrompt, epoch: int, attempt: int, count: int) -> list[PoolCandidate]:
        places = self._places[prompt.id]
        rollout, position = places[epoch % len(places)]
        return self._pools.candidates(epoch // len(places), rollout, position, count, attempt)
