"""Chooses the rank of the next group by predicted remaining work (`parts/moving/rules/work.py`).

A candidate without a prediction, and a request that was not placed here, count as the average of the predicted
candidates. Without any of these, a load is a number of candidates.

A client with several servers also places groups by this rule (`parts/fleet/rules.py`). A server is then a rank, and
its size the number of its engines.

Invariant: a rank stays held as long as any owner keeps it empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm_rollout.kernel.rules.ranks import PlacedGroup, Ranks
from vllm_rollout.parts.moving.rules.work import RankWork, TokenCost, Work

PRECISION = 32
"""Remaining tokens are predicted anew after 1 / `PRECISION` of a group's candidates have ended."""


class Placement(Ranks):
    """Ranks whose loads are predicted work."""

    def __init__(self, num_ranks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_ranks, *args, **kwargs)
        self.sizes: Sequence[float] = [1] * num_ranks
        """Size of each rank. Loads are divided by it."""
        self.token_cost = TokenCost()
        """Weights of predicted work. Without a profile, tokens are counted."""
        self._work = [RankWork() for _ in range(num_ranks)]

    @property
    def loads(self) -> list[float]:
        weighed = [work.cost(self.token_cost) for work in self._work]
        num_predicted = sum(work.num_predicted for work in self._work)
        average = sum(weighed) / num_predicted if num_predicted else 1
        ranks = zip(weighed, self._work, self.num_candidates, self.others, self.sizes, strict=True)
        return [
            (load + average * (own - work.num_predicted + others)) / size for load, work, own, others, size in ranks
        ]

    def place(self, work: Work, rank: int | None = None) -> int:
        """Place work, on `rank` if the user pins it. Call `leave` at its end."""
        if rank is None:
            rank = self.next_rank()
        self._add(rank, work)
        return rank

    def change(self, rank: int, before: Work, after: Work) -> None:
        """Replace the remaining work of a placed group."""
        self._add(rank, before, -1)
        self._add(rank, after)

    def leave(self, rank: int, work: Work) -> None:
        """Remove a group. `work`: its remaining work, as last reported."""
        self._add(rank, work, -1)

    def _add(self, rank: int, work: Work, sign: int = 1) -> None:
        self.num_candidates[rank] += sign * work.num_candidates
        self._work[rank].add(work, sign)


class PredictedGroup(PlacedGroup):
    """A group with its remaining work."""

    def __init__(self, rank: int, num_tokens: Mapping[int, int], work: Work, outlook: Any | None) -> None:
        """`num_tokens`: tokens of each candidate at its start, by index."""
        super().__init__(rank, len(num_tokens))
        self.work = work
        """Remaining work of the group. It counts in the rank's load."""
        self._outlook = outlook
        self._num_tokens = dict(num_tokens)
        """Tokens of each running candidate at age 0, by index. Negative for a candidate that starts later."""
        self._num_at_prediction = len(num_tokens)
        self._age = 0
        """Tokens that each candidate from the start has generated here, as of the last candidate's end."""

    def predict(self) -> Work:
        """Remaining work now. The number of candidates is exact. Their tokens are as of the last prediction
        (`PRECISION`).
        """
        num_ended = self._num_at_prediction - self.num_left
        if self.num_left and 0 <= num_ended * PRECISION < self._num_at_prediction:
            return self.work._replace(num_candidates=self.num_left)
        self._num_at_prediction = self.num_left
        return work_of([before + self._age for before in self._num_tokens.values()], self._outlook)

    def begins(self, index: int) -> None:
        self._num_tokens[index] = -self._age
        self.num_left = len(self._num_tokens)

    def ended(self, index: int, num_tokens: int) -> None:
        late = max(0, -self._num_tokens.pop(index))
        self._age = max(self._age, late + num_tokens)
        self.num_left = len(self._num_tokens)


class PredictedRanks(Placement):
    """The part's rule for the ranks of a server. Overrides: open, begins, ended, move, close."""

    def open(
        self, num_tokens: Mapping[int, int], rank: int | None = None, outlook: Any | None = None
    ) -> PredictedGroup:
        work = work_of(num_tokens.values(), outlook)
        return PredictedGroup(self.place(work, rank), num_tokens, work, outlook)

    def begins(self, group: PlacedGroup, index: int) -> None:
        assert isinstance(group, PredictedGroup)
        group.begins(index)
        self._predict(group)

    def ended(self, group: PlacedGroup, index: int, num_tokens: int) -> None:
        assert isinstance(group, PredictedGroup)
        group.ended(index, num_tokens)
        self._predict(group)

    def move(self, group: PlacedGroup, rank: int) -> None:
        assert isinstance(group, PredictedGroup)
        self.leave(group.rank, group.work)
        group.rank = self.place(group.work, rank)

    def close(self, group: PlacedGroup) -> None:
        assert isinstance(group, PredictedGroup)
        self.leave(group.rank, group.work)

    def _predict(self, group: PredictedGroup) -> None:
        before, group.work = group.work, group.predict()
        self.change(group.rank, before, group.work)


def work_of(num_tokens: Collection[int], outlook: Any | None) -> Work:
    """Work of candidates that have these numbers of output tokens. `outlook`: as of `GroupOrder.outlook`."""
    if outlook is None:
        return Work(len(num_tokens))
    return Work.of(num_tokens, outlook.lengths, outlook.max_tokens, outlook.prompt_tokens)


TRAINER = "trainer"
"""Owner of drains over HTTP. All other owners are rollouts, by id, which free ranks until they are over."""
ALL_OWNERS = ""
"""Owner that gives a rank back in the name of all owners."""


class Holders:
    """Owners that keep a rank empty."""

    def __init__(self) -> None:
        self._owners: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._owners)

    def change(self, owner: str, *, held: bool) -> None:
        """Add this owner, or remove it if `held` is False. `ALL_OWNERS` removes all."""
        if held:
            self._owners.add(owner)
        elif owner == ALL_OWNERS:
            self._owners.clear()
        else:
            self._owners.discard(owner)
