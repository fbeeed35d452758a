"""A trainer that goes through a data set epoch after epoch. Invariant: each epoch hands in every prompt once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from vllm_rollout.group.rounds import FreshPrompt, RoundKind, Run
from vllm_rollout.simulator.rounds.prompts import DataPrompt


@dataclass(frozen=True, slots=True)
class HandIn:
    """What a trainer asks of the next round."""

    prompts: Sequence[FreshPrompt]
    kind: RoundKind | None = None
    """None: whatever is next. "long": there are too few prompts left for a short round."""


class Trainer:
    """Shuffles every epoch, as trainers do."""

    def __init__(self, prompts: Sequence[DataPrompt], epochs: int, seed: int) -> None:
        self._left: deque[FreshPrompt] = deque()
        for epoch in range(epochs):
            order = list(prompts)
            Random(f"{seed}/order/{epoch}").shuffle(order)
            self._left.extend(FreshPrompt(prompt.id, epoch) for prompt in order)

    @property
    def num_left(self) -> int:
        """Prompts that have not been handed in."""
        return len(self._left)

    def hand_in(self, run: Run) -> HandIn:
        """What the run's next round wants, as far as it is there."""
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
