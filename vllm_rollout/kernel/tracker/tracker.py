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

from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS, MAX_TRIAL_LENGTHS
from vllm_rollout.kernel.rules.types import BASE_MODEL, WHOLE, HeadKey
from vllm_rollout.kernel.tracker.ops import quality_head, token_confidence, update_confidence, windowed_confidence
from vllm_rollout.kernel.tracker.step_values import DueRows, LastLogits, StepValues
from vllm_rollout.kernel.tracker.verified import NO_POSITION, SeenTokens, VerifiedDrafts
from vllm_rollout.parts.pruning.worker.last_states import EndedStates, LastStates
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights

NO_SLOT = -1
"""The slot of a row that is no candidate's."""
UNSCORED = 0
"""Detection length of a candidate that is not scored."""
MANY_STEPS = 1 << 30
"""A number of steps so large that no candidate of the batch becomes due."""
NUM_KEPT = 16
"""States kept of each candidate: that many tokens less one may be dropped, a step of each stage of a pipeline and of
the asynchronous loop, or the drafts of one step."""


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A trained head on the device."""

    version: int
    weights: HeadWeights


@dataclass(frozen=True, slots=True)
class TrackedCandidate:
    """A candidate's statistics, on their way to the tracker of another worker."""

    num_prompt_tokens: int
    detection_length: int
    """Tokens after which the candidate is scored; UNSCORED if it is not."""
    num_before: int
    statistics: bytes
    """float32: NUM_KEPT means, as many sums of squares, then the trace up to its last detection length."""
    trial_lengths: tuple[int, ...] = ()
    final: bool = False
    """True if the candidate is scored at its end as well."""
    adapter: str = BASE_MODEL
    """Name of the adapter whose head scores the candidate."""

    @property
    def scored_at(self) -> tuple[int, ...]:
        return () if self.detection_length == UNSCORED else (self.detection_length, *self.trial_lengths)


class CandidateTracker:
    """Token confidence of every candidate in the worker, and the score of those that are due.

    Per step: `see_hidden_states`, then `observe` the logits; `step` holds what they showed. Costs nothing while there
    is no candidate.
    """

    def __init__(self, device: torch.device, capacity: int = 256, num_in_flight: int = 1) -> None:
        """`num_in_flight`: tokens of a candidate that may still be computed when it has ended."""
        self._device = device
        self.last_states = LastStates(capacity, num_in_flight + 1)
        self._slots: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._means = torch.zeros(capacity, NUM_KEPT, dtype=torch.float32, device=device)
        self._m2s = torch.zeros(capacity, NUM_KEPT, dtype=torch.float32, device=device)
        self._trace = torch.zeros(capacity, 0, dtype=torch.float32, device=device)
        """As long as the longest detection length so far."""
        self._prompt_lengths = np.zeros(capacity, dtype=np.int64)
        self._detection_lengths = np.full((capacity, 1 + MAX_TRIAL_LENGTHS), UNSCORED, dtype=np.int64)
        """For each slot its own length, then those on trial."""
        self._is_final = np.zeros(capacity, dtype=np.bool_)
        self._num_before = np.zeros(capacity, dtype=np.int64)
        self._adapters = np.zeros(capacity, dtype=np.int64)
        """For each slot the place of its adapter in `_adapter_names`: numbers, which sort as arrays."""
        self._adapter_names = [BASE_MODEL]
        self._num_scored = 0
        """Candidates that have a detection length."""
        self._last_ids: list[str] | None = None
        self._row_slots = np.zeros(0, dtype=np.int64)
        """The slots of `_last_ids`."""
        self._steps_before_due = 0
        """Steps in which no candidate of `_last_ids` can be due, if each of them goes on by one token."""
        self._last_seen = self._row_slots, self._row_slots
        """Slots and positions of the tokens of the step before."""
        self._hidden: torch.Tensor | None = None
        self._hidden_rows: torch.Tensor | None = None
        self.heads: dict[HeadKey, PublishedHead] = {}
        """An entry is replaced whole."""
        self.step: StepValues | None = None
        """Values of the step that was observed last. None without candidates."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_last_states(self) -> int:
        """Number of states per ending candidate that may be its last state."""
        return self.last_states.num_kept

    def add(
        self,
        request_id: str,
        num_prompt_tokens: int,
        detection_length: int | None = None,
        *,
        num_before: int = 0,
        trial_lengths: Sequence[int] = (),
        final: bool = False,
        adapter: str = BASE_MODEL,
    ) -> None:
        """Start observing a request; again for one that was preempted changes nothing.

        `num_before`: output tokens at the end of its prompt: its detection length counts from the first of them, and
        its trace confidence, of which theirs is a part, is not known. `trial_lengths`: where it is scored as well.
        `final`: and by its last token. `adapter`: whose head scores it.
        """
        if request_id in self._slots:
            return
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[request_id] = slot
        self._last_ids = None
        self._prompt_lengths[slot] = num_prompt_tokens
        if detection_length is not None:
            lengths = (detection_length, *trial_lengths)
            self._adapters[slot] = self._number_of(adapter)
            self._num_scored += 1
            self._detection_lengths[slot, : len(lengths)] = lengths
            self._num_before[slot] = num_before
            self._is_final[slot] = final
            self.last_states.begin(slot)
            self._widen_trace(max(lengths))

    def discard(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self._last_ids = None
            self._num_scored -= int(self._detection_lengths[slot, 0] != UNSCORED)
            self._detection_lengths[slot] = UNSCORED
            if self._is_final[slot]:
                self.last_states.end(slot, request_id)
                self._is_final[slot] = False
            self._adapters[slot] = 0

    def forget_all(self) -> list[str]:
        """Observe nobody any more, whatever state this is in. Returns whom it observed."""
        request_ids, capacity = list(self._slots), len(self._adapters)
        self._slots, self._free, self._last_ids = {}, list(range(capacity - 1, -1, -1)), None
        self._num_scored, self._steps_before_due = 0, 0
        self._detection_lengths[:], self._is_final[:], self._adapters[:] = UNSCORED, False, 0
        self.step = self._hidden = self._hidden_rows = None
        return request_ids

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
                int(self._detection_lengths[slot, 0]),
                int(self._num_before[slot]),
                row[: 2 * NUM_KEPT + int(self._detection_lengths[slot].max())].numpy().tobytes(),
                tuple(length for length in self._detection_lengths[slot, 1:].tolist() if length != UNSCORED),
                bool(self._is_final[slot]),
                self._adapter_names[self._adapters[slot]],
            )
            for (request_id, slot), row in zip(slots.items(), kept, strict=True)
        }

    def restore(self, request_id: str, tracked: TrackedCandidate) -> None:
        """Go on observing a request of another worker, or one that was discarded here."""
        self.discard(request_id)
        length = None if tracked.detection_length == UNSCORED else tracked.detection_length
        self.add(
            request_id,
            tracked.num_prompt_tokens,
            length,
            num_before=tracked.num_before,
            trial_lengths=tracked.trial_lengths,
            final=tracked.final,
            adapter=tracked.adapter,
        )
        slot = self._slots[request_id]
        statistics = torch.frombuffer(bytearray(tracked.statistics), dtype=torch.float32).to(self._device)
        self._means[slot], self._m2s[slot] = statistics[:NUM_KEPT], statistics[NUM_KEPT : 2 * NUM_KEPT]
        self._trace[slot, : len(statistics) - 2 * NUM_KEPT] = statistics[2 * NUM_KEPT :]

    def start_step(self) -> None:
        """Forget the previous step's values."""
        self.step = self._hidden = self._hidden_rows = None

    def see_hidden_states(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """The states this step's logits are made of, [num_rows, hidden_size], or [num_tokens, hidden_size] and `rows`,
        int32 or int64 [num_rows], that picks them."""
        if self._num_scored:
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
            self._steps_before_due = 0
        rows = np.flatnonzero((self._row_slots != NO_SLOT) & ~unfinished)
        if not len(rows):
            return
        seen = SeenTokens.one_of_each(rows) if verified is None else verified.seen(rows)
        slots = self._row_slots[seen.rows]
        positions = num_computed[seen.rows] - self._prompt_lengths[slots] + seen.tokens
        arrays = [seen.logit_rows, slots, positions]
        due = () if self._hidden is None or self._none_can_be_due(slots, positions) else self._due(slots, positions)
        if len(due):
            arrays += [seen.logit_rows[due], slots[due], self._num_before[slots[due]]]
        device_rows, device_slots, device_positions, *device_due = self._upload(arrays)
        confidence = token_confidence(logits, device_rows)
        statistics = (self._means, self._m2s, self._trace)
        if verified is None:
            moments = update_confidence(device_slots, device_positions, confidence, *statistics)
        else:
            moments = torch.cat(
                [
                    update_confidence(device_slots[its], device_positions[its], confidence[its], *statistics)
                    for its in seen.of_each_token
                ]
            )
        self.step = StepValues(len(request_ids), seen.rows, seen.tokens, moments)
        if verified is not None:
            first = np.full(len(request_ids), NO_POSITION, dtype=np.int64)
            first[rows] = num_computed[rows] - self._prompt_lengths[self._row_slots[rows]]
            self.step = replace(self.step, first_positions=first)
        if len(due):
            ids = [request_ids[row] for row in seen.rows[due]]
            reached = positions[due] + 1 + self._num_before[slots[due]]
            self.step = replace(self.step, due=self._score(ids, self._by_head(slots[due], reached), *device_due))
        if self._hidden is not None and self._is_final[slots].any():
            self._see_last(seen, slots, positions)
        if (ended := self.last_states.take_ended()) is not None:
            self.step = replace(self.step, ended=ended)
        self._hidden = self._hidden_rows = None

    def take_last_states(self, request_ids: Sequence[str]) -> EndedStates | None:
        """States of candidates that have ended, and of these even if nobody has said so here yet. Waits for the
        device."""
        for request_id in request_ids:
            slot = self._slots.get(request_id)
            if slot is not None and self._is_final[slot]:
                self.last_states.end(slot, request_id)
                self._is_final[slot] = False
        ended = self.last_states.take_ended()
        return None if ended is None else replace(ended, states=ended.states.cpu())

    def _see_last(self, seen: SeenTokens, slots: np.ndarray, positions: np.ndarray) -> None:
        """Keep the states of tokens that may be the last ones, and score them."""
        final = np.flatnonzero(self._is_final[slots])
        final = final[np.argsort(self._adapters[slots[final]], kind="stable")]
        seen, slots, positions = seen.some(final), slots[final], positions[final]
        device_rows, device_slots, device_positions = self._upload([seen.logit_rows, slots, positions])
        states = self._hidden.index_select(0, self._hidden_positions(device_rows))
        self.last_states.see(slots, positions, device_slots, device_positions, states)
        logits, versions = self._logits(self._by_head(slots, np.full_like(slots, WHOLE)), device_rows)
        if any(versions):
            self.step = replace(self.step, last=LastLogits(seen.rows, seen.tokens, logits, np.array(versions)))  # type: ignore[type-var]

    def _none_can_be_due(self, slots: np.ndarray, positions: np.ndarray) -> bool:
        """True if an earlier step showed that no candidate can be due in this step.

        Each candidate has gone on by one token since then. A look at all lengths of 1,024 candidates takes 40
        microseconds of the host.
        """
        last_slots, last_positions = self._last_seen
        goes_on = (
            self._steps_before_due > 0
            and np.array_equal(slots, last_slots)
            and np.array_equal(positions, last_positions + 1)
        )
        self._last_seen = slots, positions
        self._steps_before_due = self._steps_before_due - 1 if goes_on else 0
        return goes_on

    def _due(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Tokens that are the last before a detection, grouped by head.

        A candidate that reaches several detection lengths in one step is scored at its own, or else at the first.
        """
        reached = positions + 1 + self._num_before[slots]
        ahead = self._detection_lengths[slots] - reached[:, None]
        of_its_lengths = ahead == 0
        later = ahead[ahead > 0]  # UNSCORED lies behind everybody
        self._steps_before_due = int(later.min()) - 1 if len(later) else MANY_STEPS
        due = np.flatnonzero(of_its_lengths.any(axis=1))
        if len(due) > 1:
            is_trial = ~of_its_lengths[due, 0]
            due = due[np.lexsort((positions[due], is_trial))]
            due = due[np.unique(slots[due], return_index=True)[1]]
        return due[np.lexsort((self._adapters[slots[due]], reached[due]))]

    def _by_head(self, slots: np.ndarray, lengths: np.ndarray) -> list[tuple[HeadKey, slice]]:
        """The head that scores each slot at its length. Rows of one head are adjacent."""
        adapters = self._adapters[slots]
        starts = np.flatnonzero((np.diff(lengths, prepend=-1) != 0) | (np.diff(adapters, prepend=-1) != 0)).tolist()
        return [
            (HeadKey(int(lengths[start]), self._adapter_names[adapters[start]]), slice(start, end))
            for start, end in zip(starts, [*starts[1:], len(slots)], strict=True)
        ]

    def _number_of(self, adapter: str) -> int:
        if not self._num_scored:  # no slot has a name, however many there have been
            del self._adapter_names[1:]
        if adapter not in self._adapter_names:
            self._adapter_names.append(adapter)
        return self._adapter_names.index(adapter)

    def _score(
        self,
        request_ids: list[str],
        heads: list[tuple[HeadKey, slice]],
        rows: torch.Tensor,
        slots: torch.Tensor,
        num_before: torch.Tensor,
    ) -> DueRows:
        """Score rows that are due, those of one head after those of the other (nearly always there is one)."""
        logits, versions = self._logits(heads, rows)
        parts: list[torch.Tensor] = []
        reached: list[int] = []
        for key, its in heads:
            length, num_due = key.detection_length, its.stop - its.start
            trace = self._trace[:, :length].index_select(0, slots[its])
            trace_lengths = torch.full((num_due,), length, dtype=torch.int64, device=self._device)
            windows = windowed_confidence(trace, trace_lengths, CONFIDENCE_WINDOW_TOKENS)
            parts.append(windows.masked_fill(num_before[its, None] > 0, float("nan")))
            reached += [length] * num_due
        values = torch.cat([logits[:, None], _together(parts)], dim=1)
        features = self._hidden.index_select(0, self._hidden_positions(rows))
        return DueRows(request_ids, reached, versions, values, features)

    def _logits(self, heads: list[tuple[HeadKey, slice]], rows: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Logits of heads for rows, float32 [num_rows], NaN without a trained head, and each row's head version."""
        parts: list[torch.Tensor] = []
        versions: list[int] = []
        for key, its in heads:
            head, num_rows = self.heads.get(key), its.stop - its.start
            if head is None:
                parts.append(torch.full((num_rows,), float("nan"), device=self._device))
            else:
                parts.append(quality_head(self._hidden, self._hidden_positions(rows[its]), *head.weights))  # type: ignore[arg-type]
            versions += [0 if head is None else head.version] * num_rows
        return _together(parts), versions

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
        self._means, self._m2s, self._trace = (
            torch.cat([state, state]) for state in (self._means, self._m2s, self._trace)
        )
        per_slot = (
            self._prompt_lengths,
            self._detection_lengths,
            self._num_before,
            self._is_final,
            self._adapters,
        )
        self._prompt_lengths, self._detection_lengths, self._num_before, self._is_final, self._adapters = (
            np.concatenate([values, np.zeros_like(values)]) for values in per_slot
        )
        self.last_states.grow()


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
