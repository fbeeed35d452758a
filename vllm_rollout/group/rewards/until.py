"""Rules for groups that run until their rewards differ (`"until": "variance"`): when to stop, launch and return.

A group teaches when its rewards are not all the same.

Invariant: in order `index`, the returned trajectories are a function of the rewards in the order of launch. The order
of endings and the number of candidates beside them do not change the result. One exception: if a candidate is void
after its spare was stopped, a new candidate is launched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, lgamma, prod
from statistics import fmean
from typing import Literal, NamedTuple

from vllm_rollout.group.checks import number

CandidateStage = Literal["running", "awaited", "graded", "gone"]
"""`awaited`: ended, its reward is to come. `gone`: it will never have a reward: void, a grader error, lost, or
stopped as a spare."""
Order = Literal["index", "grading"]
"""Order in which candidates count. `index`: order of launch, so that each waits for those launched before.
`grading`: order of grading, as in a race, which is sooner, and biased towards short answers."""
Kind = Literal["wait", "complete", "incomplete"]
"""`complete`: the group has `group_size` rewards, and they differ or no more candidates may be launched."""

EVEN_CHANCE = 0.5
"""Probability with which the running candidates shall make a group teach. `benchmarks/rewards/variance.py` compares
others: 0.3 takes longer, 0.8 generates more."""
ROUNDING = 1e-9
MAX_HISTORY_WEIGHT = 16.0
"""Largest weight of earlier rewards in a prior. They are limited because they come from another policy."""


class UntilTerms(NamedTuple):
    group_size: int
    max_candidates: int
    """Most candidates that may ever be launched."""
    order: Order = "index"

    @classmethod
    def of(cls, group_size: int, num_candidates: int, max_candidates: int | None) -> UntilTerms:
        """`num_candidates`: candidates at the start of the group. `max_candidates`: None means 4 * group_size, or
        `num_candidates` if that is more.

        Raises: ValueError as `checked`.
        """
        most = max(4 * group_size, num_candidates) if max_candidates is None else max_candidates
        return cls(group_size, most).checked()

    def checked(self) -> UntilTerms:
        """Raises: ValueError for a group that could never teach."""
        if self.group_size < 2:
            raise ValueError(
                f"until 'variance' needs a group_size of at least 2, got {self.group_size}: one reward never differs. "
                "Ask for more, or leave until out."
            )
        if self.max_candidates < self.group_size:
            raise ValueError(
                f"max_candidates must be at least group_size ({self.group_size}), got {self.max_candidates}."
            )
        return self


@dataclass(frozen=True, slots=True)
class CandidateReward:
    """State of a candidate's reward."""

    index: int
    stage: CandidateStage
    reward: float | None = None
    """Reward of a graded candidate. None for others."""
    place: int = 0
    """Number of candidates of the group that were graded before this one. Used in order `grading` only."""
    chance: float | None = None
    """Probability that an awaited reward is above 0, by the quality head. None: unknown."""


class Prior(NamedTuple):
    """A beta distribution of a prompt's success rate, as pseudo-counts of successes and failures."""

    successes: float = 1.0
    failures: float = 1.0


UNIFORM = Prior()
"""Every success rate is equally likely."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Next step of the group. While it waits, it may launch candidates, or stop spares that are no longer needed."""

    kind: Kind = "wait"
    returned: tuple[int, ...] = ()
    """Indices, ascending: `group_size` of a complete group, all graded ones of an incomplete one."""
    teaches: bool = False
    num_graded: int = 0
    """Number of rewards behind the decision: the returned ones, and those passed over."""
    success: float | None = None
    """Mean of the first `group_size` rewards, returned or not. In order `index` the rule does not bias it."""
    launch: int = 0
    stop: tuple[int, ...] = ()
    """Indices of candidates to stop: all that are open when the group is over, otherwise spares."""


def prior_of(num_rewarded: float, num_successful: float, chance: float = 0.5) -> Prior:
    """Prior of a prompt before its group begins.

    Args:
        num_rewarded: earlier rewards of this prompt, with their weights (`group/judging/success.py`).
        num_successful: earlier rewards above 0, with their weights.
        chance: expected success probability, from the data set, or from the quality head for the prompt's siblings.

    Raises: ValueError for a chance that is no probability.
    """
    number(chance, "chance", 0, 1)
    share = min(1.0, MAX_HISTORY_WEIGHT / num_rewarded) if num_rewarded else 0.0
    expected = min(max(chance, 0.01), 0.99)
    return Prior(2 * expected + share * num_successful, 2 * (1 - expected) + share * (num_rewarded - num_successful))


def chance_of_same(prior: Prior, rewards: Sequence[float], num_more: int, awaited: Sequence[float] = ()) -> float:
    """Probability that `num_more` further rewards equal these, which are all the same. Without rewards: all equal.

    A success is a reward above 0. With more than two values the result is an upper bound. `awaited`: probabilities that
    awaited rewards, which must be the same too, are above 0.
    """
    return _chance_of_same(prior, _Known.of(rewards), num_more, prod(awaited), prod(1 - each for each in awaited))


class _Known(NamedTuple):
    """Summary of known rewards, as far as later rewards may depend on it."""

    num: int = 0
    are_same: bool = True
    are_successes: bool = False
    """True if there is a reward, and the first one is above 0. Meaningful if `are_same`."""

    @classmethod
    def of(cls, rewards: Sequence[float]) -> _Known:
        return cls(len(rewards), len(set(rewards)) < 2, bool(rewards) and rewards[0] > 0)


def _chance_of_same(prior: Prior, known: _Known, num_more: int, successes: float, failures: float) -> float:
    """Draws of a Polya urn. `successes`, `failures`: probabilities that all awaited rewards are above 0, or none is."""
    if not known.are_same:
        return 0.0
    if known.num:
        successes, failures = (successes, 0.0) if known.are_successes else (0.0, failures)
    draws = _log_rising(sum(prior), known.num, num_more)
    chance = sum(
        each * exp(_log_rising(weight, known.num, num_more) - draws)
        for each, weight in ((successes, prior.successes), (failures, prior.failures))
        if each and weight + known.num > 0
    )
    return min(1.0, chance if num_more else successes + failures)


def _log_rising(weight: float, begin: int, num: int) -> float:
    """Logarithm of (weight + begin) · (weight + begin + 1) · …, `num` factors."""
    return lgamma(weight + begin + num) - lgamma(weight + begin)


def num_needed(
    prior: Prior, rewards: Sequence[float], most: int, chance: float = EVEN_CHANCE, awaited: Sequence[float] = ()
) -> int:
    """Fewest further rewards of which one differs with this probability. At most `most`. 0 if the rewards differ.

    Under the prior (1, 1) an even chance takes one more than there are: a group doubles. `awaited`: probabilities that
    awaited rewards are above 0. These rewards come anyway and do not count in the result.
    """
    return _num_needed(prior, _Known.of(rewards), most, chance, prod(awaited), prod(1 - each for each in awaited))


def _num_needed(prior: Prior, known: _Known, most: int, chance: float, successes: float, failures: float) -> int:
    enough = 1 - chance + ROUNDING

    def is_enough(num_more: int) -> bool:
        return _chance_of_same(prior, known, num_more, successes, failures) <= enough

    return bisect_left(range(most), True, key=is_enough)  # the chance falls with each


def spares_wanted(
    terms: UntilTerms,
    prior: Prior,
    rewards: Sequence[float],
    num_launches_left: int,
    chance: float = EVEN_CHANCE,
    awaited: Sequence[float] = (),
) -> int:
    """Number of candidates to run beyond those that complete the group anyway.

    Args:
        rewards: all known rewards, in any order. The result grows while they are the same. It is 0 when they differ.
        awaited: success probabilities of ended candidates, where the quality head gives them.
    """
    short = max(0, terms.group_size - len(rewards) - len(awaited))
    return max(0, num_needed(prior, rewards, short + num_launches_left, chance, awaited) - short)


def num_to_refill(group_size: int, max_candidates: int, num_launched: int, num_alive: int) -> int:
    """Candidates to launch in place of lost ones, for both values of `until`: as many as `num_alive` is below
    `group_size`.

    Args:
        num_alive: running, awaited or graded candidates.
    """
    return max(0, min(max_candidates - num_launched, group_size - num_alive))


def num_that_teach(rewards: Sequence[float | None], group_size: int) -> int | None:
    """Length of the shortest prefix, at least `group_size`, whose rewards differ. None if none differ.

    A reward of None is not known yet.
    """
    known = [(at, reward) for at, reward in enumerate(rewards) if reward is not None]
    differs = next((at for at, reward in known if reward != known[0][1]), None)
    return None if differs is None or len(rewards) < group_size else max(group_size, differs + 1)


def group_weight(group_size: int, num_graded: int) -> float:
    """Weight of a group if each graded answer shall have the same weight: G / n.

    It bounds the weight of prompts that rarely succeed: 1 + ln(N / G) times that of GRPO instead of N / G.
    """
    return group_size / num_graded


def decide(
    terms: UntilTerms,
    candidates: Sequence[CandidateReward],
    prior: Prior = UNIFORM,
    chance: float = EVEN_CHANCE,
) -> Decision:
    """Next step of a group. `candidates`: all that were launched, in any order."""
    rewards = GroupRewards(terms, prior, chance)
    rewards.launched(each.index for each in candidates)
    for each in sorted(candidates, key=lambda each: each.place):
        if each.stage == "graded":
            assert each.reward is not None, f"candidate {each.index} is graded without a reward"
            rewards.graded(each.index, each.reward)
        elif each.stage == "awaited":
            rewards.awaited(each.index, each.chance)
        elif each.stage == "gone":
            rewards.gone(each.index)
    return rewards.decision()


class GroupRewards:
    """Rewards of one group as they arrive, and the decision that follows.

    No event takes a loop over the candidates, so that thousands may arrive one after the other.
    """

    def __init__(self, terms: UntilTerms, prior: Prior = UNIFORM, chance: float = EVEN_CHANCE) -> None:
        self._terms, self._prior, self._chance = terms, prior, chance
        self._num_launched = 0
        self._alive: list[int] = []
        """Indices of candidates that are not gone, ascending."""
        self._open: list[int] = []
        """Indices of candidates that are neither gone nor graded, ascending."""
        self._successes: dict[int, float] = {}
        """Probability that an awaited reward is above 0, by index, where the quality head gives one."""
        self._failures: dict[int, float] = {}
        """1 - `_successes`, by index."""
        self._rewards: dict[int, float] = {}
        """Rewards by index, in the order of grading."""
        self._first: int | None = None
        """Lowest index of a graded candidate."""
        self._different: int | None = None
        """Lowest index of a graded candidate whose reward differs from that of `_first`."""
        self._place_of_different: int | None = None
        """Number of rewards graded before the first one that differs from the first graded reward."""

    def launched(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._num_launched += 1
            insort(self._alive, index)
            insort(self._open, index)

    def awaited(self, index: int, chance: float | None = None) -> None:
        """Record that a candidate has ended. chance: as in `CandidateReward`."""
        if chance is not None:
            self._successes[index], self._failures[index] = chance, 1 - chance

    def graded(self, index: int, reward: float) -> None:
        if not self._close(index):  # a spare that was stopped, and whose reward came all the same
            insort(self._alive, index)
        first = self._first
        if self._place_of_different is None and self._rewards and reward != next(iter(self._rewards.values())):
            self._place_of_different = len(self._rewards)
        self._rewards[index] = reward
        if first is None or index < first:
            if first is not None and reward != self._rewards[first]:
                self._different = first
            self._first = index
        elif reward != self._rewards[first] and (self._different is None or index < self._different):
            self._different = index

    def gone(self, index: int) -> None:
        """Record that a candidate will never be graded."""
        if self._close(index):
            del self._alive[bisect_left(self._alive, index)]

    @property
    def num_graded(self) -> int:
        return len(self._rewards)

    @property
    def indices(self) -> list[int]:
        """Indices of graded candidates, ascending."""
        return sorted(self._rewards)

    def decision(self) -> Decision:
        size, launches_left = self._terms.group_size, self._terms.max_candidates - self._num_launched
        num = self._num_that_teach
        if num is not None:
            # By the fewest that teach, all but the last are the same if there are more than group_size.
            counted = self._counted(num)
            return self._over("complete", [*counted[: size - 1], counted[-1]], counted)
        if not launches_left and not self._open:
            counted = self._counted(len(self._alive))
            return self._over("complete" if len(counted) >= size else "incomplete", counted[:size], counted)
        num_expected = len(self._rewards) + len(self._successes)
        short = max(0, size - num_expected)
        spares = _num_needed(
            self._prior,
            _Known(
                len(self._rewards), self._different is None, self._first is not None and self._rewards[self._first] > 0
            ),
            short + launches_left,
            self._chance,
            *self._chances,
        )
        wanted = max(short, spares)
        num_without_chance = len(self._open) - len(self._successes)
        return Decision(
            launch=max(0, min(launches_left, wanted - num_without_chance)), stop=self._unneeded(launches_left)
        )

    @property
    def _chances(self) -> tuple[float, float]:
        """Probabilities that all awaited rewards are above 0, and that none is. (0, 0) if rewards differ already."""
        if self._different is not None:
            return 0.0, 0.0
        return prod(self._successes.values()), prod(self._failures.values())

    def _close(self, index: int) -> bool:
        """Close a candidate that awaited its reward or ran. Returns True if it was open."""
        self._successes.pop(index, None)
        self._failures.pop(index, None)
        at = bisect_left(self._open, index)
        was_open = at < len(self._open) and self._open[at] == index
        if was_open:
            del self._open[at]
        return was_open

    @property
    def _num_that_teach(self) -> int | None:
        """As `num_that_teach`, of the graded candidates that count already."""
        if self._terms.order == "grading":
            num, place = len(self._rewards), self._place_of_different
        else:
            num = bisect_left(self._alive, self._open[0]) if self._open else len(self._alive)
            place = None if self._different is None else bisect_left(self._alive, self._different)
        if place is None or place >= num or num < self._terms.group_size:
            return None
        return max(self._terms.group_size, place + 1)

    def _counted(self, num: int) -> list[int]:
        """Indices of the first graded candidates that count."""
        return list(islice(self._rewards, num)) if self._terms.order == "grading" else self._alive[:num]

    def _unneeded(self, launches_left: int) -> tuple[int, ...]:
        """Indices of open spares that cannot be returned, since rewards before them differ already.

        Some spares stay: one for each open candidate before them that no launch could replace if it were void.
        """
        if self._terms.order == "grading" or self._different is None:
            return ()
        needed = max(self._terms.group_size, bisect_left(self._alive, self._different) + 1)
        if needed >= len(self._alive):
            return ()
        num_open = bisect_left(self._open, self._alive[needed])
        return tuple(self._open[num_open + max(0, num_open - launches_left) :])

    def _over(self, kind: Kind, chosen: Sequence[int], counted: Sequence[int]) -> Decision:
        rewards = [self._rewards[index] for index in counted]
        return Decision(
            kind,
            tuple(sorted(chosen)),
            teaches=len({self._rewards[index] for index in chosen}) > 1,
            num_graded=len(rewards),
            success=fmean(rewards[: self._terms.group_size]) if rewards else None,
            stop=tuple(self._open),
        )
