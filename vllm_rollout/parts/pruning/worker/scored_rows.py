"""Scores and hidden states of one step, on the device and on their way to the host.

Invariant: nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_rollout.kernel import wire
from vllm_rollout.kernel.wire import RunnerReport
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey
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
    """int64 [num_final]: rows of the step's batch whose candidates are scored at their end."""
    tokens: np.ndarray
    """int64 [num_final]: which of the step's tokens of its request, 0 for the first."""
    logits: torch.Tensor
    """float32 [num_final]."""
    head_versions: np.ndarray
    """int64 [num_final]."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Values of one step. On the host, hidden states go to the ring and the others to the report."""

    ring: FeatureRing
    due: DueRows | None = None
    last: LastLogits | None = None
    ended: EndedStates | None = None
    """The states of candidates that ended before this step."""

    def to_host(self) -> ScoredRows:
        """Start copying to the host, on the current stream."""
        due, last, ended = self.due, self.last, self.ended
        if due is not None:
            values, features = (tensor.to("cpu", non_blocking=True) for tensor in (due.values, due.features))
            due = replace(due, values=values, features=features)
        if last is not None:
            last = replace(last, logits=last.logits.to("cpu", non_blocking=True))
        if ended is not None:
            ended = replace(ended, states=ended.states.to("cpu", non_blocking=True))
        return replace(self, due=due, last=last, ended=ended)

    def add_to(self, report: RunnerReport) -> RunnerReport:
        """Report with scores. Puts the states into the ring."""
        if (due := self.due) is not None:
            report = report._replace(
                due=due.request_ids, due_values=due.values.numpy(), head_versions=due.head_versions, due_at=due.lengths
            )
            keys = [StateKey(*key) for key in zip(due.request_ids, due.lengths, strict=True)]
            self.ring.put(keys, due.features)
        if (last := self.last) is not None:
            num_tokens, num_rows = report.confidence.shape[1:]
            logits = wire.LastLogits.of(
                (num_tokens, num_rows), last.rows, last.logits.numpy(), last.head_versions, last.tokens
            )
            report = report._replace(last=logits)
        if (ended := self.ended) is not None:
            self.ring.put(ended.keys, ended.states)
        return report
