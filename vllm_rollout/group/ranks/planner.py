"""Which tensor-parallel size the next round runs at: more devices per engine when rounds begin to preempt, fewer when
none does.

Invariant: what is decided depends on the rounds and their order only; under a load that repeats within
`MAX_QUIET_ROUNDS` rounds the size comes to rest. A longer period changes it again and again: after so many quiet rounds
nobody remembers why it grew.

Source: RollPacker section 4.2. What the paper leaves open is decided here:

- *The recent level* is the mean number of preemptions per candidate of the newest `LEVEL_ROUNDS` rounds that are
  comparable: of the same run and the same kind, since the size changed. Short rounds preempt up to 1.79 times as often
  as long ones (figure 7a), so a level over both would rise with every short round that follows a long one.
- *A rate of `HIGH_RATE`* is a rise whatever the level: the level follows a slow ramp, and is what a size has had ever
  since it was chosen.
- *At the start*, and after a halving, the level is zero: the size was chosen because nothing is preempted at it. A rise
  from zero is `MIN_RISE` preemptions per candidate.
- *After a doubling* the first round of a kind makes the level and is not judged: the larger size may preempt
  too, and a rise says that it has become too small. From the second on `HIGH_RATE` says it as well.
- *A size that preempted* is not returned to under as many tokens: each of the quiet rounds has to need `LEVEL_RISE`
  times less than the least that the smaller size has preempted under.
- *A size that would be slower* is not halved to, where that is known (`seconds_at`): fewer devices then make rounds
  longer, whether they preempt or not.
- *A halving that was undone* by a rise doubles how many quiet rounds the next one to that size takes, up to
  `MAX_QUIET_ROUNDS`: the four rounds had not seen what comes in a longer period.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from math import inf
from typing import Literal

from vllm_rollout.group.ranks.forecast import SLOWER
from vllm_rollout.group.rounds.rounds import RoundKind

LEVEL_RISE = 1.05
"""A round that preempts more than this many times the recent level doubles the size. Source: RollPacker section 4.2."""
QUIET_ROUNDS = 4
"""Rounds in a row without a preemption that halve the size. Source: RollPacker section 4.2 ("across four steps")."""
MAX_QUIET_ROUNDS = 64
"""However often a halving was undone."""
LEVEL_ROUNDS = 4
"""Newest comparable rounds whose mean is the level; as many as a period of RollPacker has short ones (figure 7)."""
MIN_RISE = 0.05
"""Preemptions per candidate by which a round must exceed the level: chance alone makes a few of a thousand candidates
wait, and a rebuild costs more than they do."""
HIGH_RATE = 0.2
"""Preemptions per candidate that are too many, usual or not: every fifth candidate is computed again."""

Reason = Literal[
    "start",
    "profile",
    "rise",
    "quiet",
    "steady",
    "settling",
    "at_largest",
    "at_smallest",
    "failed_before",
    "slower_below",
]
"""
start          no round was run, and nothing is known of what sizes cost
profile        no round was run: the size that is expected to be the best for the first run's rounds
rise           preemptions rose, or were `HIGH_RATE`: the next larger size
quiet          none in as many rounds as it takes: the next smaller size
steady         neither
settling       the first comparable round since the size grew
at_largest     the same, and there is no larger size
at_smallest    quiet, and there is no smaller size
failed_before  quiet, under as many tokens as the smaller size has preempted under
slower_below   quiet, and the round would have taken longer at the smaller size
"""


@dataclass(frozen=True, slots=True)
class RoundPressure:
    """What a round that is over asked of the KV cache."""

    run: str
    kind: RoundKind
    size: int
    """Tensor-parallel size that it ran at."""
    num_candidates: int
    """Those that ran in it, in any state."""
    num_preemptions: int
    """Preemptions of its candidates; one may be preempted several times."""
    kv_tokens: int
    """Prompt and output tokens of its longest candidates, as many of them as may run at once."""

    @property
    def rate(self) -> float:
        """Preemptions per candidate."""
        return self.num_preemptions / self.num_candidates


@dataclass(frozen=True, slots=True)
class ParallelismDecision:
    """The tensor-parallel size of the next round, and why."""

    size: int
    reason: Reason
    level: float
    """Preemptions per candidate that the newest round was compared with."""


@dataclass(frozen=True, slots=True)
class ParallelismPlanner:
    """The rule, for one machine and model.

    Args:
        allowed_sizes: powers of two, ascending: from the smallest that holds the model to the number of devices of one
            server (RollPacker keeps a tensor-parallel group within one), among those that divide the attention heads
            (`sizes_of`).
        start_size: the size of the first round, from the configuration or a profile.
    """

    allowed_sizes: tuple[int, ...]
    start_size: int

    def __post_init__(self) -> None:
        assert self.start_size in self.allowed_sizes, "what began is allowed"

    def next_size(
        self, history: Sequence[RoundPressure], seconds_at: Callable[[int], float] | None = None
    ) -> ParallelismDecision:
        """The size of the next round.

        Args:
            history: rounds that are over, the newest last, each with the size that it ran at. Where it begins the
                planner began.
            seconds_at: what the newest round would take at a size, where that is known.
        """
        if not history:
            return ParallelismDecision(self.start_size, "start", 0.0)
        newest = history[-1]
        assert newest.size in self.allowed_sizes, "rounds run at what was decided"
        stay = _since_change(history)
        before = history[: len(history) - len(stay)]
        alike = (past for past in stay[:-1] if (past.run, past.kind) == (newest.run, newest.kind))
        comparable = [past.rate for past in alike][-LEVEL_ROUNDS:]
        has_grown = bool(before) and before[-1].size < newest.size
        level = sum(comparable) / len(comparable) if comparable else 0.0

        if has_grown and not comparable and newest.num_preemptions:
            return ParallelismDecision(newest.size, "settling", newest.rate)
        has_risen = newest.rate > LEVEL_RISE * level and newest.rate - level >= MIN_RISE
        if has_risen or newest.rate >= HIGH_RATE:
            return self._grown(newest.size, level)
        decision = self._quiet(newest.size, level, stay, history)
        if decision.size == newest.size or seconds_at is None:
            return decision
        is_slower = seconds_at(decision.size) > SLOWER * seconds_at(newest.size)
        return ParallelismDecision(newest.size, "slower_below", level) if is_slower else decision

    def _grown(self, size: int, level: float) -> ParallelismDecision:
        larger = next((allowed for allowed in self.allowed_sizes if allowed > size), None)
        return ParallelismDecision(larger or size, "rise" if larger else "at_largest", level)

    def _quiet(
        self, size: int, level: float, stay: Sequence[RoundPressure], history: Sequence[RoundPressure]
    ) -> ParallelismDecision:
        """Halve, when the rounds at this size have been quiet for long enough."""
        smaller = [allowed for allowed in self.allowed_sizes if allowed < size][-1:]
        num_quiet = _num_quiet_rounds(smaller[0], history) if smaller else QUIET_ROUNDS
        quiet = stay[-num_quiet:]
        if len(quiet) < num_quiet or any(past.num_preemptions for past in quiet):
            return ParallelismDecision(size, "steady", level)
        if not smaller:
            return ParallelismDecision(size, "at_smallest", level)
        needed = max(past.kv_tokens for past in quiet)
        failed_under = (past.kv_tokens for past in history if past.size <= smaller[0] and past.rate >= MIN_RISE)
        if needed * LEVEL_RISE >= min(failed_under, default=inf):
            return ParallelismDecision(size, "failed_before", level)
        return ParallelismDecision(smaller[0], "quiet", level)


def sizes_of(num_devices: int, num_heads: int) -> tuple[int, ...]:
    """Tensor-parallel sizes a model can have: powers of two that divide its attention heads.

    Args:
        num_devices: of one server; the largest size.
        num_heads: attention heads of the model.
    """
    powers = (1 << exponent for exponent in range(num_devices.bit_length()))
    return tuple(size for size in powers if size <= num_devices and num_heads % size == 0)


def _num_quiet_rounds(smaller: int, history: Sequence[RoundPressure]) -> int:
    """Quiet rounds that a halving to a size takes: twice as many for each one that was undone."""
    ladder = [size for size, _ in groupby(past.size for past in history)]
    visits = zip(ladder, ladder[1:], ladder[2:], strict=False)
    num_undone = sum(here == smaller and before > here and after > here for before, here, after in visits)
    return min(QUIET_ROUNDS << num_undone, MAX_QUIET_ROUNDS)


def _since_change(history: Sequence[RoundPressure]) -> Sequence[RoundPressure]:
    """The newest rounds, which all ran at one size."""
    size = history[-1].size
    num = sum(1 for _ in takewhile(lambda past: past.size == size, reversed(history)))
    return history[len(history) - num :]
