"""Running statistics of candidates, where logits and hidden states are.

Invariant: statistics belong to a request id, not to a batch row, so reordering and preemption do not touch them;
nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS
from vllm_rollout.tracker.ops import quality_head, token_stats, update_lengths, windowed_confidence
from vllm_rollout.tracker.quality_head import HeadWeights

NEVER = -1
DUE_COLUMNS = 4
"""Values of a due row: logit, then the three numbers of its trace confidence."""


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A trained head on the device."""

    version: int
    weights: HeadWeights


@dataclass(frozen=True, slots=True)
class DueRows:
    """The candidates that reach their detection length in one step."""

    rows: list[int]
    request_ids: list[str]
    head_versions: list[int]
    """The head that scored each; 0: none is trained for its detection length."""
    features: torch.Tensor | None
    """The hidden states that produced those tokens, [num_due, hidden_size]; None where they are not wanted."""


@dataclass(frozen=True, slots=True)
class StepValues:
    """What one step showed, as one tensor so that one copy brings it to the host."""

    values: torch.Tensor
    """float32 [num_rows + DUE_COLUMNS * num_due]: running mean confidence of each row (NaN where it is no candidate's),
    then for each due row its logit (NaN without a head) and trace confidence."""
    due: DueRows | None = None

    def to_host(self) -> StepValues:
        """Start copying to the host, on the current stream; what is returned is filled when that stream gets there."""
        due = self.due
        if due is not None and due.features is not None:
            due = replace(due, features=due.features.to("cpu", non_blocking=True))
        return StepValues(self.values.to("cpu", non_blocking=True), due)


class CandidateTracker:
    """Token confidence of every candidate in the worker, and the score of those that are due.

    Per step: `see_hidden_states`, then `observe` the logits; `step` holds what they showed. Costs nothing while there
    is no candidate.
    """

    def __init__(self, device: torch.device, capacity: int = 256, *, keep_features: bool = True) -> None:
        self._device = device
        self._keep_features = keep_features
        self._slots: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._counts = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._means = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._m2s = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._no_tokens = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self._detection_lengths = np.zeros(capacity, dtype=np.int64)
        self._due_at = np.full(capacity, NEVER, dtype=np.int64)
        """By slot: tokens computed, prompt included, in the step that produces token `detection_length`."""
        self._num_scored = 0
        """Candidates that have a detection length."""
        self._trace: torch.Tensor | None = None
        """float32 [capacity, longest detection length + 1]: token confidences, the last column for what comes after."""
        self._last_ids: list[str] | None = None
        self._rows: torch.Tensor | None = None
        self._row_slots: torch.Tensor | None = None
        self._row_due_at: np.ndarray | None = None
        self._hidden: torch.Tensor | None = None
        self._hidden_rows: torch.Tensor | None = None
        self.heads: dict[int, PublishedHead] = {}
        """By detection length. An entry is replaced whole."""
        self.step: StepValues | None = None
        """What the step last observed showed; None without candidates."""

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, request_id: str, num_prompt_tokens: int = 0, detection_length: int | None = None) -> None:
        """Start observing a request; again for one that was preempted changes nothing."""
        if request_id in self._slots:
            return
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[request_id] = slot
        for statistic in (self._counts, self._means, self._m2s):
            statistic[slot] = 0.0
        self._last_ids = None
        if detection_length is not None:
            self._num_scored += 1
            self._detection_lengths[slot] = detection_length
            self._due_at[slot] = num_prompt_tokens + detection_length - 1
            self._widen_trace(detection_length)

    def discard(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self._last_ids = None
            if self._due_at[slot] != NEVER:
                self._due_at[slot] = NEVER
                self._num_scored -= 1

    def start_step(self) -> None:
        """Forget the step before."""
        self.step = self._hidden = self._hidden_rows = None

    def see_hidden_states(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """The states this step's logits are made of, [num_rows, hidden_size], or [num_tokens, hidden_size] and `rows`,
        int64 [num_rows], that picks them."""
        if self._num_scored:
            self._hidden, self._hidden_rows = hidden, rows

    def observe(
        self,
        request_ids: Sequence[str],
        logits: torch.Tensor,
        skip: Sequence[int] = (),
        num_computed: np.ndarray | None = None,
    ) -> None:
        """Account for one step.

        Args:
            request_ids: request of each row, [num_rows].
            logits: [num_rows, vocab_size], before temperature.
            skip: rows that do not sample a token in this step (unfinished prefill).
            num_computed: tokens of each row's request computed by the end of this step, prompt included, int
                [num_rows]; without it no row is due.
        """
        self.step = None
        if not self._slots:
            return
        if len(skip) or self._last_ids != request_ids:
            self._match_rows(request_ids, set(skip))
        if self._row_slots is None:
            return
        slots, rows = self._row_slots, self._rows
        seen = logits if rows is None else logits.index_select(0, rows)
        confidence = token_stats(seen, self._no_tokens[: len(slots)]).confidence
        if self._num_scored:
            position = self._counts[slots].long().clamp_(max=self._trace.shape[1] - 1)
            self._trace.index_put_((slots, position), confidence)
        mean = update_lengths(slots, confidence, self._counts, self._means, self._m2s)
        if rows is not None:
            every_row = torch.full((len(request_ids),), float("nan"), device=self._device)
            mean = every_row.index_copy_(0, rows, mean)
        self.step = StepValues(mean)
        if self._num_scored and num_computed is not None and self._hidden is not None:
            due = np.flatnonzero(self._row_due_at == num_computed)
            if len(due):
                self.step = self._score(request_ids, due.tolist(), mean)
        self._hidden = self._hidden_rows = None

    def _score(self, request_ids: Sequence[str], due: list[int], mean: torch.Tensor) -> StepValues:
        """Score rows that are due, one detection length after the other (nearly always there is one)."""
        by_length: dict[int, list[int]] = {}
        for row in due:
            by_length.setdefault(int(self._detection_lengths[self._slots[request_ids[row]]]), []).append(row)
        parts, order, versions = [mean], [], []
        for detection_length, rows in by_length.items():
            head = self.heads.get(detection_length)
            slots = self._tensor([self._slots[request_ids[row]] for row in rows])
            lengths = self._counts[slots].long().clamp_(max=detection_length)
            trace = self._trace[:, :detection_length].index_select(0, slots)
            values = torch.full((len(rows), DUE_COLUMNS), float("nan"), device=self._device)
            values[:, 1:] = windowed_confidence(trace, lengths, CONFIDENCE_WINDOW_TOKENS)
            if head is not None:
                values[:, 0] = quality_head(self._hidden, self._hidden_positions(rows), *head.weights)
            parts.append(values.flatten())
            order += rows
            versions += [0 if head is None else head.version] * len(rows)
        features = self._hidden.index_select(0, self._hidden_positions(order)) if self._keep_features else None
        return StepValues(torch.cat(parts), DueRows(order, [request_ids[row] for row in order], versions, features))

    def _hidden_positions(self, rows: list[int]) -> torch.Tensor:
        positions = self._tensor(rows)
        return positions if self._hidden_rows is None else self._hidden_rows.index_select(0, positions).long()

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        # From pinned memory the copy does not make the host wait.
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)

    def _match_rows(self, request_ids: Sequence[str], skip: set[int]) -> None:
        rows = [row for row, id in enumerate(request_ids) if id in self._slots and row not in skip]
        slots = [self._slots[request_ids[row]] for row in rows]
        self._last_ids = None if skip else list(request_ids)
        self._row_slots = torch.tensor(slots, dtype=torch.int64, device=self._device) if slots else None
        all_rows = len(rows) == len(request_ids)
        self._rows = None if all_rows else torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._row_due_at = np.full(len(request_ids), NEVER, dtype=np.int64)
        self._row_due_at[rows] = self._due_at[slots]

    def _widen_trace(self, detection_length: int) -> None:
        capacity = len(self._counts)
        width = max(detection_length + 1, 0 if self._trace is None else self._trace.shape[1])
        if self._trace is None or self._trace.shape != (capacity, width):
            trace = torch.zeros(capacity, width, dtype=torch.float32, device=self._device)
            if self._trace is not None:
                trace[: len(self._trace), : self._trace.shape[1] - 1] = self._trace[:, :-1]
            self._trace = trace

    def _grow(self) -> None:
        capacity = len(self._counts)
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))
        self._counts, self._means, self._m2s = (
            torch.cat([statistic, torch.zeros_like(statistic)]) for statistic in (self._counts, self._means, self._m2s)
        )
        self._no_tokens = torch.cat([self._no_tokens, self._no_tokens])
        self._detection_lengths = np.concatenate([self._detection_lengths, np.zeros(capacity, dtype=np.int64)])
        self._due_at = np.concatenate([self._due_at, np.full(capacity, NEVER, dtype=np.int64)])
        if self._trace is not None:
            self._trace = torch.cat([self._trace, torch.zeros_like(self._trace)])
