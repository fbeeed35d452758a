"""Which prompts the next round of a run gets from a trainer's data. Invariant: each prompt is handed in once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

from vllm_rollout.client.body import PromptLike
from vllm_rollout.group.rounds.rounds import RoundKind


class Wants(Protocol):
    """What a run says of its next round: an answer of it, or the run's own."""

    next_round: RoundKind
    num_fresh_prompts: int


class Fed(NamedTuple):
    """What a round is sent."""

    prompts: list[PromptLike]
    kind: RoundKind | None


class RoundFeed:
    """Prompts of one pass over the data, a round's worth at a time; at its end what waits, in long rounds."""

    def __init__(self, prompts: Iterable[PromptLike], prompts_per_round: int) -> None:
        self._prompts = iter(prompts)
        self._prompts_per_round = prompts_per_round

    def next(self, run: Wants, num_waiting: int) -> Fed | None:
        """For the next round; None when everything was handed in and is back."""
        if run.next_round == "long":
            return Fed([], None)
        fresh = self._take(run.num_fresh_prompts)
        if len(fresh) == run.num_fresh_prompts and (fresh or num_waiting):
            return Fed(fresh, None)
        if not fresh and not num_waiting:
            return None
        rest = fresh[self._prompts_per_round :]
        self.put_back(Fed(rest, None))
        return Fed(fresh[: self._prompts_per_round], "long")

    def put_back(self, fed: Fed) -> None:
        """These were not handed in: they come next."""
        self._prompts = chain(fed.prompts, self._prompts)

    def _take(self, count: int) -> list[Any]:
        return list(islice(self._prompts, count))
