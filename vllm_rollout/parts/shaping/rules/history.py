"""Moving averages of the mean and variance of lengths, per prompt and over the whole data set.

A prompt's moments are those within its groups: they say how much redundancy it deserves. The data set's moments are
those of all lengths, within and between prompts. Censored lengths count as `parts/shaping/rules/shape.py` expects them.

Averages are exponential. The newest of n groups weighs more while n is small, so that weights always sum to 1.

Invariant: a history depends only on the observed groups and their order, and is always finite. A restored history goes
on as the saved one, except that its trust starts again.

Source: DARTS 4.2.2 and Appendix B. The treatment of censored lengths is ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from vllm_rollout.checks import MAX_COUNT, fields_of, integer, listed, number, shown, text
from vllm_rollout.config import HISTORY_KEY_CHARS
from vllm_rollout.kernel.rules.keys import Key
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.memories.rules import MAX_HISTORY_PROMPTS, PROMPTS_PER_ROW, Row, rows_in_parts
from vllm_rollout.parts.shaping.rules.censoring import (
    LOG_STD_PRIOR_WEIGHT,
    GroupMoments,
    bounded_log_std,
    group_moments,
)
from vllm_rollout.parts.shaping.rules.life_table import PRIOR_LOG_STD
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, LengthStatistics
from vllm_rollout.parts.shaping.rules.shape import LengthShape
from vllm_rollout.parts.shaping.rules.trust import HistoryTrust

HISTORY_PROMPT_WEIGHT = 0.5
"""Weight of the newest group in a prompt's moving averages.

A prompt comes back once per epoch. One group of 8 determines its standard deviation to about 40 %, three groups, the
span of this average, to 25 %. Older epochs had another policy.
"""
HISTORY_DATASET_HALF_LIFE = 512
"""Groups after which the weight of a group in the data set's averages has halved: a few training steps, and some
6,000 lengths."""
DATASET_DECAY = 0.5 ** (1 / HISTORY_DATASET_HALF_LIFE)
MAX_MEAN = 1e15
"""Largest mean of a state, in tokens. No fit of lengths up to 2**31 comes near it."""
MAX_VARIANCE = 1e36
"""Largest variance of a state. No average of accepted values exceeds it."""
TOTALS = ("dataset", "log_lengths", "shape")
"""Fields of a state beside the prompts."""


class ObservedLength(NamedTuple):
    """Output tokens of one candidate."""

    num_tokens: int
    censored: bool
    """True if the candidate was cut or stopped, so that its real length is larger."""


def observed_lengths(endings: Iterable[Ending]) -> list[ObservedLength]:
    """Lengths of a group that is over. Cut and stopped candidates are censored, failed ones are left out.

    A surplus candidate that ended by itself, too late to count, has its real length.
    """
    return [
        ObservedLength(ending.num_tokens, censored=not (ending.valid or ending.ended_by_itself))
        for ending in endings
        if ending.state != "failed" and ending.num_tokens
    ]


class LengthHistory:
    """Moving averages of lengths. The prompts seen longest ago are forgotten first.

    Rows of its state (`parts/memories/rules.py`):

        ["prompts", [[key, *average], ...]]              `PROMPTS_PER_ROW` at a time
        ["lengths", {dataset, log_lengths, shape}]       once, last: rows that were cut off lack it
    """

    KINDS: ClassVar[Collection[str]] = ("prompts", "lengths")

    def __init__(self, max_prompts: int = MAX_HISTORY_PROMPTS) -> None:
        assert max_prompts >= 1, "the prompt just seen is always remembered"
        self._max_prompts = max_prompts
        self._prompts: dict[str, tuple[Any, ...]] = {}
        """Average of each prompt, the last seen last. Plain tuples of numbers keep the garbage collector fast."""
        self._dataset: _Average | None = None
        self._shape = LengthShape(DATASET_DECAY)
        self._trust = HistoryTrust()
        """Measured reliability of the history. It is not part of a state."""
        self._log_squares = 0.0
        self._log_freedom = 0.0
        """Decaying sums over groups. Their ratio is the data set's log variance within groups."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, key: str) -> bool:
        return key in self._prompts

    def observe(self, key: str, lengths: Sequence[ObservedLength]) -> None:
        """Add one group that is over: the lengths of its candidates without the failed ones. Ignored if there are none.

        Raises: ValueError for a key that is empty or too long.
        """
        _checked_key(key)
        if not lengths:
            return
        finished = [num_tokens for num_tokens, censored in lengths if not censored]
        stops = [num_tokens for num_tokens, censored in lengths if censored]
        log_std = self.log_std()
        group = group_moments(finished, stops, log_std)
        shaped = self._shape.observe(finished, stops, log_std)
        if shaped is not None:
            fitted = group.variance
            if fitted is not None and shaped.variance is not None:
                fitted = self._shape.variance_of_prompt(shaped.variance, fitted)
            group = group._replace(mean=shaped.mean, variance=fitted, spread=shaped.spread)
        self._log_squares = DATASET_DECAY * self._log_squares + group.log_squares
        self._log_freedom = DATASET_DECAY * self._log_freedom + group.log_freedom
        self._dataset = _total(self._dataset, group)
        known = self.of(key)
        if known is not None and known.mean > 0 < group.mean:
            self._trust.observe(known.mean, group.mean)
        self._prompts[key] = tuple(_within(self._prompts.pop(key, UNSEEN), group))
        if len(self._prompts) > self._max_prompts:
            del self._prompts[next(iter(self._prompts))]

    def of(self, key: str) -> LengthMoments | None:
        """Mean and variance within groups of this prompt. None until a group of at least two lengths was seen."""
        num_groups, mean, num_variances, variance = self._prompts.get(key, UNSEEN)
        return LengthMoments(mean, variance, num_groups) if num_variances else None

    @property
    def mean(self) -> float | None:
        """The mean of all lengths. None before any was seen."""
        return None if self._dataset is None else self._dataset.mean

    def statistics(self, keys: Iterable[str]) -> LengthStatistics:
        """Length statistics of these prompts, and of the data set."""
        return LengthStatistics(self.dataset(), [self.of(key) for key in keys], self._trust.slope)

    def dataset(self) -> LengthMoments | None:
        """Mean and total variance of lengths, within and between prompts, so that std / mean is rho of DARTS Eq. 7.

        Includes the distribution, unless most of the groups come from a version that did not keep it.
        """
        if self._dataset is None:
            return None
        num_groups, mean, _, variance = self._dataset
        whole = self._shape.num_groups >= min(num_groups, HISTORY_DATASET_HALF_LIFE)
        return LengthMoments(mean, variance, num_groups, self._shape.shares() if whole else ())

    def log_std(self) -> float:
        """Standard deviation of log lengths within groups, over the data set. It is the prior of fits and of the
        form."""
        squares = LOG_STD_PRIOR_WEIGHT * PRIOR_LOG_STD**2 + self._log_squares
        return bounded_log_std(math.sqrt(squares / (LOG_STD_PRIOR_WEIGHT + self._log_freedom)))

    def to_state(self) -> dict[str, Any]:
        """JSON-able state. Prompts are ordered from the one seen longest ago to the last seen."""
        return {"prompts": [row for rows in self.prompts(len(self) or 1) for row in rows], **self.totals()}

    def prompts(self, size: int) -> Iterator[list[list[Any]]]:
        """The state's prompts (`rows_in_parts`). With `totals` taken afterwards they form a state for `from_state`."""
        return rows_in_parts(self._prompts, size)

    def totals(self) -> dict[str, Any]:
        """The state's fields without the prompts."""
        return {
            "dataset": None if (seen := self._dataset) is None else [seen.num_groups, seen.mean, seen.variance],
            "log_lengths": [self._log_squares, self._log_freedom],
            "shape": self._shape.to_state(),
        }

    def to_rows(self) -> Iterator[Row]:
        for prompts in self.prompts(PROMPTS_PER_ROW):
            yield ["prompts", prompts]
        yield ["lengths", self.totals()]

    @classmethod
    def from_rows(cls, rows: Iterable[Any]) -> LengthHistory:
        """Restore a history. Without any row it is empty. Raises: ValueError for rows that no history can have."""
        prompts: list[Any] = []
        totals: Mapping[str, Any] | None = None
        row: Any = None
        for row in rows:
            if totals is not None:
                raise ValueError(f"row 'lengths' of a state must be the last one, then came {shown(row)}")
            match row:
                case ["prompts", list(some)]:
                    prompts += some
                    listed(prompts, "prompts of a length history", MAX_HISTORY_PROMPTS)
                case ["lengths", state]:
                    totals = fields_of(state, TOTALS, "row 'lengths' of a state")
                case _:
                    raise ValueError(f"a row of a state is of a known kind and form, got {shown(row)}")
        if totals is None and row is not None:
            raise ValueError("a state ends with the row 'lengths', but there is none: was it cut off?")
        return cls() if totals is None else cls.from_state({"prompts": prompts, **totals})

    @classmethod
    def from_state(cls, state: Mapping[str, Any], max_prompts: int = MAX_HISTORY_PROMPTS) -> LengthHistory:
        """Restore a history. Raises: ValueError for a state that no history can have."""
        fields_of(state, ("prompts", *TOTALS), "a length history")
        history = cls(max_prompts)
        history._shape = LengthShape.from_state(state["shape"], DATASET_DECAY)
        prompts = listed(state["prompts"], "prompts of a length history")
        if len(prompts) > max_prompts:
            raise ValueError(f"a length history has at most {max_prompts} prompts, got {len(prompts)}")
        for i, entry in enumerate(prompts):
            where = f"prompts[{i}] of a length history"
            key, *numbers = listed(entry, where, length=1 + len(_Average._fields))
            _checked_key(key)
            if key in history._prompts:
                raise ValueError(f"{where}: {key!r} comes twice")
            history._prompts[key] = tuple(_Average.from_state(numbers, where))
        if state["dataset"] is not None:
            where = "dataset of a length history"
            num_groups, mean, variance = listed(state["dataset"], where, length=3)
            history._dataset = _Average.from_state([num_groups, mean, num_groups, variance], where)
        known = history._dataset.num_groups if history._dataset else 0
        needed = sum(num_groups for num_groups, *_ in history._prompts.values())
        if needed > known != MAX_COUNT:  # counts end at MAX_COUNT
            raise ValueError(f"the prompts of a length history have seen {needed} groups, but the data set {known}")
        where = "log_lengths of a length history"
        squares, freedom = (number(x, where, 0, MAX_VARIANCE) for x in listed(state["log_lengths"], where, length=2))
        if (squares and not freedom) or (freedom and not known):
            raise ValueError(f"{where}: a sum without a group it could come from")
        history._log_squares, history._log_freedom = squares, freedom
        return history


class _Average(NamedTuple):
    """Exponential averages. A group of one length has a mean and no variance."""

    num_groups: int
    mean: float
    num_variances: int
    variance: float

    @classmethod
    def from_state(cls, numbers: Sequence[Any], where: str) -> _Average:
        num_groups, mean, num_variances, variance = numbers
        average = cls(
            integer(num_groups, where, 1),
            number(mean, where, 0, MAX_MEAN),
            integer(num_variances, where),
            number(variance, where, 0, MAX_VARIANCE),
        )
        if num_variances > num_groups or (not num_variances and variance):
            raise ValueError(f"{where}: a variance without a group it could come from")
        return average


UNSEEN = _Average(0, 0.0, 0, 0.0)


def _within(old: tuple[Any, ...], group: GroupMoments) -> _Average:
    num_groups, mean, num_variances, variance = old
    mean += _weight(HISTORY_PROMPT_WEIGHT, num_groups + 1) * (group.mean - mean)
    if group.variance is not None:
        num_variances = min(num_variances + 1, MAX_COUNT)
        share = _weight(HISTORY_PROMPT_WEIGHT, num_variances)
        variance = (1 - share) * variance + share * group.variance
    return _Average(min(num_groups + 1, MAX_COUNT), mean, num_variances, variance)


def _total(old: _Average | None, group: GroupMoments) -> _Average:
    """Averages of first and second moments, kept as mean and variance to avoid differences of large numbers."""
    num_groups, mean, _, variance = old or UNSEEN
    share = _weight(1 - DATASET_DECAY, num_groups + 1)
    step = group.mean - mean
    variance = (1 - share) * (variance + share * step**2) + share * group.spread
    num_groups = min(num_groups + 1, MAX_COUNT)
    return _Average(num_groups, mean + share * step, num_groups, variance)


def _weight(newest: float, num: int) -> float:
    """Weight of the newest of `num` values, so that the weights of all of them sum to 1."""
    return 1.0 if num == 1 else newest / -math.expm1(num * math.log1p(-newest))


def _checked_key(key: Any) -> str:
    return text(key, "the key of a prompt", HISTORY_KEY_CHARS)


LENGTHS: Key[LengthHistory] = Key("shaping")
"""Key of this section in a memory."""
