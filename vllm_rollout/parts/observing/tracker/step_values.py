"""Values that one step computed for candidates, on the device and on their way to the host.

Invariant: nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_rollout.parts.observing.tracker.rows import RowValues


@dataclass(frozen=True, slots=True)
class StepValues:
    """Values that one step computed."""

    num_rows: int
    """Number of rows in the step's batch."""
    rows: np.ndarray
    """int64 [num_seen]: the rows that were looked at."""
    tokens: np.ndarray
    """int64 [num_seen]: which of the step's tokens of its request, 0 for the first."""
    moments: torch.Tensor
    """float32 [num_seen, 2]: mean and standard deviation of the candidate's token confidences up to this token."""
    first_positions: np.ndarray | None = None
    """int64 [num_rows]: the number of output tokens before this step, of rows that were looked at; None in a step
    without drafts, which samples one token of each."""
    of_parts: Sequence[RowValues] = ()

    @property
    def on_host(self) -> bool:
        return self.moments.device.type == "cpu"

    def to_host(self) -> StepValues:
        """Start copying to the host, on the current stream; what is returned is filled when that stream gets there."""
        of_parts = [values.to_host() for values in self.of_parts]
        return replace(self, moments=self.moments.to("cpu", non_blocking=True), of_parts=of_parts)
