"""Chooses the tensor-parallel size of the next round: more devices per engine if rounds preempt, fewer if none does.

Invariant: decisions depend only on the rounds and their order. Under a load that repeats within `MAX_QUIET_ROUNDS`
rounds the size comes to rest. Under a longer period it changes again and again.

Source: RollPacker section 4.2. Choices that the paper leaves open:

- *The recent level* is the mean number of preemptions per candidate of the newest `LEVEL_ROUNDS` comparable rounds.
  These are of the same run and kind, since the size changed. Short rounds preempt up to 1.79 times as often as long
  ones (figure 7a). A level over both kinds would rise with every short round that follows a long one.
- *A rate of `HIGH_RATE`* is a rise at any level. The level follows a slow ramp, and includes every rate since the size
  was chosen.
- *At the start*, and after a halving, the level is zero, because the size was chosen for rounds without preemptions. A
  rise from zero is `MIN_RISE` preemptions per candidate.
- *After a doubling* the first round of a kind sets the level and is not judged: the larger size may preempt too. A
  later rise means that it has become too small. From the second round on, `HIGH_RATE` is a rise as well.
- *A size that preempted* is not chosen again for as many tokens. Each quiet round has to need `LEVEL_RISE` times fewer
  tokens than the smallest round in which the smaller size preempted.
- *A size that would be slower* is not chosen, if its time is known (`seconds_at`). Fewer devices then make rounds
  longer, with or without preemptions.
- *A halving that was undone* by a rise doubles the number of quiet rounds before the next one to that size, up to
  `MAX_QUIET_ROUNDS`. The four rounds were too few for the period of the load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from math import inf
from typing import Literal

from vllm_rollout.parts.rounds.rules.fields import RoundKind

SizeReason = Literal[
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
"""Reason for the tensor-parallel size of the next round.

start          no round was run, and the costs of sizes are unknown
profile        no round was run: the size with the best forecast for the first run's rounds
rise           preemptions rose, or reached the rate that is too high: the next larger size
quiet          enough rounds without preemptions: the next smaller size
steady         neither rise nor quiet
settling       the first comparable round since the size grew
at_largest     a rise, and there is no larger size
at_smallest    quiet, and there is no smaller size
failed_before  quiet, with as many tokens as a round in which the smaller size preempted
slower_below   quiet, and the round would have taken longer at the smaller size
"""

LEVEL_RISE = 1.05
"""A round that preempts more than this many times the recent level doubles the size. Source: RollPacker section 4.2."""
QUIET_ROUNDS = 4
"""Rounds in a row without a preemption that halve the size. Source: RollPacker section 4.2 ("across four steps")."""
MAX_QUIET_ROUNDS = 64
"""Most quiet rounds before a halving, even if many halvings were undone."""
SLOWER = 1.05
"""Times within this ratio count as equal: profiles predict rollouts with a median error of 1.3 %, at most 6.7 %
(docs/results.md). The smallest of equal sizes is taken."""
LEVEL_ROUNDS = 4
"""Newest comparable rounds whose mean is the level: as many as RollPacker's period has short ones (figure 7)."""
MIN_RISE = 0.05
"""Preemptions per candidate by which a round must exceed the level. By chance, a few of a thousand candidates wait,
and a rebuild costs more than these waits."""
HIGH_RATE = 0.2
"""Preemptions per candidate that are too many at any level: every fifth candidate is computed again."""


@dataclass(frozen=True, slots=True)
class RoundPressure:
    """Load of a finished round on the KV cache."""

    run: str
    kind: RoundKind
    size: int
    """Tensor-parallel size of the round."""
    num_candidates: int
    """Number of candidates that ran in the round, in any end state."""
    num_preemptions: int
    """Number of preemptions of its candidates. One may be preempted several times."""
    kv_tokens: int
    """Prompt and output tokens of its longest candidates, as many of them as may run at once."""

    @property
    def rate(self) -> float:
        """Preemptions per candidate."""
        return self.num_preemptions / self.num_candidates


@dataclass(frozen=True, slots=True)
class ParallelismDecision:
    """The tensor-parallel size of the next round, with the reason."""

    size: int
    reason: SizeReason
    level: float
    """Preemptions per candidate that the newest round was compared with."""


@dataclass(frozen=True, slots=True)
class ParallelismPlanner:
    """The rule, for one machine and model.

    Args:
        allowed_sizes: powers of two, ascending, that divide the attention heads (`sizes_of`). The smallest holds the
            model, the largest is the number of devices of one server, as in RollPacker.
        start_size: the size of the first round, from the configuration or a profile.
    """

    allowed_sizes: tuple[int, ...]
    start_size: int

    def __post_init__(self) -> None:
        assert self.start_size in self.allowed_sizes, "what began is allowed"

    def next_size(
        self, history: Sequence[RoundPressure], seconds_at: Callable[[int], float] | None = None
    ) -> ParallelismDecision:
        """Choose the size of the next round.

        Args:
            history: finished rounds, the newest last, each with the size that it ran at. The planner starts with the
                first of them.
            seconds_at: time of the newest round at a size, in seconds. None: unknown.
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
        """Halve the size when enough rounds at this size have been quiet."""
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
    """Tensor-parallel sizes that a model can have: powers of two that divide its attention heads.

    Args:
        num_devices: of one server, which is the largest size.
        num_heads: attention heads of the model.
    """
    powers = (1 << exponent for exponent in range(num_devices.bit_length()))
    return tuple(size for size in powers if size <= num_devices and num_heads % size == 0)


def _num_quiet_rounds(smaller: int, history: Sequence[RoundPressure]) -> int:
    """Quiet rounds before a halving to this size: twice as many for each earlier one that was undone."""
    ladder = [size for size, _ in groupby(past.size for past in history)]
    visits = zip(ladder, ladder[1:], ladder[2:], strict=False)
    num_undone = sum(here == smaller and before > here and after > here for before, here, after in visits)
    return min(QUIET_ROUNDS << num_undone, MAX_QUIET_ROUNDS)


def _since_change(history: Sequence[RoundPressure]) -> Sequence[RoundPressure]:
    """The newest rounds, which all ran at one size."""
    size = history[-1].size
    num = sum(1 for _ in takewhile(lambda past: past.size == size, reversed(history)))
    return history[len(history) - num :]
