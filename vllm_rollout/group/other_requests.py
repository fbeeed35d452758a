"""Counts of all requests on each rank, some time ago -> how many of them were not placed here.

They are ordinary requests, and what other processes have sent. A count may or may not have in it what was placed here,
or has left, since shortly before; so all that is known is a range, from the count less the most that this process had
there lately to the count less the least. Within it what was known before stands.

Invariant: as long as the others stay the same, an estimate that is right stays right, whatever is placed here
meanwhile; and none is further from what the last count has of others than what was placed here has changed lately.
"""

from __future__ import annotations

from collections.abc import Sequence

LATE_S = 0.3
"""How late a count may be: vLLM's coordinator publishes every 0.1 s what an engine core tells after each of its steps.
With longer steps the others look like fewer or more for as long as a step takes."""


class OtherRequests:
    """Requests on each rank that were not placed by this process."""

    def __init__(self, num_ranks: int, late_s: float = LATE_S) -> None:
        self.numbers = [0] * num_ranks
        """As estimated."""
        self._late_s = late_s
        self._since_s = -float("inf")
        """When `_lately` began."""
        self._lately: list[tuple[int, int]] = [(0, 0)] * num_ranks
        """Least and most own candidates on each rank, in a time that is as long as a count may be late."""
        self._before: list[tuple[int, int]] = self._lately
        """In the one before."""

    def look(self, counts: Sequence[int], own: Sequence[int], now_s: float) -> Sequence[int]:
        """Before `own`, the candidates of this process on each rank, changes; and whenever the estimate is needed.

        counts: of all requests on each rank. Returns `numbers`.
        """
        age_s = now_s - self._since_s
        now = [(num, num) for num in own]
        if age_s >= self._late_s:
            self._before = self._lately if age_s < 2 * self._late_s else now
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
