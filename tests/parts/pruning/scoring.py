"""Candidates with scores in a tracker, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.observing.tracker.tracker import CandidateTracker
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing
from vllm_rollout.parts.pruning.worker.scored_rows import ScoredRows
from vllm_rollout.parts.pruning.worker.scorer import Scorer


def new_scorer(device: torch.device, capacity: int = 256, num_in_flight: int = 1) -> Scorer:
    """A scorer that sees the rows of a tracker."""
    tracker = CandidateTracker(device, capacity)
    scorer = Scorer(tracker, FeatureRing(1, torch.float32, 4), num_in_flight)
    tracker.parts = [scorer]
    return scorer


class ScoringTracker(CandidateTracker):
    """A tracker whose candidates are scored by its scorer."""

    def __init__(
        self, device: torch.device, capacity: int = 256, num_in_flight: int = 1, ring: FeatureRing | None = None
    ) -> None:
        super().__init__(device, capacity)
        self.ring = FeatureRing(1, torch.float32, 4) if ring is None else ring
        self.scorer = Scorer(self, self.ring, num_in_flight)
        self.parts = [self.scorer]

    def add_scored(
        self,
        request_id: str,
        num_prompt_tokens: int,
        detection_length: int | None,
        *,
        num_before: int = 0,
        trial_lengths: Sequence[int] = (),
        final: bool = False,
        adapter: str = BASE_MODEL,
    ) -> None:
        """Observe a request, and score it if it has a detection length."""
        slot = self.add(request_id, num_prompt_tokens)
        if slot is not None and detection_length is not None:
            lengths = (detection_length, *trial_lengths)
            self.scorer.score(slot, lengths, num_before=num_before, final=final, adapter=adapter)

    @property
    def scored(self) -> ScoredRows:
        """Scores of the last step."""
        values = self.step.of_parts if self.step else ()
        return values[0] if values else ScoredRows(self.ring)
