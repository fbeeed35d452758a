"""Running statistics of candidates, where logits and hidden states are.

Invariant: a statistic is a function of the candidate and the position of its token, not of batch rows or the number of
calls, so reordering, preemption and tokens that are dropped and sampled again do not touch it. Nothing here waits for
the device: what the host knows of a step goes there in one copy, and a new candidate costs no launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_rollout.kernel.wire import NO_POSITION
from vllm_rollout.parts.observing.tracker.ops import token_confidence, update_confidence
from vllm_rollout.parts.observing.tracker.rows import RowsPart, RowValues, SeenRows
from vllm_rollout.parts.observing.tracker.step_values import StepValues
from vllm_rollout.parts.observing.tracker.verified import SeenTokens, VerifiedDrafts

NO_SLOT = -1
"""The slot of a row that is no candidate's."""
NUM_KEPT = 16
"""States kept of each candidate: that many tokens less one may be dropped, a step of each stage of a pipeline and of
the asynchronous loop, or the drafts of one step."""


class CandidateTracker:
    """Token confidence of every candidate in the worker, and the rows of candidates for parts that see them.

    Per step: `see_hidden_states`, then `observe` the logits; `step` holds what they showed. Costs nothing while there
    is no candidate.
    """

    def __init__(self, device: torch.device, capacity: int = 256) -> None:
        self.device = device
        self.parts: Sequence[RowsPart] = ()
        """Parts that see rows. They are set before the first candidate begins."""
        self._slots: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._means = torch.zeros(capacity, NUM_KEPT, dtype=torch.float32, device=device)
        self._m2s = torch.zeros(capacity, NUM_KEPT, dtype=torch.float32, device=device)
        self.trace = torch.zeros(capacity, 0, dtype=torch.float32, device=device)
        """float32 [capacity, trace_length]: confidences of the first tokens in each slot, as far as parts keep them."""
        self._prompt_lengths = np.zeros(capacity, dtype=np.int64)
        self._trace_lengths = np.zeros(capacity, dtype=np.int64)
        self._last_ids: list[str] | None = None
        self._row_slots = np.zeros(0, dtype=np.int64)
        """The slots of `_last_ids`."""
        self._hidden: torch.Tensor | None = None
        self._hidden_rows: torch.Tensor | None = None
        self.step: StepValues | None = None
        """Values of the step that was observed last. None without candidates."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return len(self._prompt_lengths)

    def slot_of(self, request_id: str) -> int | None:
        """Slot of a request. None if it is not observed."""
        return self._slots.get(request_id)

    def add(self, request_id: str, num_prompt_tokens: int) -> int | None:
        """Start observing a request. Returns its slot, or None if it is observed already, since it was preempted."""
        if request_id in self._slots:
            return None
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[request_id] = slot
        self._last_ids = None
        self._prompt_lengths[slot] = num_prompt_tokens
        return slot

    def keep_trace(self, slot: int, num_tokens: int) -> None:
        """Keep the confidences of the first tokens in this slot, until its request is discarded."""
        self._trace_lengths[slot] = num_tokens
        capacity, width = self.trace.shape
        if num_tokens > width:
            new = torch.zeros(capacity, num_tokens - width, dtype=torch.float32, device=self.device)
            self.trace = torch.cat([self.trace, new], dim=1)

    def discard(self, request_id: str) -> None:
        """Observe a request no more."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self._last_ids = None
            self._trace_lengths[slot] = 0
            for part in self.parts:
                part.end(slot, request_id)

    def forget_all(self) -> list[str]:
        """Observe nobody any more, whatever state this is in. Returns whom it observed."""
        request_ids = list(self._slots)
        self._slots, self._free, self._last_ids = {}, list(range(self.capacity - 1, -1, -1)), None
        self._trace_lengths[:] = 0
        self.step = self._hidden = self._hidden_rows = None
        for part in self.parts:
            part.forget_all()
        return request_ids

    def copy(self, request_ids: Sequence[str]) -> dict[str, bytes]:
        """Statistics of those requests that are observed: float32 NUM_KEPT means, as many sums of squares, then the
        trace. Waits for the device.
        """
        slots = {id: self._slots[id] for id in request_ids if id in self._slots}
        if not slots:
            return {}
        rows = torch.tensor(list(slots.values()), device=self.device)
        kept = torch.cat([state.index_select(0, rows) for state in (self._means, self._m2s, self.trace)], dim=1).cpu()
        return {
            request_id: row[: 2 * NUM_KEPT + int(self._trace_lengths[slot])].numpy().tobytes()
            for (request_id, slot), row in zip(slots.items(), kept, strict=True)
        }

    def restore(self, request_id: str, statistics: bytes) -> None:
        """Put the statistics of another tracker in place of those of a request, which has just been added."""
        slot = self._slots[request_id]
        values = torch.frombuffer(bytearray(statistics), dtype=torch.float32).to(self.device)
        self._means[slot], self._m2s[slot] = values[:NUM_KEPT], values[NUM_KEPT : 2 * NUM_KEPT]
        self.trace[slot, : len(values) - 2 * NUM_KEPT] = values[2 * NUM_KEPT :]

    def start_step(self) -> None:
        """Forget the previous step's values."""
        self.step = self._hidden = self._hidden_rows = None

    def see_hidden_states(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """The states this step's logits are made of, [num_rows, hidden_size], or [num_tokens, hidden_size] and `rows`,
        int32 or int64 [num_rows], that picks them."""
        for part in self.parts:
            if part.num_wanting:
                self._hidden, self._hidden_rows = hidden, rows

    def pick_hidden_states(self, rows: torch.Tensor) -> None:
        """Choose the states, int64 [num_rows], that belong to the logits that come next."""
        if self._hidden is not None:
            self._hidden_rows = rows

    def observe(
        self,
        request_ids: Sequence[str],
        logits: torch.Tensor,
        num_computed: np.ndarray,
        unfinished: np.ndarray,
        verified: VerifiedDrafts | None = None,
    ) -> None:
        """Account for one step.

        Args:
            request_ids: request of each row, [num_rows].
            logits: [num_rows, vocab_size], before temperature; with `verified` [num_rows and all their drafts,
                vocab_size].
            num_computed: tokens of each row's request computed by the end of this step, prompt included and drafts
                left out, int [num_rows].
            unfinished: bool [num_rows]; a row whose prompt, or whose tokens from before a preemption, are not all
                computed yet samples no token.
            verified: what became of the step's drafts; None in a step that had none.
        """
        self.step = None
        if not self._slots:
            return
        if self._last_ids != request_ids:
            self._last_ids = list(request_ids)
            self._row_slots = np.array([self._slots.get(id, NO_SLOT) for id in request_ids], dtype=np.int64)
        rows = np.flatnonzero((self._row_slots != NO_SLOT) & ~unfinished)
        if not len(rows):
            return
        seen = SeenTokens.one_of_each(rows) if verified is None else verified.seen(rows)
        slots = self._row_slots[seen.rows]
        positions = num_computed[seen.rows] - self._prompt_lengths[slots] + seen.tokens
        shown = SeenRows(request_ids, seen, slots, positions, self._hidden, self._hidden_rows)
        arrays = [seen.logit_rows, slots, positions]
        asking: list[tuple[RowsPart, int]] = []
        for part in self.parts:
            if (chosen := part.choose(shown)) is not None:
                arrays += chosen
                asking.append((part, len(chosen)))
        device_rows, device_slots, device_positions, *device_chosen = self.upload(arrays)
        confidence = token_confidence(logits, device_rows)
        statistics = (self._means, self._m2s, self.trace)
        if verified is None:
            moments = update_confidence(device_slots, device_positions, confidence, *statistics)
        else:
            moments = torch.cat(
                [
                    update_confidence(device_slots[its], device_positions[its], confidence[its], *statistics)
                    for its in seen.of_each_token
                ]
            )
        first = None
        if verified is not None:
            first = np.full(len(request_ids), NO_POSITION, dtype=np.int64)
            first[rows] = num_computed[rows] - self._prompt_lengths[self._row_slots[rows]]
        values: list[RowValues] = []
        for part, num in asking:
            values.append(part.see_rows(shown, device_chosen[:num]))
            device_chosen = device_chosen[num:]
        self.step = StepValues(len(request_ids), seen.rows, seen.tokens, moments, first, values)
        self._hidden = self._hidden_rows = None

    def upload(self, arrays: Sequence[np.ndarray]) -> Sequence[torch.Tensor]:
        """int64 arrays on the device, in one copy that does not make the host wait: from pinned memory, which torch
        keeps until the copy is done."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        lengths = [len(array) for array in arrays]
        pinned = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        np.concatenate(arrays, out=pinned.numpy())
        return pinned.to(self.device, non_blocking=True).split(lengths)

    def _grow(self) -> None:
        capacity = self.capacity
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))
        self._means, self._m2s, self.trace = (
            torch.cat([state, state]) for state in (self._means, self._m2s, self.trace)
        )
        self._prompt_lengths, self._trace_lengths = (
            np.concatenate([values, np.zeros_like(values)]) for values in (self._prompt_lengths, self._trace_lengths)
        )
        for part in self.parts:
            part.grow()
