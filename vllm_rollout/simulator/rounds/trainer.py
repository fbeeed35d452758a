"""A trainer that goes through a data set epoch after epoch. Invariant: each epoch hands in every prompt once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from vllm_rollout.group.rounds.rounds import FreshPrompt, RoundKind, Run
from vllm_rollout.simulator.rounds.prompts import DataPrompt


@dataclass(frozen=True, slots=True)
class HandIn:
    """What a trainer asks of the next round."""

    prompts: Sequence[FreshPrompt]
    kind: RoundKind | None = None
    """None: whatever is next. "long": there are too few prompts left for a short round."""


class Trainer:
    """Shuffles every epoch, as trainers do."""

    def __init__(self, prompts: Sequence[DataPrompt], epochs: int, seed: int, *, whole_epochs: bool = False) -> None:
        """whole_epochs: everything of an epoch comes back before the next one begins. Otherwise they are one chain."""
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
        """Prompts that have not been handed in."""
        return len(self._left) + sum(map(len, self._later))

    def hand_in(self, run: Run) -> HandIn:
        """What the run's next round wants, as far as it is there."""
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
        """The next ones, of each prompt one: where an epoch ends and another begins, a prompt may have to wait."""
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
