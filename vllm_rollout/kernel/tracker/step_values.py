"""Values that one step computed for candidates, on the device and on their way to the host.

Invariant: nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_rollout.parts.pruning.worker.last_states import EndedStates

DUE_COLUMNS = 4
"""Values of a due row: logit, then the three numbers of its trace confidence."""


@dataclass(frozen=True, slots=True)
class DueRows:
    """The candidates that reach their detection length in one step."""

    request_ids: list[str]
    lengths: list[int]
    """Detection length that each candidate reached."""
    head_versions: list[int]
    """The head that scored each; 0: none is trained for its detection length."""
    values: torch.Tensor
    """float32 [num_due, DUE_COLUMNS]: logit (NaN without a head) and trace confidence."""
    features: torch.Tensor
    """The hidden states that produced their tokens, [num_due, hidden_size]."""


@dataclass(frozen=True, slots=True)
class LastLogits:
    """Logits of the whole-trajectory head for tokens that may be a candidate's last ones."""

    rows: np.ndarray
    """int64 [num_final]: those that ask, of the step's batch."""
    tokens: np.ndarray
    """int64 [num_final]: which of the step's tokens of its request, 0 for the first."""
    logits: torch.Tensor
    """float32 [num_final]."""
    head_versions: np.ndarray
    """int64 [num_final]."""


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
    due: DueRows | None = None
    last: LastLogits | None = None
    ended: EndedStates | None = None
    """The states of candidates that ended before this step."""

    @property
    def on_host(self) -> bool:
        return self.moments.device.type == "cpu"

    def to_host(self) -> StepValues:
        """Start copying to the host, on the current stream; what is returned is filled when that stream gets there."""
        due = self.due
        if due is not None:
            features = None if due.features is None else due.features.to("cpu", non_blocking=True)
            due = replace(due, values=due.values.to("cpu", non_blocking=True), features=features)
        last, ended = self.last, self.ended
        if last is not None:
            last = replace(last, logits=last.logits.to("cpu", non_blocking=True))
        if ended is not None:
            ended = replace(ended, states=ended.states.to("cpu", non_blocking=True))
        return replace(self, moments=self.moments.to("cpu", non_blocking=True), due=due, last=last, ended=ended)
