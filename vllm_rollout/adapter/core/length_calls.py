"""What an engine core is asked about lengths: it keeps their history, because there may be several API processes.

Invariant: every rank is told of every group, so that all of them know the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from vllm_rollout.group.history import LengthHistory, LengthMoments, ObservedLength


class LengthCalls:
    """The operations."""

    def __init__(self, history: LengthHistory) -> None:
        self._history = history

    def observe_lengths(self, key: str, lengths: Sequence[Sequence[Any]]) -> None:
        """A group is over: (num_tokens, censored) of its candidates."""
        self._history.observe(key, [ObservedLength(*length) for length in lengths])

    def length_history(self, keys: Sequence[str]) -> list[Any]:
        """`[moments of the data set, [moments of each key]]`, None for what was never seen."""
        prompts = [_plain(self._history.of(key)) for key in keys]
        return [_plain(self._history.dataset()), prompts]


LENGTH_OPERATIONS = (LengthCalls.observe_lengths, LengthCalls.length_history)


def _plain(moments: LengthMoments | None) -> list[Any] | None:
    return None if moments is None else list(astuple(moments))
