"""The form that lengths have within a prompt, whatever their distribution, pooled over the data set.

A length is e ** (location + w): the location, the log of its scale, is its prompt's; w has one distribution for all,
the curve of a life table (`group/lengths/life_table.py`). Early stop does not bend that curve; what stopped groups
leave open is told by the few that run to their ends.

Nobody knows a group's location. All are considered, each with the weight that the group's lengths, and where prompts
usually are, give it; with these weights the group enters the table, and what was cut of it is expected. That is
expectation maximisation, one step per group.

Invariant: sums are finite, not negative, and decay; what a group comes to depends on them and the group only, so that a
restored shape goes on as the saved one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple

from vllm_rollout.group.checks import MAX_COUNT, fields_of, integer, listed, number, shown
from vllm_rollout.group.lengths.censoring import counted_stops, fit_log_lengths, log_length
from vllm_rollout.group.lengths.life_table import (
    LEFT,
    NUM_BINS,
    PRIOR_LOG_STD,
    RIGHT,
    STEP,
    BinnedGroup,
    SurvivalCurve,
    binned,
)

MIN_LOCATION_STD = 0.05
"""Least standard deviation of the prompts' locations: closer together they are not believed to be."""
MIN_GROUPS = 8.0
"""Groups from which on it is known where prompts usually are."""
NEGLIGIBLE = 1e-4
"""Weight of a place that is left out."""

FIRST_BIN, LAST_BIN = -6, 240
"""Bins of the data set's lengths: from half a token to what no candidate reaches."""
MAX_LENGTH = 1e12
"""Longest length that is expected, in tokens."""
MAX_LOG_ERROR = 10.0
"""Largest error of a log-normal fit's variance that is believed, as a log."""
MAX_SUM = 1e12
"""Largest sum of a state; real ones stay below some 740 groups times their candidates."""


class PossibleLocation(NamedTuple):
    """A location that a group may have."""

    weight: float
    shift: int
    """Bins from the table's to the group's."""


class ShapedMoments(NamedTuple):
    """What one group comes to, in tokens; fields as in `GroupMoments`."""

    mean: float
    variance: float | None
    spread: float


class LengthShape:
    """Life table of normalized lengths, and the data set's lengths as they would run."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.num_groups = 0
        """Observed, however long ago."""
        self._ends = [0.0] * NUM_BINS
        self._risks = [0.0] * NUM_BINS
        self._locations = [0.0] * 4
        """Groups; sums of their location, its square, and what is not known of it, as a variance."""
        self._fits = [0.0] * 2
        """Groups with stops; sum of the logs of their variance over that of a log-normal fit."""
        self._lengths = [0.0] * (LAST_BIN - FIRST_BIN)
        """Shares of groups by bin of length."""
        self._sums = {
            "ends": self._ends,
            "risks": self._risks,
            "locations": self._locations,
            "fits": self._fits,
            "lengths": self._lengths,
        }
        """All of these, as a state has them."""
        self.curve = SurvivalCurve(self._ends, self._risks)
        """The curve as it was when the newest group came."""

    def observe(
        self, finished: Sequence[int], stops: Sequence[int], log_std: float = PRIOR_LOG_STD
    ) -> ShapedMoments | None:
        """One group, of at least one length; says what it comes to when some were cut, else None.

        log_std: of lengths within prompts, as fits of the groups before have it. They learn how far lengths spread from
        the first groups on; a table that these entered too narrow would take hundreds to widen.
        """
        self.curve = SurvivalCurve(self._ends, self._risks, log_std)
        ended = [(log_length(length), count) for length, count in Counter(finished).items()]
        cut = [(log_length(stop), count) for stop, count in counted_stops(stops)]
        group = binned(ended, cut)
        possible, alone = self._possible_locations(group, cut)
        moments = self._moments(finished, cut, possible) if stops else None
        self._learn(ended, cut, group, possible)
        if alone is not None:
            for i, value in enumerate((1.0, alone[0], alone[0] ** 2, alone[1])):
                self._locations[i] = self._decay * self._locations[i] + value
        self.num_groups = min(self.num_groups + 1, MAX_COUNT)
        return moments

    def variance_of_prompt(self, shaped: float, fitted: float) -> float:
        """Variance of a group with stops, from the form that all groups have in common and a log-normal fit of its own.

        The common form knows nothing of prompts that spread more than others of their length, a fit of 8 lengths knows
        little of anything, and where lengths are not log-normal it errs for all groups alike. So it is the geometric
        mean of both, less what fits usually err.
        """
        if not shaped or not fitted:
            return shaped
        error = min(max(math.log(shaped / fitted), -MAX_LOG_ERROR), MAX_LOG_ERROR)
        for i, value in enumerate((1.0, error)):
            self._fits[i] = self._decay * self._fits[i] + value
        groups, errors = self._fits
        usual = min(max(errors / groups, -MAX_LOG_ERROR), MAX_LOG_ERROR)
        return shaped * math.exp((usual - error) / 2)

    def shares(self) -> tuple[tuple[float, float], ...]:
        """The data set's lengths, in tokens, and their shares; those of groups with stops as they are expected."""
        total = math.fsum(self._lengths)
        if not total:
            return ()
        return tuple(
            (math.exp((bin_ + 0.5) * STEP), share / total)
            for bin_, share in enumerate(self._lengths, FIRST_BIN)
            if share
        )

    def _possible_locations(
        self, group: BinnedGroup, cut: Sequence[tuple[float, int]]
    ) -> tuple[list[PossibleLocation], tuple[float, float] | None]:
        """Where the group may be, with location and variance by the group alone, in bins, if any finished."""
        shifts = range(group.first + len(group.ends) - RIGHT, group.first - LEFT + 1)
        likely = [self._log_likelihood(group, shift) for shift in shifts]
        alone = _mean_and_variance(_normalized(likely), shifts) if group.num_ends else None
        usual = self._usual_location([] if group.num_ends else cut)
        if usual is not None:
            center, variance = usual
            likely = [log - (shift - center) ** 2 / (2 * variance) for log, shift in zip(likely, shifts, strict=True)]
        kept = [(w, shift) for w, shift in zip(_normalized(likely), shifts, strict=True) if w > NEGLIGIBLE]
        total = math.fsum(weight for weight, _ in kept)
        return [PossibleLocation(weight / total, shift) for weight, shift in kept], alone

    def _log_likelihood(self, group: BinnedGroup, shift: int) -> float:
        curve, size, start = self.curve, len(group.ends), group.first - shift - LEFT
        of_ends: float = sum(map(mul, group.ends, curve.logs[start : start + size]))
        of_risks: float = sum(map(mul, group.risks, curve.rates[start : start + size]))
        return of_ends - of_risks - group.num * curve.hazards[start]

    def _usual_location(self, only_cut: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
        """Mean and variance of prompts' locations, in bins; None where any location is as likely.

        A group in which none finished, while little else is known, is where it was an even chance that all were cut.
        """
        groups, total, squares, unknown = self._locations
        if groups >= MIN_GROUPS:
            mean = total / groups
            return mean, max((squares - unknown) / groups - mean**2, (MIN_LOCATION_STD / STEP) ** 2)
        if only_cut:
            stops = [max(1, round(math.exp(log))) for log, count in only_cut for _ in range(min(count, 64))]
            return fit_log_lengths([], stops, PRIOR_LOG_STD).location / STEP, 1.0
        return None

    def _moments(
        self, finished: Sequence[int], cut: Sequence[tuple[float, int]], possible: Sequence[PossibleLocation]
    ) -> ShapedMoments:
        """Expectations over all locations. The mean moves with the unknown lengths, which takes 1 / num of their
        variance out of the sample's."""
        num = len(finished) + sum(count for _, count in cut)
        mean = second = variance = 0.0
        own, own_squares = math.fsum(finished), math.fsum(length**2 for length in finished)
        for weight, shift in possible:
            scale = math.exp(shift * STEP)
            total, squares, unknown = own, own_squares, 0.0
            for log, count in cut:
                stop = math.exp(log)
                first, moment = self.curve.beyond(log / STEP - shift - LEFT)
                expected = min(max(first * scale, stop), MAX_LENGTH)
                residual = min(max(moment - first**2, 0.0) * scale**2, MAX_LENGTH**2)
                total, squares = total + count * expected, squares + count * expected**2
                unknown += count * residual
            distances = max(squares - total**2 / num, 0.0)
            mean += weight * total / num
            second += weight * (squares + unknown) / num
            variance += weight * (distances + (1 - 1 / num) * unknown) / max(num - 1, 1)
        return ShapedMoments(mean, variance if num > 1 else None, max(second - mean**2, 0.0))

    def _learn(
        self,
        ended: Sequence[tuple[float, int]],
        cut: Sequence[tuple[float, int]],
        group: BinnedGroup,
        possible: Sequence[PossibleLocation],
    ) -> None:
        for sums in (self._ends, self._risks, self._lengths):
            sums[:] = [self._decay * value for value in sums]
        for log, count in ended:
            self._lengths[_bin(log / STEP)] += count / group.num
        for location in possible:
            self._add_rest(cut, location.shift, location.weight / group.num)
        # where a group is in which none finished is a guess: it would confirm what the table says already
        for weight, shift in possible if group.num_ends else ():
            start = group.first - shift - LEFT
            for i in range(start):
                self._risks[i] += weight * group.num
            for i, (end, risk) in enumerate(zip(group.ends, group.risks, strict=True), start):
                self._ends[i] += weight * end
                self._risks[i] += weight * risk

    def _add_rest(self, cut: Sequence[tuple[float, int]], shift: int, weight: float) -> None:
        """What was cut goes where it is expected to end."""
        survival, entering = self.curve.survival, [0.0] * (NUM_BINS + 1)
        for log, count in cut:
            bin_, part, reach = self.curve.reach(log / STEP - shift - LEFT)
            ends_here = weight * count * max(reach - survival[bin_ + 1], 0.0) / reach
            self._lengths[_bin(max(bin_ + LEFT + (part + 1) / 2 + shift, log / STEP))] += ends_here
            entering[bin_ + 1] += weight * count / reach
        alive = 0.0
        for bin_ in range(NUM_BINS):
            alive += entering[bin_]
            if alive:
                self._lengths[_bin(bin_ + LEFT + shift)] += alive * (survival[bin_] - survival[bin_ + 1])

    def to_state(self) -> dict[str, Any]:
        """JSON-able, of bounded size."""
        return {"num_groups": self.num_groups, **{name: list(sums) for name, sums in self._sums.items()}}

    @classmethod
    def from_state(cls, state: Any, decay: float) -> LengthShape:
        """Raises: ValueError for what no shape can have been."""
        where = "the shape of a length history"
        fields_of(state, ("num_groups", "ends", "risks", "locations", "fits", "lengths"), where)
        shape = cls(decay)
        shape.num_groups = integer(state["num_groups"], f"num_groups of {where}")
        for name, sums in shape._sums.items():
            values = listed(state[name], f"{name} of {where}", length=len(sums))
            least = -MAX_SUM if name in ("locations", "fits") else 0.0
            sums[:] = [number(value, f"{name} of {where}", least, MAX_SUM) for value in values]
        if min(shape._locations[0], *shape._locations[2:], shape._fits[0]) < 0:
            raise ValueError(f"locations and fits of {where} must be sums over groups, got {shown(shape._locations)}")
        return shape


def _normalized(logs: Sequence[float]) -> list[float]:
    best = max(logs)
    weights = [math.exp(log - best) for log in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _mean_and_variance(weights: Sequence[float], values: Sequence[int]) -> tuple[float, float]:
    mean = math.fsum(map(mul, weights, values))
    return mean, math.fsum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))


def _bin(position: float) -> int:
    return min(max(math.floor(position), FIRST_BIN), LAST_BIN - 1) - FIRST_BIN
