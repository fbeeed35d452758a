"""Scores and hidden states of one step, on the device and on their way to the host.

Invariant: nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_rollout.kernel.wire import RunnerReport
from vllm_rollout.parts.pruning.wire import LastLogits, ScoreReport
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
            last = last._replace(logits=last.logits.to("cpu", non_blocking=True))
        if ended is not None:
            ended = replace(ended, states=ended.states.to("cpu", non_blocking=True))
        return replace(self, due=due, last=last, ended=ended)

    def add_to(self, report: RunnerReport) -> RunnerReport:
        """Report with scores. Puts the states into the ring."""
        scores = ScoreReport()
        if (due := self.due) is not None:
            scores = ScoreReport(due.request_ids, due.values.numpy(), due.head_versions, due.lengths)
            keys = [StateKey(*key) for key in zip(due.request_ids, due.lengths, strict=True)]
            self.ring.put(keys, due.features)
        if (last := self.last) is not None:
            scores = scores._replace(last=last._replace(logits=last.logits.numpy()))
        if (ended := self.ended) is not None:
            self.ring.put(ended.keys, ended.states)
            ended.keys.clear()
        return scores.added_to(report)
