"""Running statistics of candidates, where the logits are.

Invariant: statistics belong to a request id, not to a batch row, so reordering and preemption do not touch them;
nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_rollout.tracker.ops import token_stats


class CandidateTracker:
    """Mean token confidence of every candidate in the worker.

    Per step: `observe` the logits, then `mean_confidence` holds this step's values. Costs nothing while there is no
    candidate.
    """

    def __init__(self, device: torch.device, capacity: int = 256) -> None:
        self._device = device
        self._slots: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._sums = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._counts = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._ones = torch.ones(capacity, dtype=torch.float32, device=device)
        self._no_tokens = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self._last_ids: list[str] | None = None
        self._rows: torch.Tensor | None = None
        self._row_slots: torch.Tensor | None = None
        self.mean_confidence: torch.Tensor | None = None
        """float32 [num_rows] of the step last observed, NaN where a row is no candidate's; None without candidates."""

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, request_id: str) -> None:
        """Start observing a request; again for one that was preempted changes nothing."""
        if request_id in self._slots:
            return
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[request_id] = slot
        self._sums[slot] = 0.0
        self._counts[slot] = 0.0
        self._last_ids = None

    def discard(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self._last_ids = None

    def observe(self, request_ids: Sequence[str], logits: torch.Tensor, skip: Sequence[int] = ()) -> None:
        """Account for one step.

        Args:
            request_ids: request of each row, [num_rows].
            logits: [num_rows, vocab_size], before temperature.
            skip: rows that do not sample a token in this step (unfinished prefill).
        """
        self.mean_confidence = None
        if not self._slots:
            return
        if len(skip) or self._last_ids != request_ids:
            self._match_rows(request_ids, set(skip))
        if self._row_slots is None:
            return
        slots, rows = self._row_slots, self._rows
        seen = logits if rows is None else logits.index_select(0, rows)
        confidence = token_stats(seen, self._no_tokens[: len(slots)]).confidence
        self._sums.index_add_(0, slots, confidence)
        self._counts.index_add_(0, slots, self._ones[: len(slots)])
        mean = self._sums[slots] / self._counts[slots]
        if rows is not None:
            every_row = torch.full((len(request_ids),), float("nan"), device=self._device)
            mean = every_row.index_copy_(0, rows, mean)
        self.mean_confidence = mean

    def _match_rows(self, request_ids: Sequence[str], skip: set[int]) -> None:
        rows = [row for row, id in enumerate(request_ids) if id in self._slots and row not in skip]
        slots = [self._slots[request_ids[row]] for row in rows]
        self._last_ids = None if skip else list(request_ids)
        self._row_slots = torch.tensor(slots, dtype=torch.int64, device=self._device) if slots else None
        all_rows = len(rows) == len(request_ids)
        self._rows = None if all_rows else torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _grow(self) -> None:
        capacity = len(self._sums)
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))
        self._sums = torch.cat([self._sums, torch.zeros_like(self._sums)])
        self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._ones = torch.cat([self._ones, self._ones])
        self._no_tokens = torch.cat([self._no_tokens, self._no_tokens])
