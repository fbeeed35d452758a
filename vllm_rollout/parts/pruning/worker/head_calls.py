"""Calls of an engine core to its worker, for the quality heads.

Invariant: only the worker whose outputs are read scores and learns. The others have no heads and answer None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_rollout.parts.pruning.calls import Features, Refusal
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.rules.report import HeadInfo
from vllm_rollout.parts.pruning.worker.feature_ring import StateKey
from vllm_rollout.parts.pruning.worker.features import features_of, states_of
from vllm_rollout.parts.pruning.worker.quality_head import HeadMismatch
from vllm_rollout.parts.pruning.worker.quality_heads import QualityHeads


class HeadCalls:
    """Methods of a worker."""

    quality_heads: QualityHeads | None = None

    def rollout_learn(
        self, key: HeadKey, states: list[StateKey], positives: list[bool], weights: list[float]
    ) -> list[int] | None:
        """Plan training on the features with these keys. Returns the positions of those that still exist."""
        if (heads := self.quality_heads) is None:
            return None
        features, found = heads.take_features([StateKey(*state) for state in states])
        heads.learn(key, features, [positives[i] for i in found], [weights[i] for i in found])
        return found

    def rollout_take_features(self, keys: list[StateKey]) -> tuple[Features, list[int]] | None:
        """Features for another rank to learn from, and their positions in `keys`."""
        if (heads := self.quality_heads) is None:
            return None
        features, found = heads.take_features([StateKey(*key) for key in keys])
        return features_of(features), found

    def rollout_learn_features(
        self, key: HeadKey, features: Features, positives: list[bool], weights: list[float]
    ) -> None:
        """Plan training on another rank's features."""
        if (heads := self.quality_heads) is not None and positives:
            heads.learn(key, states_of(features, len(positives)), positives, weights)

    def rollout_train(self, budget_s: float) -> int | None:
        """Train for `budget_s` seconds at most, or one step. Returns the number of planned steps that are left."""
        return None if self.quality_heads is None else self.quality_heads.train(budget_s)

    def rollout_heads(self) -> list[HeadInfo] | None:
        return None if self.quality_heads is None else self.quality_heads.infos()

    def rollout_head_losses(self, key: HeadKey) -> list[float] | None:
        return None if self.quality_heads is None else self.quality_heads.losses(key)

    def rollout_put_head(
        self, data: bytes, known: list[int], spare: int | None, adapter: str
    ) -> HeadInfo | Refusal | None:
        return None if self.quality_heads is None else _answer(self.quality_heads.put, data, known, spare, adapter)

    def rollout_forget_heads(self, keys: list[HeadKey]) -> None:
        if (heads := self.quality_heads) is not None:
            for key in keys:
                heads.forget(key)

    def rollout_open_head(self, reader: str, key: HeadKey) -> int | None:
        """Begin to read a trained head. Returns its size in bytes, or None without one."""
        return None if self.quality_heads is None else self.quality_heads.open(reader, key)

    def rollout_copy_head_state(self, reader: str, key: HeadKey) -> int | None:
        """Begin to read a head with its optimizer. Returns the size in bytes, or 0: call again."""
        return None if self.quality_heads is None else self.quality_heads.copy_state(reader, key)

    def rollout_read(self, reader: str, start: int, end: int) -> bytes | None:
        """A part of the open data."""
        return None if self.quality_heads is None else self.quality_heads.read(reader, start, end)

    def rollout_restore_heads(
        self, states: list[tuple[str, bytes]], known: list[HeadKey], only_check: bool
    ) -> list[HeadKey] | Refusal | None:
        """Restore heads from states by adapter. Returns the keys of these heads."""
        return None if self.quality_heads is None else _answer(self.quality_heads.restore, states, known, only_check)


def _answer(put: Callable[..., Any], *args: Any) -> Any:
    """Return errors as values: only an exception's text would pass the executor."""
    try:
        return put(*args)
    except HeadMismatch as error:
        return Refusal("mismatch", str(error))
    except ValueError as error:
        return Refusal("invalid", str(error))
