"""Cost of a rollout, and savings by stopped candidates against a rollout that waits for all of them.

Tokens and elapsed seconds are counted. The tokens that stopped candidates would still have generated are predicted from
the lengths of this rollout. A stopped candidate counts there as longer than its stop. If candidates ran on to their
ends, the prediction is also made as if they had been stopped, and its error is reported.

Each prompt has its own location of log lengths. Their form within a prompt is shared: a life table
(`parts/shaping/rules/life_table.py`) with a log-normal prior. Measured errors: docs/guides/watching.md.

Invariants: generated + resumed = returned + wasted tokens. If no candidate was stopped, nothing was saved. Unknown
values are None, and count as nothing in a sum. The order of groups and of their candidates has no effect.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.kernel.rules.types import STOP_STATES, EndReason, StopState
from vllm_rollout.parts.shaping.rules.censoring import NORMAL, bounded_log_std, fit_log_lengths, log_length
from vllm_rollout.parts.shaping.rules.life_table import LEFT, NUM_BINS, PRIOR_LOG_STD, STEP, SurvivalCurve
from vllm_rollout.parts.shaping.rules.moments import LengthMoments
from vllm_rollout.parts.shaping.rules.ran_steps import RanCandidates, bubble, step_cost, tail_step_s

PRIOR_RISK = 8.0
"""Weight of the log-normal curve in each bin, in candidates at risk."""
PRIOR_ENDS = 1.0
"""Weight of `PRIOR_LOG_STD`, in ends."""
NUM_POINTS = 24
"""Points at which the distribution of the end of waiting is computed. Twice as many change its mean by less than 1
%."""
NEGLIGIBLE = 1e-6
"""Probability that is treated as 0."""


class RanGroup(NamedTuple):
    """Endings of the candidates of one prompt. Sequences have one entry per candidate. Seconds count from the
    beginning of the rollout."""

    tokens: Sequence[int]
    ends: Sequence[EndReason | StopState]
    """`stop`: the candidate ended by itself, so that its length is known, even if it did not count."""
    selected: Sequence[int]
    """Indices of returned trajectories."""
    group_size: int
    max_tokens: int | None = None
    """None: no cap, or unknown and never reached."""
    resumed: Sequence[int] = ()
    """Tokens of each candidate that come from an earlier round. Empty: none."""
    started_s: float | None = None
    ended_s: Sequence[float] = ()
    """End times in seconds. Empty: unknown, as is everything else that needs times."""
    waited: bool = False
    """True if no candidate could be stopped. Then lengths are unbiased, and predictions can be checked."""
    known: LengthMoments | None = None
    """Earlier length statistics of the prompt."""

    @property
    def generated(self) -> list[int]:
        return [num - old for num, old in zip(self.tokens, self.resumed or [0] * len(self.tokens), strict=True)]

    @property
    def has_length(self) -> bool:
        """True if any candidate ended by itself."""
        return any(num and end == "stop" for num, end in zip(self.tokens, self.ends, strict=True))

    def raced(self) -> RanGroup | None:
        """The group as a race would have left it, or None if a race would not have stopped any candidate.

        The race ends when `group_size` candidates have ended, or half of them if there are no more than that.
        """
        ended = sorted(num for num, end in zip(self.tokens, self.ends, strict=True) if end == "stop")
        wanted = self.group_size if len(self.tokens) > self.group_size else (len(self.tokens) + 1) // 2
        if not self.waited or not ended or len(ended) < wanted or any(end in STOP_STATES for end in self.ends):
            return None
        stop = ended[wanted - 1]
        if stop == max(self.tokens):
            return None
        ends: list[EndReason | StopState] = [
            "surplus" if num > stop else end for num, end in zip(self.tokens, self.ends, strict=True)
        ]
        return self._replace(tokens=[min(num, stop) for num in self.tokens], ends=ends)


class Lengths:
    """Length distribution of the candidates of these groups: a location for each group, and one curve around it."""

    def __init__(self, groups: Sequence[RanGroup]) -> None:
        """At least one candidate must have ended by itself."""
        logs = [
            sorted(
                (log_length(num), end != "stop")
                for num, end in zip(group.tokens, group.ends, strict=True)
                if num and end != "failed"
            )
            for group in groups
        ]
        points = [_points(each) for each in logs]
        squares = product = 0.0
        means = []
        for each in points:
            x, z = (fmean(values) for values in zip(*each, strict=True)) if each else (0.0, 0.0)
            squares += math.fsum((its.z - z) ** 2 for its in each)
            product += math.fsum((its.log - x) * (its.z - z) for its in each)
            means.append((x, z))
        self.std = bounded_log_std((product + PRIOR_ENDS * PRIOR_LOG_STD) / (squares + PRIOR_ENDS))
        found = [x - self.std * z for (x, z), each in zip(means, points, strict=True) if each]
        self.center = fmean(found)
        self.locations = [
            x - self.std * z if each else self._unseen(group)
            for group, (x, z), each in zip(groups, means, points, strict=True)
        ]
        self.curve = self._curve(logs)

    def remaining(self, group: int, num_tokens: int, max_tokens: int | None) -> float:
        """Expected remaining tokens of a candidate that has `num_tokens`."""
        most = math.inf if max_tokens is None else float(max_tokens - num_tokens)
        if most <= 0:
            return 0.0
        first, reach = self._beyond(group, num_tokens)
        if max_tokens is not None:
            beyond_cap, reach_cap = self._beyond(group, max_tokens)
            first += reach_cap / reach * (max_tokens - beyond_cap)
        return min(max(first - num_tokens, 1.0), most)

    def survival(self, group: int, num_tokens: float) -> float:
        """Share of candidates that become longer than `num_tokens`."""
        return self.curve.reach((math.log(max(num_tokens, 0.5)) - self.locations[group]) / STEP - LEFT)[2]

    def _beyond(self, group: int, num_tokens: int) -> tuple[float, float]:
        position = (log_length(num_tokens) - self.locations[group]) / STEP - LEFT
        scale = math.exp(self.locations[group])
        return max(self.curve.beyond(position)[0] * scale, float(num_tokens)), self.curve.reach(position)[2]

    def _unseen(self, group: RanGroup) -> float:
        """The location of a group in which no candidate ended by itself: its prompt's usual one, or else the others'
        mean.

        It is at least the location with an even chance that all candidates exceed their stops.
        """
        center, known = self.center, group.known
        if known is not None and known.mean > 0:
            center = math.log(known.mean) - math.log1p(known.variance / known.mean**2) / 2
        stops = [num for num in group.tokens if num]
        return max(center, fit_log_lengths([], stops, self.std).location) if stops else center

    def _curve(self, logs: Sequence[Sequence[tuple[float, bool]]]) -> SurvivalCurve:
        ends, risks, leaving = ([0.0] * NUM_BINS for _ in range(3))
        for each, location in zip(logs, self.locations, strict=True):
            for log, is_cut in each:
                position = (log - location) / STEP - LEFT
                bin_ = min(max(int(position), 0), NUM_BINS - 1)
                risks[bin_] += min(max(position - bin_, 0.0), 1.0)
                leaving[bin_] += 1
                if not is_cut:
                    ends[bin_] += 1
        num = sum(leaving)
        for bin_, gone in enumerate(accumulate(leaving)):
            risks[bin_] += num - gone
        return SurvivalCurve.near_log_normal(ends, risks, self.std, PRIOR_RISK)


class _Point(NamedTuple):
    log: float
    z: float
    """The quantile of a standard normal variable at the share of shorter lengths."""


def _points(logs: Sequence[tuple[float, bool]]) -> list[_Point]:
    """Ended candidates with quantiles of their Kaplan-Meier shares, ascending.

    If no candidate was cut, the i-th of n has the share (i - 3/8) / (n + 1/4). Its quantile is close to the expected
    one.

    Source: Blom, Statistical Estimates and Transformed Beta-Variables, 1958.
    """
    points = []
    reach = 1.0
    for rank, (log, is_cut) in enumerate(logs):
        if not is_cut:
            beyond = reach * (1 - 1 / (len(logs) - rank))
            share = 1 - (reach + beyond) / 2
            points.append(_Point(log, _quantile(round((share * len(logs) + 0.125) / (len(logs) + 0.25), 6))))
            reach = beyond
    return points


@lru_cache(4096)
def _quantile(share: float) -> float:
    return NORMAL.inv_cdf(min(max(share, 1e-6), 1 - 1e-6))


class _Stopped(NamedTuple):
    """Candidates of a group that were stopped at the same length in the same state."""

    group: int
    num_tokens: int
    state: EndReason | StopState
    num: int


class _Running(NamedTuple):
    """Stopped candidates, as if they had gone on."""

    group: int
    num: int
    now: float
    """Tokens that they would have at the end of the rollout."""
    most: float
    """Tokens from there to the longest length considered."""
    reach: float
    """Share of candidates that reach the length of their stop."""


def receipt_of(groups: Sequence[RanGroup], seconds: float | None = None) -> Receipt:
    """The receipt of a rollout. seconds: its duration. None: unknown."""
    stopped = [
        _Stopped(number, *alike, count)
        for number, group in enumerate(groups)
        for alike, count in Counter(zip(group.tokens, group.ends, strict=True)).items()
        if alike[1] in STOP_STATES
    ]
    timed = seconds is not None and all(group.started_s is not None and group.ended_s for group in groups)
    saved: list[float] | None = [] if not stopped else None
    ran = [RanCandidates(its.started_s or 0.0, its.ended_s, its.generated) for its in groups] if timed else []
    waiting_s = seconds if timed and not stopped else None
    if stopped and any(group.has_length for group in groups):
        lengths = Lengths(groups)
        saved = [
            its.num * lengths.remaining(its.group, its.num_tokens, groups[its.group].max_tokens) for its in stopped
        ]
        if timed and seconds is not None and (step_s := tail_step_s(ran)):
            cost = step_cost(ran, step_s)
            num_steps = _longer_steps(groups, stopped, lengths, step_s)
            waiting_s = seconds + cost.own_s * num_steps + cost.candidate_s * math.fsum(saved)
    generated, resumed = sum(sum(group.generated) for group in groups), sum(sum(group.resumed) for group in groups)
    returned = sum(group.tokens[index] for group in groups for index in group.selected)
    deferred = (
        [] if saved is None else [num for num, its in zip(saved, stopped, strict=True) if its.state == "deferred"]
    )
    return Receipt(
        seconds=seconds,
        generated_tokens=generated,
        returned_tokens=returned,
        wasted_tokens=generated + resumed - returned,
        resumed_tokens=resumed,
        num_stopped=sum(its.num for its in stopped),
        stopped_tokens=sum(its.num * its.num_tokens for its in stopped),
        saved_tokens=None if saved is None else round(math.fsum(saved)),
        postponed_tokens=None if saved is None else round(math.fsum(deferred)),
        **_checked(groups),
        waiting_seconds=waiting_s,
        saved_seconds=None if waiting_s is None or seconds is None else waiting_s - seconds,
        bubble=bubble(ran, seconds) if timed and seconds else None,
        queue_seconds=max((its.started_s for its in ran), default=0.0) if timed else None,
    )


def _checked(groups: Sequence[RanGroup]) -> dict[str, Any]:
    """Check the prediction: groups that ran to their ends are treated as if they had raced."""
    raced = [(group, group.raced()) for group in groups]
    left = [cut or group for group, cut in raced]
    if all(cut is None for _, cut in raced) or not any(group.has_length for group in left):
        return {"num_checked": 0, "checked_tokens": 0, "saved_tokens_error": None}
    lengths = Lengths(left)
    predicted, true = [], []
    for number, (group, cut) in enumerate(raced):
        for num, stop, end in zip(group.tokens, cut.tokens, cut.ends, strict=True) if cut else ():
            if end == "surplus":
                predicted.append(lengths.remaining(number, stop, group.max_tokens))
                true.append(num - stop)
    return {
        "num_checked": len(true),
        "checked_tokens": sum(true),
        "saved_tokens_error": math.fsum(predicted) / sum(true) - 1,
    }


def _longer_steps(groups: Sequence[RanGroup], stopped: Sequence[_Stopped], lengths: Lengths, step_s: float) -> float:
    """Expected steps from the last ending until the last of the stopped candidates would have ended too.

    Candidates go on from their stops, one token per step. The probability that all are over at step t is the product of
    their probabilities.
    """
    over_s = max(max(group.ended_s) for group in groups)
    running = []
    for its in stopped:
        group, location = groups[its.group], lengths.locations[its.group]
        alike = zip(group.ended_s, group.tokens, group.ends, strict=True)
        stopped_s = max(at for at, num, end in alike if (num, end) == (its.num_tokens, its.state))
        now = its.num_tokens + (over_s - stopped_s) / step_s
        most = group.max_tokens or max(math.exp(location + 4 * lengths.std), 2 * now)
        if most > now:
            running.append(_Running(its.group, its.num, now, most - now, lengths.survival(its.group, its.num_tokens)))
    furthest = max((its.most for its in running), default=0.0)
    steps = [furthest * (i / NUM_POINTS) ** 3 for i in range(NUM_POINTS + 1)]
    late = [0.0]  # probability that a candidate still runs, from the end backwards: there all are at their caps
    for step in reversed(steps):
        over = 1.0
        for each in running if late[-1] < 1 - NEGLIGIBLE else ():
            if each.most >= step:
                over *= (1 - min(lengths.survival(each.group, each.now + step) / each.reach, 1.0)) ** each.num
        late.append(1 - over if late[-1] < 1 - NEGLIGIBLE else 1.0)
    return math.fsum(
        (b - a) * (x + y) / 2 for (a, b), (x, y) in zip(pairwise(steps), pairwise(late[:0:-1]), strict=True)
    )
