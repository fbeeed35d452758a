"""Estimates the requests on each rank that this process did not place there, from counts that come late.

Invariant: no estimate differs from the last count by more than the recent change of this process's candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

LATE_S = 0.3
"""Largest age of a count, in seconds: vLLM's coordinator publishes every 0.1 s what engine cores report per step.

With longer steps, counts of other requests are wrong for as long as a step takes.
"""


class OtherRequests:
    """Number of requests on each rank that this process did not place: ordinary ones, and those of other processes.

    They are estimated from earlier counts of all requests on each rank. Such a count may or may not contain candidates
    that this process placed or removed shortly before. So only a range is known: the count less the most, and less the
    fewest, candidates that this process had there lately. Within the range, the earlier estimate is kept. A correct
    estimate therefore stays correct while the other requests stay the same. No estimate differs from the last count by
    more than the recent change of this process's candidates.
    """

    def __init__(self, num_ranks: int) -> None:
        self.numbers = [0] * num_ranks
        """The estimate for each rank."""
        self._since_s = -float("inf")
        """Start of `_lately`, in seconds."""
        self._lately: list[tuple[int, int]] = [(0, 0)] * num_ranks
        """(fewest, most) own candidates on each rank during the present period. A period is the largest age of a
        count."""
        self._before: list[tuple[int, int]] = self._lately
        """(fewest, most) own candidates on each rank during the previous period."""

    def look(self, counts: Sequence[int], own: Sequence[int], now_s: float) -> Sequence[int]:
        """Update the estimate. Call it before the estimate is read, and before `own` changes.

        counts: all requests on each rank. own: candidates of this process on each rank. Returns `numbers`.
        """
        age_s = now_s - self._since_s
        now = [(num, num) for num in own]
        if age_s >= LATE_S:
            self._before = self._lately if age_s < 2 * LATE_S else now
            self._lately, self._since_s = now, now_s
        else:
            self._lately = [
                (min(least, num), max(most, num)) for (least, most), (num, _) in zip(self._lately, now, strict=True)
            ]
        ranges = zip(self.numbers, counts, self._lately, self._before, strict=True)
        self.numbers = [
            max(0, count - max(a[1], b[1]), min(number, count - min(a[0], b[0]))) for number, count, a, b in ranges
        ]
        return self.numbers
