"""The quality heads of one worker, by detection length: fed from the feature ring, shown to the tracker when trained.

Invariant: candidates are scored by published weights only; training, and a training that fails, leaves them alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_rollout.config import MAX_DETECTION_LENGTHS
from vllm_rollout.tracker.feature_ring import FeatureRing
from vllm_rollout.tracker.quality_head import HeadWeights, QualityHead
from vllm_rollout.tracker.replay import MAX_MAGNITUDE
from vllm_rollout.tracker.tracker import CandidateTracker, PublishedHead


@dataclass(frozen=True, slots=True)
class HeadSummary:
    """What a head is, in numbers."""

    detection_length: int
    hidden_size: int
    version: int
    num_steps: int
    num_labels: int
    losses: list[float]
    """Mean training loss of each version, oldest first."""


class QualityHeads:
    """Trains heads on rewarded candidates and publishes them to the tracker."""

    def __init__(
        self,
        tracker: CandidateTracker,
        ring: FeatureRing,
        *,
        hidden_size: int,
        model: str,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker = tracker
        self._ring = ring
        self._hidden_size = hidden_size
        self._model = model
        self._device = device
        self._clock = clock
        self._heads: dict[int, QualityHead] = {}

    def take_features(self, request_ids: Sequence[str]) -> tuple[torch.Tensor, list[int]]:
        """Features that are still there, [num_found, hidden_size], and their positions in `request_ids`.

        One that overflowed in the model is left out: a head refuses a whole batch with such a state in it.
        """
        features, found = self._ring.take(request_ids)
        usable = (features.float().abs() <= MAX_MAGNITUDE).all(dim=1)
        return features[usable], [position for position, ok in zip(found, usable.tolist(), strict=True) if ok]

    def learn(
        self, detection_length: int, features: torch.Tensor, positives: Sequence[bool], weights: Sequence[float]
    ) -> None:
        """Plan training on `features` [num_labels, hidden_size]; takes no optimizer step."""
        if not len(features) or (head := self._head(detection_length)) is None:
            return
        head.add(features, torch.tensor(positives, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32))

    def train(self, budget_s: float) -> int:
        """Take planned steps for `budget_s` seconds; returns how many are left."""
        deadline = self._clock() + budget_s
        for head in self._heads.values():
            if head.num_pending_steps:
                version = head.version
                head.train(max(0.0, deadline - self._clock()))
                if head.version != version:
                    self._publish(head)
                break
        return sum(head.num_pending_steps for head in self._heads.values())

    def summaries(self) -> list[HeadSummary]:
        return [
            HeadSummary(length, self._hidden_size, head.version, head.num_steps, head.num_labels, list(head.losses))
            for length, head in self._heads.items()
        ]

    def export(self, detection_length: int) -> bytes | None:
        """The head as safetensors; None while there is none trained."""
        head = self._heads.get(detection_length)
        return None if head is None or head.weights is None else head.to_safetensors()

    def put(self, data: bytes) -> int:
        """Put a head in place of the one for its detection length, which is returned.

        Raises: HeadMismatch, ValueError (as `QualityHead.from_safetensors`, and for one head too many).
        """
        head = QualityHead.from_safetensors(data, hidden_size=self._hidden_size, model=self._model)
        if not head.version:
            raise ValueError("version must be at least 1, got 0, which stands for an untrained head")
        _check_lengths([*self._heads.keys() - {head.detection_length}, head.detection_length])
        self._heads[head.detection_length] = head
        self._publish(head)
        return head.detection_length

    def state(self) -> list[bytes]:
        """Heads with their optimizers."""
        return [head.state() for head in self._heads.values()]

    def restore(self, states: Sequence[bytes]) -> None:
        """Put these heads in place of all there are. Raises: HeadMismatch, ValueError, and nothing has changed."""
        heads = [QualityHead.restore(state, hidden_size=self._hidden_size, model=self._model) for state in states]
        _check_lengths([head.detection_length for head in heads])
        self._heads = {head.detection_length: head for head in heads}
        self._tracker.heads.clear()
        for head in heads:
            self._publish(head)

    def _head(self, detection_length: int) -> QualityHead | None:
        head = self._heads.get(detection_length)
        if head is None and len(self._heads) < MAX_DETECTION_LENGTHS:
            head = QualityHead(self._hidden_size, model=self._model, detection_length=detection_length)
            self._heads[detection_length] = head
        return head

    def _publish(self, head: QualityHead) -> None:
        if head.weights is not None:
            weights = HeadWeights(*(tensor.to(self._device) for tensor in head.weights))
            self._tracker.heads[head.detection_length] = PublishedHead(head.version, weights)


def _check_lengths(detection_lengths: Sequence[int]) -> None:
    if len(set(detection_lengths)) < len(detection_lengths) or len(detection_lengths) > MAX_DETECTION_LENGTHS:
        raise ValueError(
            f"heads must be for at most {MAX_DETECTION_LENGTHS} different detection lengths, got "
            f"{', '.join(map(str, detection_lengths))}"
        )
