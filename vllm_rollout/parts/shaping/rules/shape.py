"""The form of length distributions within a prompt, pooled over the data set.

A length is e ** (location + w). The location, the log of its scale, is specific to the prompt. w has one distribution
for all prompts, the curve of a life table (`parts/shaping/rules/life_table.py`). Early stop does not bias that curve.
The tail that stopped groups leave open comes from the few groups that run to their ends.

A group's location is unknown. All locations are considered, weighted by the group's lengths and by the usual locations
of prompts. With these weights the group enters the table, and its cut lengths get expected values. That is expectation
maximisation, one step per group.

Invariant: sums are finite, not negative, and decay. The result for a group depends only on the sums and the group, so
that a restored shape goes on as the saved one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple

from vllm_rollout.checks import MAX_COUNT, fields_of, integer, listed, number, shown
from vllm_rollout.parts.shaping.rules.censoring import counted_stops, fit_log_lengths, log_length
from vllm_rollout.parts.shaping.rules.life_table import (
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
"""Smallest standard deviation of the prompts' locations."""
MIN_GROUPS = 8.0
"""Number of groups from which on the usual location of prompts is estimated."""
NEGLIGIBLE = 1e-4
"""Weight below which a location is left out."""

FIRST_BIN, LAST_BIN = -6, 240
"""Bins of the data set's lengths: from half a token to a length that no candidate reaches."""
MAX_LENGTH = 1e12
"""Longest expected length, in tokens."""
MAX_LOG_ERROR = 10.0
"""Largest error of a log-normal fit's variance, as a log. Larger ones are cut."""
MAX_SUM = 1e12
"""Largest sum of a state. Real sums stay below some 740 groups times their candidates."""


class PossibleLocation(NamedTuple):
    """A location that a group may have."""

    weight: float
    shift: int
    """Bins from the table's location to the group's."""


class ShapedMoments(NamedTuple):
    """Moments of one group, in tokens. Fields as in `GroupMoments`."""

    mean: float
    variance: float | None
    spread: float


class LengthShape:
    """Life table of normalized lengths, and the data set's lengths as they would run."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.num_groups = 0
        """Number of groups observed, without decay."""
        self._ends = [0.0] * NUM_BINS
        self._risks = [0.0] * NUM_BINS
        self._locations = [0.0] * 4
        """Number of groups, then sums of their location, of its square, and of its unknown part as a variance.
        Decaying."""
        self._fits = [0.0] * 2
        """Number of groups with stops, then the sum of the logs of their variance over that of a log-normal fit.
        Decaying."""
        self._lengths = [0.0] * (LAST_BIN - FIRST_BIN)
        """Shares of groups by bin of length."""
        self._sums = {
            "ends": self._ends,
            "risks": self._risks,
            "locations": self._locations,
            "fits": self._fits,
            "lengths": self._lengths,
        }
        """All sums above, by their name in a state."""
        self.curve = SurvivalCurve(self._ends, self._risks)
        """The curve before the newest group."""

    def observe(
        self, finished: Sequence[int], stops: Sequence[int], log_std: float = PRIOR_LOG_STD
    ) -> ShapedMoments | None:
        """Add one group of at least one length. Returns its moments if some lengths were cut, else None.

        log_std: standard deviation of log lengths within prompts, from the fits of earlier groups. Fits learn this
        spread from the first groups on. A table that is too narrow at the start would need hundreds of groups to widen.
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
        """Variance of a group with stops, from the common form of all groups and a log-normal fit of the group.

        The common form ignores prompts that vary more than others of their length. A fit of 8 lengths is imprecise, and
        errs for all groups alike if lengths are not log-normal. The result is the geometric mean of both, after
        correction for the usual error of fits.
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
        """The data set's lengths, in tokens, with their shares. Cut lengths count as they are expected."""
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
        """Possible locations of a group, and location and variance by the group alone, in bins. None if none
        finished."""
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
        """Mean and variance of prompts' locations, in bins. None if all locations are equally likely.

        While few groups are known, a group in which none finished has the location with an even chance that all were
        cut.
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
        """Expectations over all locations.

        The mean moves with the unknown lengths, which removes 1 / num of their variance from the sample variance.
        """
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
        """Add cut lengths to the bins where they are expected to end."""
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
        """JSON-able state of bounded size."""
        return {"num_groups": self.num_groups, **{name: list(sums) for name, sums in self._sums.items()}}

    @classmethod
    def from_state(cls, state: Any, decay: float) -> LengthShape:
        """Restore a shape. Raises: ValueError for a state that no shape can have."""
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
