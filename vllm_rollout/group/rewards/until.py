"""When a group ends because it teaches (`"until": "variance"`): how long to go on, how many to launch, what comes back.

A group teaches when its rewards are not all the same. What that rule does to a gradient is in docs/until.md.

Invariant: by `index`, what comes back is a function of the rewards in the order of launch: neither who ended first nor
how many ran beside it changes it. Only where a candidate is void whose spare was stopped before, a new one comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, repeat
from math import prod
from statistics import fmean
from typing import Literal, NamedTuple

from vllm_rollout.group.checks import number

CandidateStage = Literal["running", "awaited", "graded", "gone"]
"""`awaited`: it ended, its reward is to come. `gone`: it has no reward and never will have one: void, an error of its
grader, lost, or stopped as a spare."""
Order = Literal["index", "grading"]
"""In which order candidates count. `index`: of launch; whoever was launched before is waited for. `grading`: who is
graded first counts first, as in a race: sooner, and biased towards short answers."""
Kind = Literal["wait", "complete", "incomplete"]
"""`complete`: it has `group_size` rewards, and they differ or nothing more may be launched."""

EVEN_CHANCE = 0.5
"""With which probability what is under way shall make a group teach. `benchmarks/rewards/variance.py` has others: 0.3
takes longer, 0.8 generates more."""
ROUNDING = 1e-9
MAX_HISTORY_WEIGHT = 16.0
"""Rewards of earlier epochs that a prior counts at most: they are of another policy."""


class UntilTerms(NamedTuple):
    group_size: int
    max_candidates: int
    """The most that may ever be launched."""
    order: Order = "index"

    @classmethod
    def of(cls, group_size: int, num_candidates: int, max_candidates: int | None) -> UntilTerms:
        """`num_candidates`: that the group begins with. None: four groups, or as many as it begins with.

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
    """What is known of a candidate's reward."""

    index: int
    stage: CandidateStage
    reward: float | None = None
    """What a graded one has got; None for others."""
    place: int = 0
    """How many of its group were graded before a graded one. Read by the order `grading` only."""
    chance: float | None = None
    """How likely an awaited one's reward is above 0, as the quality head says; None: it says nothing."""


class Prior(NamedTuple):
    """A beta distribution of a prompt's success rate, as successes and failures that were as good as seen."""

    successes: float = 1.0
    failures: float = 1.0


UNIFORM = Prior()
"""Every success rate is as likely as any other."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of the group now. While it waits it may launch, or stop spares that nobody needs any more."""

    kind: Kind = "wait"
    returned: tuple[int, ...] = ()
    """Indices, ascending: `group_size` of a complete group, all graded ones of an incomplete one."""
    teaches: bool = False
    num_graded: int = 0
    """How many rewards the decision rests on: the returned ones, and those passed over on the way."""
    success: float | None = None
    """Mean of the first `group_size` rewards, whatever comes back: by `index` it is not biased by the rule."""
    launch: int = 0
    stop: tuple[int, ...] = ()
    """Indices: all that is under way when the group is over, else spares."""


def prior_of(num_rewarded: float, num_successful: float, chance: float = 0.5) -> Prior:
    """What is known of a prompt before its group begins.

    Args:
        num_rewarded: earlier rewards of this prompt, with their weights (`group/judging/success.py`).
        num_successful: of these, above 0.
        chance: success probability otherwise expected: of the data set, or what the quality head says of its siblings.

    Raises: ValueError for a chance that is no probability.
    """
    number(chance, "chance", 0, 1)
    share = min(1.0, MAX_HISTORY_WEIGHT / num_rewarded) if num_rewarded else 0.0
    expected = min(max(chance, 0.01), 0.99)
    return Prior(2 * expected + share * num_successful, 2 * (1 - expected) + share * (num_rewarded - num_successful))


def chance_of_same(prior: Prior, rewards: Sequence[float], num_more: int, awaited: Sequence[float] = ()) -> float:
    """Probability that `num_more` further rewards are as these, which are all the same; without any, all alike.

    A success is a reward above 0: with more than two values it is an estimate from above. `awaited`: rewards that have
    to be the same as well, each by the probability that it is above 0.
    """
    return next(islice(_chances_of_same(prior, rewards, awaited), num_more, None))


def _chances_of_same(prior: Prior, rewards: Sequence[float], awaited: Sequence[float]) -> Iterator[float]:
    """`chance_of_same` of 0, 1, 2, … further rewards: draws of a Polya urn."""
    if len(set(rewards)) > 1:
        yield from repeat(0.0)
    successes, failures = prod(awaited), prod(1 - each for each in awaited)
    if rewards:
        successes, failures = (successes, 0.0) if rewards[0] > 0 else (0.0, failures)
    total = sum(prior)
    for drawn in count(len(rewards)):
        yield min(1.0, successes + failures)
        successes *= (prior.successes + drawn) / (total + drawn)
        failures *= (prior.failures + drawn) / (total + drawn)


def num_needed(
    prior: Prior, rewards: Sequence[float], most: int, chance: float = EVEN_CHANCE, awaited: Sequence[float] = ()
) -> int:
    """The fewest further rewards of which one differs with this probability; at most `most`, 0 if they differ.

    Under the prior (1, 1) an even chance takes one more than there are: a group doubles. `awaited`: rewards that come
    anyway and are not counted here, each by the probability that it is above 0.
    """
    enough = 1 - chance + ROUNDING
    chances = islice(_chances_of_same(prior, rewards, awaited), most)
    return next((more for more, each in enumerate(chances) if each <= enough), most)


def spares_wanted(
    terms: UntilTerms,
    prior: Prior,
    rewards: Sequence[float],
    num_launches_left: int,
    chance: float = EVEN_CHANCE,
    awaited: Sequence[float] = (),
) -> int:
    """How many candidates shall be under way beyond those that complete the group anyway.

    Args:
        rewards: all that are known, in any order. It grows while they are the same and falls to 0 when they differ.
        awaited: probabilities of success of those that have ended, as far as the quality head says them.
    """
    short = max(0, terms.group_size - len(rewards) - len(awaited))
    return max(0, num_needed(prior, rewards, short + num_launches_left, chance, awaited) - short)


def num_to_refill(group_size: int, max_candidates: int, num_launched: int, num_alive: int) -> int:
    """Candidates to launch in place of those that are gone, for groups of either `until`: spares come before new ones.

    Args:
        num_alive: running, awaited or graded.
    """
    return max(0, min(max_candidates - num_launched, group_size - num_alive))


def num_that_teach(rewards: Sequence[float | None], group_size: int) -> int | None:
    """How many of these, in order and at least `group_size`, have rewards that differ; None if none differ.

    A reward of None is not known yet.
    """
    known = [(at, reward) for at, reward in enumerate(rewards) if reward is not None]
    differs = next((at for at, reward in known if reward != known[0][1]), None)
    return None if differs is None or len(rewards) < group_size else max(group_size, differs + 1)


def group_weight(group_size: int, num_graded: int) -> float:
    """What a group counts where each graded answer shall count the same: G / n.

    It bounds the weight of prompts that rarely succeed (docs/until.md): 1 + ln(N / G) of GRPO's in place of N / G.
    """
    return group_size / num_graded


def decide(
    terms: UntilTerms,
    candidates: Sequence[CandidateReward],
    prior: Prior = UNIFORM,
    chance: float = EVEN_CHANCE,
) -> Decision:
    """What a group does now. Candidates: all that were launched, in any order."""
    alive = sorted((each for each in candidates if each.stage != "gone"), key=lambda each: each.index)
    counted = _counted(terms, alive)
    rewards = [_reward(each) for each in counted]
    under_way = tuple(each.index for each in alive if each.stage != "graded")
    launches_left = terms.max_candidates - len(candidates)
    num = num_that_teach(rewards, terms.group_size)
    if num is not None:
        # By the fewest that teach, all but the last are the same if there are more than group_size.
        chosen = [*counted[: terms.group_size - 1], counted[num - 1]]
        return _over(terms, "complete", chosen, rewards[:num], under_way)
    if not launches_left and not under_way:
        kind: Kind = "complete" if len(counted) >= terms.group_size else "incomplete"
        return _over(terms, kind, counted[: terms.group_size], rewards, ())
    known = [_reward(each) for each in alive if each.stage == "graded"]
    awaited = [each.chance for each in alive if each.stage == "awaited" and each.chance is not None]
    short = max(0, terms.group_size - len(known) - len(awaited))
    wanted = short + spares_wanted(terms, prior, known, launches_left, chance, awaited)
    launch = max(0, min(launches_left, wanted - (len(under_way) - len(awaited))))
    return Decision(launch=launch, stop=_unneeded(terms, alive, launches_left))


def _counted(terms: UntilTerms, alive: Sequence[CandidateReward]) -> list[CandidateReward]:
    """Graded candidates whose turn has come, in order."""
    if terms.order == "grading":
        return sorted((each for each in alive if each.stage == "graded"), key=lambda each: each.place)
    first_open = next((at for at, each in enumerate(alive) if each.stage != "graded"), len(alive))
    return list(alive[:first_open])


def _unneeded(terms: UntilTerms, alive: Sequence[CandidateReward], launches_left: int) -> tuple[int, ...]:
    """Spares that cannot come back, as rewards before them differ already.

    As many stay as there are open candidates before them that no launch could replace if they were void.
    """
    if terms.order == "grading":
        return ()
    needed = num_that_teach([each.reward for each in alive], terms.group_size) or len(alive)
    num_open = sum(each.stage != "graded" for each in alive[:needed])
    spares = [each.index for each in alive[needed:] if each.stage != "graded"]
    return tuple(spares[max(0, num_open - launches_left) :])


def _over(
    terms: UntilTerms,
    kind: Kind,
    chosen: Sequence[CandidateReward],
    rewards: Sequence[float],
    under_way: tuple[int, ...],
) -> Decision:
    return Decision(
        kind,
        tuple(sorted(each.index for each in chosen)),
        teaches=len({each.reward for each in chosen}) > 1,
        num_graded=len(rewards),
        success=fmean(rewards[: terms.group_size]) if rewards else None,
        stop=under_way,
    )


def _reward(candidate: CandidateReward) -> float:
    assert candidate.reward is not None, f"candidate {candidate.index} is graded without a reward"
    return candidate.reward
