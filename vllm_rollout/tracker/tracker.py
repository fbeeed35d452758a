"""Running statistics of candidates, where logits and hidden states are.

Invariant: a statistic is a function of the candidate and the position of its token, not of batch rows or the number of
calls, so reordering, preemption and tokens that are dropped and sampled again do not touch it. Nothing here waits for
the device: what the host knows of a step goes there in one copy, and a new candidate costs no launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS
from vllm_rollout.tracker.ops import quality_head, token_stats, update_confidence, windowed_confidence
from vllm_rollout.tracker.quality_head import HeadWeights

NO_SLOT = -1
"""Of a row that is no candidate's."""
UNSCORED = 0
"""Detection length of a candidate that is not scored."""
DUE_COLUMNS = 4
"""Values of a due row: logit, then the three numbers of its trace confidence."""
NUM_KEPT = 16
"""States kept of each candidate: that many tokens less one may be in flight and be dropped, a step of each stage of a
pipeline and of the asynchronous loop."""


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A trained head on the device."""

    version: int
    weights: HeadWeights


@dataclass(frozen=True, slots=True)
class DueRows:
    """The candidates that reach their detection length in one step."""

    request_ids: list[str]
    head_versions: list[int]
    """The head that scored each; 0: none is trained for its detection length."""
    values: torch.Tensor
    """float32 [num_due, DUE_COLUMNS]: logit (NaN without a head) and trace confidence."""
    teaching_ids: list[str]
    """Those of them that a reward may come for."""
    features: torch.Tensor | None
    """The hidden states that produced their tokens, [num_teaching, hidden_size]; None without such candidates."""


@dataclass(frozen=True, slots=True)
class StepValues:
    """What one step showed."""

    num_rows: int
    """Of the step's batch."""
    rows: np.ndarray
    """int64 [num_seen]: the rows that were looked at."""
    moments: torch.Tensor
    """float32 [num_seen, 2]: mean and standard deviation of the candidate's token confidences up to this token."""
    due: DueRows | None = None

    @property
    def on_host(self) -> bool:
        return self.moments.device.type == "cpu"

    def to_host(self) -> StepValues:
        """Start copying to the host, on the current stream; what is returned is filled when that stream gets there."""
        due = self.due
        if due is not None:
            features = None if due.features is None else due.features.to("cpu", non_blocking=True)
            due = replace(due, values=due.values.to("cpu", non_blocking=True), features=features)
        return replace(self, moments=self.moments.to("cpu", non_blocking=True), due=due)


@dataclass(frozen=True, slots=True)
class TrackedCandidate:
    """A candidate's statistics, on their way to the tracker of another worker."""

    num_prompt_tokens: int
    detection_length: int
    """UNSCORED when it is not scored."""
    num_before: int
    teaches: bool
    statistics: bytes
    """float32: NUM_KEPT means, as many sums of squares, then the trace up to its detection length."""


class CandidateTracker:
    """Token confidence of every candidate in the worker, and the score of those that are due.

    Per step: `see_hidden_states`, then `observe` the logits; `step` holds what they showed. Costs nothing while there
    is no candidate.
    """

    def __init__(self, device: torch.device, capacity: int = 256) -> None:
        self._device = device
        self._slots: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._means = torch.zeros(capacity, NUM_KEPT, dtype=torch.float32, device=device)
        self._m2s = torch.zeros(capacity, NUM_KEPT, dtype=torch.float32, device=device)
        self._trace = torch.zeros(capacity, 0, dtype=torch.float32, device=device)
        """As long as the longest detection length so far."""
        self._no_tokens = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self._prompt_lengths = np.zeros(capacity, dtype=np.int64)
        self._detection_lengths = np.full(capacity, UNSCORED, dtype=np.int64)
        self._num_before = np.zeros(capacity, dtype=np.int64)
        self._teaches = np.zeros(capacity, dtype=bool)
        self._num_scored = 0
        """Candidates that have a detection length."""
        self._last_ids: list[str] | None = None
        self._row_slots = np.zeros(0, dtype=np.int64)
        """Of `_last_ids`."""
        self._hidden: torch.Tensor | None = None
        self._hidden_rows: torch.Tensor | None = None
        self.heads: dict[int, PublishedHead] = {}
        """By detection length. An entry is replaced whole."""
        self.step: StepValues | None = None
        """What the step last observed showed; None without candidates."""

    def __len__(self) -> int:
        return len(self._slots)

    def add(
        self,
        request_id: str,
        num_prompt_tokens: int,
        detection_length: int | None = None,
        *,
        teaches: bool = True,
        num_before: int = 0,
    ) -> None:
        """Start observing a request; again for one that was preempted changes nothing. `teaches`: a reward may come for
        it, so that its hidden state is wanted. `num_before`: output tokens at the end of its prompt: its detection
        length counts from the first of them, and its trace confidence, of which theirs is a part, is not known."""
        if request_id in self._slots:
            return
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[request_id] = slot
        self._last_ids = None
        self._prompt_lengths[slot] = num_prompt_tokens
        if detection_length is not None:
            self._num_scored += 1
            self._detection_lengths[slot] = detection_length
            self._num_before[slot] = num_before
            self._teaches[slot] = teaches
            self._widen_trace(detection_length)

    def discard(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self._last_ids = None
            self._num_scored -= int(self._detection_lengths[slot] != UNSCORED)
            self._detection_lengths[slot] = UNSCORED

    def copy(self, request_ids: Sequence[str]) -> dict[str, TrackedCandidate]:
        """The statistics of those requests that are observed. Waits for the device."""
        slots = {id: self._slots[id] for id in request_ids if id in self._slots}
        if not slots:
            return {}
        rows = torch.tensor(list(slots.values()), device=self._device)
        kept = torch.cat([state.index_select(0, rows) for state in (self._means, self._m2s, self._trace)], dim=1).cpu()
        return {
            request_id: TrackedCandidate(
                int(self._prompt_lengths[slot]),
                int(self._detection_lengths[slot]),
                int(self._num_before[slot]),
                bool(self._teaches[slot]),
                row[: 2 * NUM_KEPT + int(self._detection_lengths[slot])].numpy().tobytes(),
            )
            for (request_id, slot), row in zip(slots.items(), kept, strict=True)
        }

    def restore(self, request_id: str, tracked: TrackedCandidate) -> None:
        """Go on observing a request of another worker, or one that was discarded here."""
        self.discard(request_id)
        length = None if tracked.detection_length == UNSCORED else tracked.detection_length
        self.add(request_id, tracked.num_prompt_tokens, length, teaches=tracked.teaches, num_before=tracked.num_before)
        slot = self._slots[request_id]
        statistics = torch.frombuffer(bytearray(tracked.statistics), dtype=torch.float32).to(self._device)
        self._means[slot], self._m2s[slot] = statistics[:NUM_KEPT], statistics[NUM_KEPT : 2 * NUM_KEPT]
        self._trace[slot, : len(statistics) - 2 * NUM_KEPT] = statistics[2 * NUM_KEPT :]

    def start_step(self) -> None:
        """Forget the step before."""
        self.step = self._hidden = self._hidden_rows = None

    def see_hidden_states(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """The states this step's logits are made of, [num_rows, hidden_size], or [num_tokens, hidden_size] and `rows`,
        int32 or int64 [num_rows], that picks them."""
        if self._num_scored:
            self._hidden, self._hidden_rows = hidden, rows

    def observe(
        self, request_ids: Sequence[str], logits: torch.Tensor, num_computed: np.ndarray, unfinished: np.ndarray
    ) -> None:
        """Account for one step.

        Args:
            request_ids: request of each row, [num_rows].
            logits: [num_rows, vocab_size], before temperature.
            num_computed: tokens of each row's request computed by the end of this step, prompt included, int
                [num_rows].
            unfinished: bool [num_rows]; a row whose prompt, or whose tokens from before a preemption, are not all
                computed yet samples no token.
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
        slots = self._row_slots[rows]
        positions = num_computed[rows] - self._prompt_lengths[slots]
        arrays = [rows, slots, positions]
        due = self._due(slots, positions) if self._hidden is not None else ()
        if len(due):
            teaching = due[self._teaches[slots[due]]]
            arrays += [rows[due], slots[due], self._num_before[slots[due]], rows[teaching]]
        device_rows, device_slots, device_positions, *device_due = self._upload(arrays)
        confidence = token_stats(logits, device_rows, self._no_tokens[: len(rows)]).confidence
        moments = update_confidence(device_slots, device_positions, confidence, self._means, self._m2s, self._trace)
        self.step = StepValues(len(request_ids), rows, moments)
        if len(due):
            ids = [request_ids[row] for row in rows[due]]
            teaching_ids = [request_ids[row] for row in rows[teaching]]
            scored = self._score(ids, self._detection_lengths[slots[due]], teaching_ids, *device_due)
            self.step = replace(self.step, due=scored)
        self._hidden = self._hidden_rows = None

    def _due(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which of the rows make the last token before their detection, those of one detection length together."""
        detection_lengths = self._detection_lengths[slots]
        due = np.flatnonzero(positions + 1 + self._num_before[slots] == detection_lengths)
        return due[np.argsort(detection_lengths[due], kind="stable")]

    def _score(
        self,
        request_ids: list[str],
        detection_lengths: np.ndarray,
        teaching_ids: list[str],
        rows: torch.Tensor,
        slots: torch.Tensor,
        num_before: torch.Tensor,
        teaching_rows: torch.Tensor,
    ) -> DueRows:
        """Score rows that are due, one detection length after the other (nearly always there is one)."""
        parts: list[torch.Tensor] = []
        versions: list[int] = []
        lengths, starts = np.unique(detection_lengths, return_index=True)
        for length, start, end in zip(lengths.tolist(), starts, [*starts[1:], len(request_ids)], strict=True):
            head = self.heads.get(length)
            num_due = int(end - start)
            trace = self._trace[:, :length].index_select(0, slots[start:end])
            trace_lengths = torch.full((num_due,), length, dtype=torch.int64, device=self._device)
            if head is None:
                logit = torch.full((num_due,), float("nan"), device=self._device)
            else:
                logit = quality_head(self._hidden, self._hidden_positions(rows[start:end]), *head.weights)
            windows = windowed_confidence(trace, trace_lengths, CONFIDENCE_WINDOW_TOKENS)
            windows = windows.masked_fill(num_before[start:end, None] > 0, float("nan"))
            parts.append(torch.cat([logit[:, None], windows], dim=1))
            versions += [0 if head is None else head.version] * num_due
        features = None
        if teaching_ids:
            features = self._hidden.index_select(0, self._hidden_positions(teaching_rows))
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return DueRows(request_ids, versions, values, teaching_ids, features)

    def _hidden_positions(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._hidden_rows is None else self._hidden_rows.index_select(0, rows).long()

    def _upload(self, arrays: Sequence[np.ndarray]) -> Sequence[torch.Tensor]:
        """int64 arrays on the device, in one copy that does not make the host wait: from pinned memory, which torch
        keeps until the copy is done."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        lengths = [len(array) for array in arrays]
        pinned = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        np.concatenate(arrays, out=pinned.numpy())
        return pinned.to(self._device, non_blocking=True).split(lengths)

    def _widen_trace(self, detection_length: int) -> None:
        capacity, width = self._trace.shape
        if detection_length > width:
            new = torch.zeros(capacity, detection_length - width, dtype=torch.float32, device=self._device)
            self._trace = torch.cat([self._trace, new], dim=1)

    def _grow(self) -> None:
        capacity = len(self._means)
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))
        self._means, self._m2s, self._trace, self._no_tokens = (
            torch.cat([state, state]) for state in (self._means, self._m2s, self._trace, self._no_tokens)
        )
        self._prompt_lengths, self._detection_lengths, self._num_before, self._teaches = (
            np.concatenate([values, np.zeros_like(values)])
            for values in (self._prompt_lengths, self._detection_lengths, self._num_before, self._teaches)
        )
