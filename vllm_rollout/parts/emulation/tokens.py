"""Made-up tokens.

Invariant: a token follows from the candidate and its position, so that a preempted candidate says the same again. Only
the token that shall end a sequence ends it.

The token before the last one is even if the candidate has succeeded (`succeeded`). In a turn that asks for a tool, the
marker of the device's file stands there instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

PERIOD = 4096
"""Largest number of different tokens."""
STRIDE = 7919
"""Distance from a token to the next, so that neighbours are not neighbours in the vocabulary."""


def succeeded(token_ids: Sequence[int]) -> bool:
    """True if a candidate that ended by itself has succeeded, judged by its output tokens."""
    return len(token_ids) > 1 and token_ids[-2] % 2 == 0


class Vocabulary:
    """Tokens that candidates may say. `stops` are not among them."""

    def __init__(self, size: int, stops: Collection[int]) -> None:
        """Raises: ValueError when nothing is left of one parity."""
        tokens = [token for token in range(size - 1, -1, -1) if token not in stops][:PERIOD]
        self.even = [token for token in tokens if token % 2 == 0]
        self.odd = [token for token in tokens if token % 2]
        if not self.even or not self.odd:
            raise ValueError(f"an emulated device needs 2 tokens that end nothing, the model has {len(tokens)} of them")
        self.cycle = [tokens[STRIDE * position % len(tokens)] for position in range(PERIOD)]
        """Output tokens: token n, counted from 1, is number (salt + n) modulo `PERIOD` of these. A list and no method,
        because it is read for every token of a step."""

    def verdict(self, salt: int, succeeds: bool) -> int:
        """The last but one token of a candidate, which encodes whether it succeeds."""
        tokens = self.even if succeeds else self.odd
        return tokens[salt % len(tokens)]
