"""Scores candidates at their detection lengths and at their ends, by the hidden states of their tokens.

Invariant: a score is a function of the candidate, the position of its token and the head. Nothing here waits for the
device, except `take_last_states`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS, MAX_TRIAL_LENGTHS
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.observing.tracker.rows import RowsPart, SeenRows
from vllm_rollout.parts.observing.tracker.tracker import CandidateTracker
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey
from vllm_rollout.parts.pruning.rules.step import TERMS
from vllm_rollout.parts.pruning.wire import LastLogits
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing
from vllm_rollout.parts.pruning.worker.last_states import EndedStates, LastStates
from vllm_rollout.parts.pruning.worker.operators import quality_head, windowed_confidence
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights, head_shapes
from vllm_rollout.parts.pruning.worker.scored_rows import DueRows, ScoredRows

UNSCORED = 0
"""Detection length of a candidate that is not scored."""
MANY_STEPS = 1 << 30
"""A number of steps so large that no candidate of the batch becomes due."""
_NONE = np.zeros(0, dtype=np.int64)
NUMBERS_DUE = (1, 17)
"""One row, and more than a program of quality_head takes: its two variants."""


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A trained head on the device."""

    version: int
    weights: HeadWeights


class Scorer(RowsPart):
    """The scored candidates of a tracker, by slot. Costs a step one call while no candidate is scored."""

    def __init__(self, tracker: CandidateTracker, ring: FeatureRing, num_in_flight: int = 1) -> None:
        """`num_in_flight`: tokens of a candidate that may still be computed when it has ended."""
        self._tracker, self._ring = tracker, ring
        self._last_states = LastStates(tracker.capacity, num_in_flight + 1, tracker.upload)
        self._detection_lengths = np.full((tracker.capacity, 1 + MAX_TRIAL_LENGTHS), UNSCORED, dtype=np.int64)
        """For each slot its own length, then those on trial."""
        self._is_final = np.zeros(tracker.capacity, dtype=np.bool_)
        self._num_before = np.zeros(tracker.capacity, dtype=np.int64)
        self._adapters = np.zeros(tracker.capacity, dtype=np.int64)
        """For each slot the place of its adapter in `_adapter_names`: numbers, which sort as arrays."""
        self._adapter_names = [BASE_MODEL]
        self._steps_before_due = 0
        """Steps in which no candidate of the last step can be due, if each of them goes on by one token."""
        self._last_seen = _NONE, _NONE
        """Slots and positions of the tokens of the step before."""
        self._due_now, self._sees_last = _NONE, False
        """Tokens of this step that are due, and if some may be last ones: between `choose` and `see_rows`."""
        self.heads: dict[HeadKey, PublishedHead] = {}
        """An entry is replaced whole."""

    @property
    def num_last_states(self) -> int:
        """Number of states per ending candidate that may be its last state."""
        return self._last_states.num_kept

    def observes(self, tag: CandidateTag) -> bool:
        return TERMS.of(tag.terms.parts) is not None

    def begin(self, slot: int, tag: CandidateTag, adapter: str) -> None:
        if (terms := TERMS.of(tag.terms.parts)) is not None:
            plan = terms.plan
            lengths = plan.detection_length, *plan.tried_lengths
            self.score(slot, lengths, num_before=tag.num_resumed, final=plan.final_score, adapter=adapter)

    def score(
        self,
        slot: int,
        lengths: Sequence[int],
        *,
        num_before: int = 0,
        final: bool = False,
        adapter: str = BASE_MODEL,
    ) -> None:
        """Score the candidate in a slot.

        `lengths`: its detection length, then those on trial. `num_before`: output tokens at the end of its prompt. Its
        lengths count from the first of them, and its trace confidence, of which theirs is a part, is not known.
        `final`: score it by its last token, too. `adapter`: whose head scores it.
        """
        self._adapters[slot] = self._number_of(adapter)
        self.num_wanting += 1
        self._steps_before_due = 0
        self._detection_lengths[slot, : len(lengths)] = lengths
        self._num_before[slot] = num_before
        self._is_final[slot] = final
        self._last_states.begin(slot)
        self._tracker.keep_trace(slot, max(lengths))

    def scored_at(self, request_id: str) -> list[int]:
        """Lengths at which a request is scored. None for one that is not."""
        slot = self._tracker.slot_of(request_id)
        return [] if slot is None else [length for length in self._detection_lengths[slot].tolist() if length]

    def end(self, slot: int, request_id: str) -> None:
        self.num_wanting -= int(self._detection_lengths[slot, 0] != UNSCORED)
        self._steps_before_due = 0
        self._detection_lengths[slot] = UNSCORED
        if self._is_final[slot]:
            self._last_states.end(slot, request_id)
            self._is_final[slot] = False
        self._adapters[slot] = 0

    def forget_all(self) -> None:
        self.num_wanting, self._steps_before_due = 0, 0
        self._detection_lengths[:], self._is_final[:], self._adapters[:] = UNSCORED, False, 0

    def grow(self) -> None:
        per_slot = self._detection_lengths, self._is_final, self._num_before, self._adapters
        self._detection_lengths, self._is_final, self._num_before, self._adapters = (
            np.concatenate([values, np.zeros_like(values)]) for values in per_slot
        )
        self._last_states.grow()

    def choose(self, rows: SeenRows) -> Sequence[np.ndarray] | None:
        due, self._sees_last = _NONE, False
        if rows.hidden is not None:
            slots = rows.slots
            if not self._none_can_be_due(slots, rows.positions):
                due = self._due(slots, rows.positions)
            self._sees_last = self._is_final[slots].any()
        self._due_now = due
        if len(due):
            return [rows.seen.logit_rows[due], rows.slots[due], self._num_before[rows.slots[due]]]
        return () if self._sees_last or self._last_states.has_ended else None

    def see_rows(self, rows: SeenRows, chosen: Sequence[torch.Tensor]) -> ScoredRows:
        ended = self._last_states.take_ended()
        due = self._score(rows, self._due_now, *chosen) if len(self._due_now) else None
        last = self._see_last(rows) if self._sees_last else None
        return ScoredRows(self._ring, due, last, ended)

    def warm_up(self, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        if hidden.shape[1] != self._ring.hidden_size:
            self.refusal = (
                f"pruning does not work with this model: its last hidden states have {hidden.shape[1]} numbers, and "
                f"its configuration says {self._ring.hidden_size}. Leave pruning out."
            )
            return
        one = torch.ones(1, dtype=torch.int64, device=hidden.device)
        windowed_confidence(torch.zeros(1, 1, device=hidden.device), one, CONFIDENCE_WINDOW_TOKENS)
        weights = [torch.zeros(shape, device=hidden.device) for shape in head_shapes(hidden.shape[1])]
        for num_due in NUMBERS_DUE:
            quality_head(hidden, torch.zeros(num_due, dtype=torch.int64, device=hidden.device), *weights)

    def take_last_states(self, request_ids: Sequence[str]) -> EndedStates | None:
        """States of candidates that have ended. Waits for the device.

        These candidates are found before their end is known here, and while their report is unread.
        """
        for request_id in request_ids:
            slot = self._tracker.slot_of(request_id)
            if slot is not None and self._is_final[slot]:
                self._last_states.end(slot, request_id)
                self._is_final[slot] = False
        ended = self._last_states.take_unread({*request_ids})
        return None if ended is None else replace(ended, states=ended.states.cpu())

    def _see_last(self, rows: SeenRows) -> LastLogits | None:
        """Keep the states of tokens that may be the last ones, and score them."""
        final = np.flatnonzero(self._is_final[rows.slots])
        final = final[np.argsort(self._adapters[rows.slots[final]], kind="stable")]
        seen, slots, positions = rows.seen.some(final), rows.slots[final], rows.positions[final]
        device_rows, device_slots, device_positions = self._tracker.upload([seen.logit_rows, slots, positions])
        states = rows.hidden.index_select(0, rows.states_at(device_rows))
        self._last_states.see(slots, positions, device_slots, device_positions, states)
        logits, versions = self._logits(self._by_head(slots, np.full_like(slots, WHOLE)), rows, device_rows)
        return LastLogits(seen.rows, seen.tokens, logits, np.array(versions)) if any(versions) else None

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
        if not self.num_wanting:  # no slot has a name, however many there have been
            del self._adapter_names[1:]
        if adapter not in self._adapter_names:
            self._adapter_names.append(adapter)
        return self._adapter_names.index(adapter)

    def _score(
        self,
        rows: SeenRows,
        due: np.ndarray,
        device_rows: torch.Tensor,
        device_slots: torch.Tensor,
        num_before: torch.Tensor,
    ) -> DueRows:
        """Score tokens that are due, those of one head after those of the other (nearly always there is one)."""
        request_ids = [rows.request_ids[row] for row in rows.seen.rows[due]]
        slots = rows.slots[due]
        heads = self._by_head(slots, rows.positions[due] + 1 + self._num_before[slots])
        logits, versions = self._logits(heads, rows, device_rows)
        parts: list[torch.Tensor] = []
        reached: list[int] = []
        for key, its in heads:
            length, num_due = key.detection_length, its.stop - its.start
            trace = self._tracker.trace[:, :length].index_select(0, device_slots[its])
            trace_lengths = torch.full((num_due,), length, dtype=torch.int64, device=self._tracker.device)
            windows = windowed_confidence(trace, trace_lengths, CONFIDENCE_WINDOW_TOKENS)
            parts.append(windows.masked_fill(num_before[its, None] > 0, float("nan")))
            reached += [length] * num_due
        values = torch.cat([logits[:, None], _together(parts)], dim=1)
        features = rows.hidden.index_select(0, rows.states_at(device_rows))
        return DueRows(request_ids, reached, versions, values, features)

    def _logits(
        self, heads: list[tuple[HeadKey, slice]], seen: SeenRows, rows: torch.Tensor
    ) -> tuple[torch.Tensor, list[int]]:
        """Logits of heads for rows, float32 [num_rows], NaN without a trained head, and each row's head version."""
        parts: list[torch.Tensor] = []
        versions: list[int] = []
        for key, its in heads:
            head, num_rows = self.heads.get(key), its.stop - its.start
            if head is None:
                parts.append(torch.full((num_rows,), float("nan"), device=self._tracker.device))
            else:
                parts.append(quality_head(seen.hidden, seen.states_at(rows[its]), *head.weights))  # type: ignore[arg-type]
            versions += [0 if head is None else head.version] * num_rows
        return _together(parts), versions


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
