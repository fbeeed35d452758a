"""Chooses the order in which the groups of a rollout start if not all of them can run at once.

A client that waits for all answers gains if the longest answers begin first. If answers of one prompt differ too much
to predict the long ones, an early start of all groups matters more. Then the shortest go first. A simulation decides
between them: lengths are drawn from the history of each prompt, and every order runs with the real number of places.
All steps of the simulation take the same time.

Invariant: groups start in the order of their prompts if all have places, or if all mean lengths are equal. They also do
so if a length is unknown, or if no order is expected to save `MIN_GAIN` of the steps. The same history gives the same
order.

Source: longest processing time first (Graham 1969). Seer (2511.14617) orders by lengths of a prompt's earlier answers.
The simulation of each order is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapreplace
from itertools import islice
from statistics import NormalDist, fmean, stdev
from typing import Literal, NamedTuple

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, LengthStatistics
from vllm_rollout.parts.shaping.rules.trust import trusted

OrderName = Literal["prompts", "longest", "shortest"]

MIN_GAIN = 0.03
"""Smallest saving, as a share of the steps, for which an order is changed."""
SURE = 3.0
"""Smallest saving, in standard errors over the draws, for which an order is changed."""
NUM_DRAWS = 16
MAX_DRAWN = 65_536
"""Most lengths drawn for one simulation. Each simulation has at least two draws, even if these exceed this bound."""
NORMAL = NormalDist()


class WaitingGroup(NamedTuple):
    """A group that has not started."""

    plan: GroupPlan
    lengths: LengthMoments | None
    """Length moments of the prompt, or else of the data set. None: unknown."""
    max_tokens: int | None

    @property
    def mean_tokens(self) -> float:
        return 0.0 if self.lengths is None else self.lengths.cut(self.max_tokens).mean

    def draw(self, uniform: Iterator[float]) -> list[float]:
        """Tokens of each candidate. If the group races, a candidate ends with the race at the latest.

        `uniform`: numbers between 0 and 1.
        """
        assert self.lengths is not None
        drawn = list(drawn_lengths(self.lengths, self.max_tokens, self.plan.num_candidates, uniform))
        if self.plan.early_stop and self.plan.redundancy:
            last = sorted(drawn)[self.plan.group_size - 1]
            return [min(last, length) for length in drawn]
        return drawn


def waiting_groups(
    plans: Iterable[GroupPlan], history: LengthStatistics, max_tokens: Iterable[int | None]
) -> list[WaitingGroup]:
    """Groups to start, from their plans, their prompts' history and their limits."""
    return [WaitingGroup(*each) for each in zip(plans, trusted(history), max_tokens, strict=True)]


class LaunchOrder(NamedTuple):
    """Positions of groups in the order of their start."""

    positions: Sequence[int]
    name: OrderName = "prompts"
    gain: float = 0.0
    """Expected saving, as a share of the steps."""


def launch_order(groups: Sequence[WaitingGroup], num_places: int) -> LaunchOrder:
    """Find the order that is expected to end the last candidate first. `num_places`: candidates that run at once."""
    as_they_come = LaunchOrder(range(len(groups)))
    num_candidates = sum(group.plan.num_candidates for group in groups)
    means = [group.mean_tokens for group in groups]
    if num_candidates <= num_places or len(set(means)) == 1 or any(group.lengths is None for group in groups):
        return as_they_come
    orders: dict[OrderName, Sequence[int]] = {
        "prompts": as_they_come.positions,
        "longest": sorted(range(len(groups)), key=lambda position: -means[position]),
        "shortest": sorted(range(len(groups)), key=lambda position: means[position]),
    }
    uniform = uniforms(num_candidates)
    taken: dict[OrderName, list[float]] = {name: [] for name in orders}
    for _ in range(max(2, min(NUM_DRAWS, MAX_DRAWN // num_candidates))):
        drawn = [group.draw(uniform) for group in groups]
        for name, positions in orders.items():
            lengths = (length for position in positions for length in drawn[position])
            taken[name].append(steps(lengths, num_places))
    best = min(taken, key=lambda name: sum(taken[name]))
    gain = sure_gain(taken[best], taken["prompts"])
    return LaunchOrder(orders[best], best, gain) if gain else as_they_come


def sure_gain(taken: Sequence[float], otherwise: Sequence[float]) -> float:
    """Mean saving over the draws, as a share of the steps. 0 if it is below `MIN_GAIN` or `SURE` standard errors."""
    saved = [1 - own / plain for own, plain in zip(taken, otherwise, strict=True)]
    gain = fmean(saved)
    return gain if gain >= max(MIN_GAIN, SURE * stdev(saved) / math.sqrt(len(saved))) else 0.0


def drawn_lengths(
    lengths: LengthMoments, max_tokens: int | None, num: int, uniform: Iterator[float]
) -> Iterator[float]:
    """Draw the tokens of `num` candidates. `uniform`: numbers between 0 and 1."""
    location, std, _ = lengths.log_normal()
    most = math.inf if max_tokens is None else max_tokens
    for number in islice(uniform, num):
        yield min(most, math.exp(location + std * NORMAL.inv_cdf(number)))


def uniforms(seed: int) -> Iterator[float]:
    """Numbers between 0 and 1, the same for the same seed, by Knuth's linear congruential generator (MMIX)."""
    state = seed
    while True:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        yield ((state >> 12) + 0.5) / 2**52


def steps(lengths: Iterable[float], num_places: int) -> float:
    """Steps until candidates of these lengths have ended, if each takes the place that is free first."""
    ends = [0.0] * num_places
    for length in lengths:
        heapreplace(ends, ends[0] + length)
    return max(ends)
