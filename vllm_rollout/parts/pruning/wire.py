"""Scores in the reports of a worker to its scheduler. Invariant: both ends are in this file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_rollout.kernel.wire import RunnerReport
from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, Observation
from vllm_rollout.parts.pruning.rules.step import PRUNING


class LastLogits(NamedTuple):
    """Outputs of the head for whole trajectories after tokens that may be a candidate's last ones."""

    rows: np.ndarray
    """int64 [num_final]: rows of the step's batch whose candidates are scored at their end."""
    tokens: np.ndarray
    """int64 [num_final]: which of the step's tokens of its request, 0 for the first."""
    logits: Any
    """float32 [num_final]: a tensor on the way to the host, then an array."""
    head_versions: np.ndarray
    """int64 [num_final]. 0: no head is trained."""


class ScoreReport(NamedTuple):
    """Scores of a step."""

    request_ids: Sequence[str] = ()
    """Ids of requests that reached their detection length in this step."""
    due_values: np.ndarray | None = None
    """float32 [num_due, 4]: the head's logit (NaN without a head), then the three numbers of `Confidence`."""
    head_versions: Sequence[int] = ()
    due_at: Sequence[int] = ()
    """Detection length that each of `due` reached."""
    last: LastLogits | None = None

    def observations(self) -> Iterator[tuple[str, Observation]]:
        """Request id and observation of everything that is due."""
        if self.due_values is None:
            return
        values = zip(self.request_ids, self.due_values.tolist(), self.head_versions, self.due_at, strict=True)
        for request_id, row, version, length in values:
            logit, *confidence = row
            yield request_id, Observation(Confidence(*confidence), logit if version else None, version, length)

    def last_observation(self, confidence: float, row: int, token: int) -> Observation:
        version, logit = 0, None
        if (last := self.last) is not None:
            for place in np.flatnonzero((last.rows == row) & (last.tokens == token) & (last.head_versions > 0)):
                version, logit = int(last.head_versions[place]), float(last.logits[place])
        return Observation(Confidence(confidence, math.nan, math.nan), logit, version, WHOLE)

    def added_to(self, report: RunnerReport) -> RunnerReport:
        return report._replace(parts={**report.parts, PRUNING: self})
