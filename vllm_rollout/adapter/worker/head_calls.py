"""What an engine core asks of its worker's quality heads, by `collective_rpc`.

Invariant: of all ranks only the one whose outputs are read scores and learns; the others have no heads and answer None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_rollout.adapter.call_table import Features, Refusal
from vllm_rollout.adapter.worker.features import features_of, states_of
from vllm_rollout.group.report import HeadInfo
from vllm_rollout.tracker.quality_head import HeadMismatch
from vllm_rollout.tracker.quality_heads import QualityHeads


class HeadCalls:
    """The methods of a worker that begin with `rollout_`."""

    quality_heads: QualityHeads | None

    def rollout_learn(
        self, detection_length: int, request_ids: list[str], positives: list[bool], weights: list[float]
    ) -> list[int] | None:
        """Plan training on the features kept for these requests; returns positions of those that were still there."""
        if (heads := self.quality_heads) is None:
            return None
        features, found = heads.take_features(request_ids)
        heads.learn(detection_length, features, [positives[i] for i in found], [weights[i] for i in found])
        return found

    def rollout_take_features(self, request_ids: list[str]) -> tuple[Features, list[int]] | None:
        """Features for another rank to learn from, and their positions in `request_ids`."""
        if (heads := self.quality_heads) is None:
            return None
        features, found = heads.take_features(request_ids)
        return features_of(features), found

    def rollout_learn_features(
        self, detection_length: int, features: Features, positives: list[bool], weights: list[float]
    ) -> None:
        """Plan training on another rank's features."""
        if (heads := self.quality_heads) is not None and positives:
            heads.learn(detection_length, states_of(features, len(positives)), positives, weights)

    def rollout_train(self, budget_s: float) -> int | None:
        """Train for `budget_s` seconds at most, or one step; returns how many planned steps are left."""
        return None if self.quality_heads is None else self.quality_heads.train(budget_s)

    def rollout_heads(self) -> list[HeadInfo] | None:
        return None if self.quality_heads is None else self.quality_heads.infos()

    def rollout_head_losses(self, detection_length: int) -> list[float] | None:
        return None if self.quality_heads is None else self.quality_heads.losses(detection_length)

    def rollout_put_head(self, data: bytes, known: list[int], spare: int | None) -> HeadInfo | Refusal | None:
        return None if self.quality_heads is None else _answer(self.quality_heads.put, data, known, spare)

    def rollout_forget_heads(self, detection_lengths: list[int]) -> None:
        if (heads := self.quality_heads) is not None:
            for detection_length in detection_lengths:
                heads.forget(detection_length)

    def rollout_open_head(self, reader: str, detection_length: int) -> int | None:
        """Begin to read a trained head; returns how many bytes there are, None without one."""
        return None if self.quality_heads is None else self.quality_heads.open(reader, detection_length)

    def rollout_copy_head_state(self, reader: str, detection_length: int) -> int | None:
        """Begin to read a head with its optimizer; returns how many bytes there are, 0: call again."""
        return None if self.quality_heads is None else self.quality_heads.copy_state(reader, detection_length)

    def rollout_read(self, reader: str, start: int, end: int) -> bytes | None:
        """A part of what is open."""
        return None if self.quality_heads is None else self.quality_heads.read(reader, start, end)

    def rollout_restore_heads(self, states: list[bytes], known: list[int]) -> list[int] | Refusal | None:
        """Answers the heads' detection lengths."""
        return None if self.quality_heads is None else _answer(self.quality_heads.restore, states, known)


def _answer(put: Callable[..., Any], *args: Any) -> Any:
    """Errors as values: of an exception only its text would cross the executor."""
    try:
        return put(*args)
    except HeadMismatch as error:
        return Refusal("mismatch", str(error))
    except ValueError as error:
        return Refusal("invalid", str(error))
