"""Probabilities by their odds. Invariant: what lies in (0, 1) stays there."""

from __future__ import annotations

from math import exp


def with_odds_times(q: float, ratio: float) -> float:
    """The probability whose odds are `ratio` times those of q."""
    odds = q * ratio
    return odds / (odds + 1 - q)


def shifted(q: float, offset: float) -> float:
    """The probability whose logit is larger by `offset`."""
    return with_odds_times(q, exp(offset))
