"""Tokens that a step has sampled: one per request, or several where drafts were verified.

Invariant: a rejected draft token never leaves this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class SeenTokens(NamedTuple):
    """The tokens that a step's candidates have sampled, all first tokens before all second ones."""

    rows: np.ndarray
    """int64 [num_seen]: whose, as a row of the batch."""
    tokens: np.ndarray
    """int64 [num_seen]: 0 for the first of the step."""
    logit_rows: np.ndarray
    """int64 [num_seen]: the row of the logits and the hidden states from which each was sampled."""

    @classmethod
    def one_of_each(cls, rows: np.ndarray) -> SeenTokens:
        """Rows of a step whose logits have one row per request."""
        return cls(rows, np.zeros_like(rows), rows)

    def some(self, places: np.ndarray) -> SeenTokens:
        return SeenTokens(self.rows[places], self.tokens[places], self.logit_rows[places])

    @property
    def of_each_token(self) -> list[slice]:
        """The places of first tokens, of second ones, and so on: in each a request is found once."""
        ends = np.searchsorted(self.tokens, np.arange(int(self.tokens[-1]) + 1), side="right").tolist()
        return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """Outcome of the drafts of a step."""

    num_drafted: np.ndarray
    """int64 [num_rows]."""
    num_sampled: np.ndarray
    """int64 [num_rows]: drafts that were accepted, and one token more."""

    def seen(self, rows: np.ndarray) -> SeenTokens:
        """The tokens of these rows of the batch. The logits of a row's drafts lie together, then one more."""
        num_sampled = self.num_sampled[rows]
        starts = np.cumsum(self.num_drafted + 1) - (self.num_drafted + 1)
        tokens = np.concatenate([np.arange(num) for num in num_sampled.tolist()])
        order = np.argsort(tokens, kind="stable")
        tokens, rows = tokens[order], np.repeat(rows, num_sampled)[order]
        return SeenTokens(rows, tokens, starts[rows] + tokens)
