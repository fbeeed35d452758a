"""Cost of rollouts, and savings by stopped candidates: the values, and their sums. Parts say what they are.

Invariants: generated + resumed = returned + wasted tokens. Unknown values are None, and count as nothing in a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Receipt:
    """Cost and savings of a rollout, or the sum of several. Tokens are output tokens. None: unknown."""

    seconds: float | None = None
    generated_tokens: int = 0
    returned_tokens: int = 0
    wasted_tokens: int = 0
    resumed_tokens: int = 0
    num_stopped: int = 0
    stopped_tokens: int = 0
    """Tokens that stopped candidates had generated."""
    saved_tokens: int | None = None
    """Predicted: tokens that stopped candidates would still have generated."""
    postponed_tokens: int | None = None
    """Part of `saved_tokens` that deferred candidates account for: a later round generates these, or the prompt
    again."""
    num_checked: int = 0
    """Number of candidates whose prediction could be compared with the truth."""
    checked_tokens: int = 0
    """Tokens that the checked candidates generated after the point of a stop."""
    saved_tokens_error: float | None = None
    """Error of the prediction for all checked candidates, relative to `checked_tokens`. 0.1: a tenth too many."""
    waiting_seconds: float | None = None
    """Predicted seconds of a rollout that waits for all. A lower bound if candidates had to wait for places."""
    saved_seconds: float | None = None
    bubble: float | None = None
    """Share of places x time that stood empty, with a place for each candidate of the largest number that ran at
    once."""
    queue_seconds: float | None = None
    """Seconds until the last group was sent to the engine. Until then groups waited for places."""

    @property
    def repaying(self) -> Receipt:
        """The receipt of a long round, as it counts in the sum of its run.

        If the short rounds had waited for all candidates, a long round would have had no work. So its cost is
        subtracted from their savings.
        """
        generated = self.generated_tokens - (self.saved_tokens or 0)
        seconds = None if self.seconds is None else -self.seconds
        waiting_s = None if seconds is None else 0.0
        return replace(
            self, saved_tokens=-generated, postponed_tokens=0, waiting_seconds=waiting_s, saved_seconds=seconds
        )

    def __add__(self, other: Receipt) -> Receipt:
        """The sum of two receipts. A value that is None in one of them counts as 0."""

        def added(name: str) -> Any:
            values = [value for value in (getattr(self, name), getattr(other, name)) if value is not None]
            return sum(values) if values else None

        both = {name: added(name) for name in ADDED}
        waiting = [its.seconds if its.waiting_seconds is None else its.waiting_seconds for its in (self, other)]
        known = [seconds for seconds in waiting if seconds is not None]
        is_told = (self.waiting_seconds, other.waiting_seconds) != (None, None)
        return Receipt(
            **both,
            waiting_seconds=math.fsum(known) if is_told else None,
            saved_tokens_error=_mean(
                (self.saved_tokens_error, self.checked_tokens), (other.saved_tokens_error, other.checked_tokens)
            ),
            bubble=_mean((self.bubble, self.seconds), (other.bubble, other.seconds)),
        )


ADDED = (
    *("seconds", "generated_tokens", "returned_tokens", "wasted_tokens", "resumed_tokens", "num_stopped"),
    *("stopped_tokens", "saved_tokens", "postponed_tokens", "num_checked", "checked_tokens", "saved_seconds"),
    "queue_seconds",
)


def _mean(*weighted: tuple[float | None, float | None]) -> float | None:
    known = [(value, weight) for value, weight in weighted if value is not None and weight]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None
