"""Time limits for the grading of each test case, from the durations of correct runs.

Invariant: a limit that is remembered never falls, and lies between the shortest and the longest that the terms allow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from vllm_rollout.checks import number, shown
from vllm_rollout.config import MAX_REWARD_S

MAX_FACTOR = 1000.0


@dataclass(frozen=True, slots=True)
class LimitTerms:
    """Bounds of every limit, in seconds. Source: RollPacker 4.3, which sets them to 1.5, 2 s and 30 s."""

    factor: float = 1.5
    """Limit as a multiple of the longest correct run."""
    shortest_s: float = 2.0
    longest_s: float = 30.0
    """Also the limit of a test case without a correct run."""

    def __post_init__(self) -> None:
        number(self.factor, "factor", 1, MAX_FACTOR)
        for name in ("shortest_s", "longest_s"):
            number(getattr(self, name), name, 0, MAX_REWARD_S, above=True)
        if self.shortest_s > self.longest_s:
            raise ValueError(f"shortest_s ({self.shortest_s:g}) must not be above longest_s ({self.longest_s:g}).")


class LimitSummary(NamedTuple):
    """Statistics of the limits."""

    num_cases: int
    median_s: float | None
    """None without a test case."""
    largest_s: float | None


class TimeLimits:
    """Limits by test case. A test case is any string that names a prompt and a test of it.

    Beyond `max_cases`, the least recently used ones are forgotten. They start again at the longest limit.
    """

    def __init__(self, terms: LimitTerms | None = None, max_cases: int = 65_536) -> None:
        self.terms = terms or LimitTerms()
        self.max_cases = max_cases
        self._anchors: OrderedDict[str, float] = OrderedDict()

    def limit_s(self, case: str) -> float:
        """min(max(T_min, 1.5 T_anchor), T_max), or T_max without an anchor. Source: RollPacker 4.3."""
        anchor_s = self._anchors.get(case)
        if anchor_s is None:
            return self.terms.longest_s
        self._anchors.move_to_end(case)
        return self._from_anchor(anchor_s)

    def observe(self, case: str, seconds: float, *, is_correct: bool) -> None:
        """Record the duration of a run of the test case. Only correct runs count: a wrong one may have given up
        early."""
        if not is_correct:
            return
        self._anchors[case] = max(seconds, self._anchors.get(case, 0.0))
        self._anchors.move_to_end(case)
        if len(self._anchors) > self.max_cases:
            self._anchors.popitem(last=False)

    def summary(self) -> LimitSummary:
        """Statistics of all limits. Takes 20 ms for 65,536 test cases, the time to sort them."""
        anchors = self._anchors.values()
        if not anchors:
            return LimitSummary(0, None, None)
        return LimitSummary(len(anchors), self._from_anchor(median_low(anchors)), self._from_anchor(max(anchors)))

    def export(self) -> dict[str, float]:
        """The anchors in seconds by test case, the least recently used first."""
        return dict(self._anchors)

    def restore(self, anchors: Mapping[str, float]) -> None:
        """Replace all anchors by those of `export`. Raises: ValueError for an anchor that is no number of seconds."""
        for case, seconds in anchors.items():
            number(seconds, f"the anchor of {shown(case)}", 0, MAX_REWARD_S)
        self._anchors = OrderedDict(list(anchors.items())[-self.max_cases :])

    def _from_anchor(self, anchor_s: float) -> float:
        return min(max(self.terms.shortest_s, self.terms.factor * anchor_s), self.terms.longest_s)
