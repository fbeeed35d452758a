"""The data set of a run: prompts, their candidates in each attempt, and the trainer that hands the prompts in.

Invariant: a candidate depends only on the seed, its prompt, the epoch, the attempt and its index. So every setting of a
sweep gets equal candidates. Each epoch hands in every prompt once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from vllm_rollout.parts.rounds.rules.fields import RoundKind
from vllm_rollout.parts.rounds.rules.rounds import FreshPrompt, Run
from vllm_rollout.parts.shaping.rules.trace import Trace
from vllm_rollout.simulator.generate import LengthDistribution, draw_length, log_medians
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate, Pools


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
        """The first `count` candidates of a prompt.

        `attempt`: rounds that ended without the prompt since it was handed in. Each attempt is another draw.
        """
        ...


class GeneratedDataSet:
    """Prompts of a distribution. Every attempt is drawn anew."""

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
    """Prompts of a trace, by name. An epoch uses one recorded rollout of a prompt. Further candidates are resampled
    from it."""

    def __init__(self, trace: Trace, seed: int = 0) -> None:
        self._pools = Pools(trace, seed)
        self._places: dict[str, list[tuple[int, int]]] = {}
        """(rollout, position) of each recording of a prompt, by prompt."""
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


@dataclass(frozen=True, slots=True)
class RunConditions:
    """Conditions that all settings of a sweep share."""

    data: DataSet
    machine: Machine
    epochs: int = 1
    seed: int = 0
    message_s: float = 0.0
    """Seconds of a message between an engine and its API process, each way."""
    whole_epochs: bool = False
    """True if all prompts of an epoch come back before the next one begins."""


@dataclass(frozen=True, slots=True)
class HandIn:
    """Prompts that a trainer hands in for the next round."""

    prompts: Sequence[FreshPrompt]
    kind: RoundKind | None = None
    """None: the run chooses the kind. "long": too few prompts are left for a short round."""


class Trainer:
    """Hands in prompts. Each epoch is shuffled."""

    def __init__(self, prompts: Sequence[DataPrompt], epochs: int, seed: int, *, whole_epochs: bool = False) -> None:
        """`whole_epochs`: all prompts of an epoch come back before the next one begins. Otherwise epochs form one
        chain."""
        self._later: deque[list[FreshPrompt]] = deque()
        for epoch in range(epochs):
            order = list(prompts)
            Random(f"{seed}/order/{epoch}").shuffle(order)
            self._later.append([FreshPrompt(prompt.id, epoch) for prompt in order])
        if not whole_epochs:
            self._later = deque([[prompt for epoch in self._later for prompt in epoch]])
        self._left: deque[FreshPrompt] = deque()

    @property
    def num_left(self) -> int:
        """Number of prompts that have not been handed in."""
        return len(self._left) + sum(map(len, self._later))

    def hand_in(self, run: Run) -> HandIn:
        """Take the prompts that the run's next round wants, as far as they are left."""
        if not (self._left or run.num_waiting):
            self._left.extend(self._later.popleft())
        if run.next_kind == "long":
            return HandIn(())
        fresh = self._take(run.num_fresh, {entry.prompt_id for entry in run.carried})
        if len(fresh) == run.num_fresh:
            return HandIn(fresh)
        self._left.extendleft(reversed(fresh))
        return HandIn(self._take(run.terms.prompts_per_round, set()), "long")

    def _take(self, count: int, taken: set[str]) -> list[FreshPrompt]:
        """Take the next entries, at most one of each prompt. Between two epochs a prompt may have to wait."""
        fresh: list[FreshPrompt] = []
        passed: list[FreshPrompt] = []
        while self._left and len(fresh) < count:
            prompt = self._left.popleft()
            if prompt.prompt_id in taken:
                passed.append(prompt)
            else:
                taken.add(prompt.prompt_id)
                fresh.append(prompt)
        self._left.extendleft(reversed(passed))
        return fresh
