"""The newest hidden states of candidates that are scored at their end.

Which token is a candidate's last one is decided elsewhere, when the next ones may be computed already: so of each
candidate the newest few are kept, and all of them handed over when it has ended, by their numbers.

Invariant: a state that is handed over is of that candidate and of the token of that number. Nothing waits for the
device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_rollout.parts.pruning.worker.feature_ring import StateKey

NONE_YET = -1


@dataclass(frozen=True, slots=True)
class EndedStates:
    """The last states of candidates that have ended."""

    keys: list[StateKey]
    """Cleared when the states have been put into the ring."""
    states: torch.Tensor
    """[num_states, hidden_size]."""


class LastStates:
    """A ring of states in each slot.

    Args:
        capacity: slots.
        num_kept: states of each.
        upload: puts int64 arrays where the states are.
    """

    def __init__(
        self, capacity: int, num_kept: int, upload: Callable[[Sequence[np.ndarray]], Sequence[torch.Tensor]]
    ) -> None:
        self.num_kept = num_kept
        self._upload = upload
        self._states: torch.Tensor | None = None
        """[capacity, num_kept, hidden_size]; made when the first state comes."""
        self._first = np.full(capacity, NONE_YET, dtype=np.int64)
        self._newest = np.full(capacity, NONE_YET, dtype=np.int64)
        """Positions of the first and the newest token seen in each slot."""
        self._ended: list[tuple[StateKey, int]] = []
        """States of candidates that ended, and their slots, which may be another candidate's now."""
        self._under_way: deque[EndedStates] = deque(maxlen=num_kept + 1)
        """States that `take_ended` gave to the reports of the newest steps. These may not have been read yet."""

    def begin(self, slot: int) -> None:
        """Reuse the slot for another candidate."""
        self._first[slot] = self._newest[slot] = NONE_YET

    def see(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        device_slots: torch.Tensor,
        device_positions: torch.Tensor,
        states: torch.Tensor,
    ) -> None:
        """Keep `states` [num_rows, hidden_size] of the tokens at `positions`, int64 [num_rows]; both on the host and
        where the states are. Take those of candidates that ended before: these may need their place."""
        if self._states is None:
            shape = (len(self._newest), self.num_kept, states.shape[1])
            self._states = torch.zeros(shape, dtype=states.dtype, device=states.device)
        self._states[device_slots, device_positions % self.num_kept] = states
        is_first = self._first[slots] == NONE_YET
        self._first[slots[is_first][::-1]] = positions[is_first][::-1]  # of several tokens in a slot the first one
        self._newest[slots] = positions

    def end(self, slot: int, request_id: str) -> None:
        """The candidate in this slot has ended: with its newest token, or with one of those before."""
        newest, first = int(self._newest[slot]), int(self._first[slot])
        if newest == NONE_YET:
            return
        for position in range(max(first, newest - self.num_kept + 1), newest + 1):
            self._ended.append((StateKey(request_id, position + 1, at_end=True), slot))

    @property
    def has_ended(self) -> bool:
        """True if a candidate has ended since the last call of `take_ended`."""
        return bool(self._ended)

    def take_ended(self) -> EndedStates | None:
        """States of candidates that ended since the last call, or None. They are for the report of a step."""
        ended = self._take()
        if ended is not None:
            self._under_way.append(ended)
        return ended

    def take_unread(self, request_ids: Collection[str]) -> EndedStates | None:
        """As `take_ended`, and those of these requests whose report has not been read. The report puts them nowhere
        then."""
        late = [ended for ended in self._under_way if any(key.request_id in request_ids for key in ended.keys)]
        if (new := self._take()) is not None:
            late.append(new)
        keys: list[StateKey] = []
        states: list[torch.Tensor] = []
        for ended in late:
            if its := list(ended.keys):  # a report that is read by another thread clears them
                keys += its
                states.append(ended.states)
                ended.keys.clear()
        return EndedStates(keys, torch.cat(states)) if keys else None

    def _take(self) -> EndedStates | None:
        """In one copy, however many have ended."""
        ended, self._ended = self._ended, []
        if not ended or self._states is None:
            return None
        slots = np.array([slot for _, slot in ended], dtype=np.int64)
        places = np.array([(key.num_tokens - 1) % self.num_kept for key, _ in ended], dtype=np.int64)
        device_slots, device_places = self._upload([slots, places])
        return EndedStates([key for key, _ in ended], self._states[device_slots, device_places])

    def grow(self) -> None:
        """Double the number of slots."""
        empty = np.full_like(self._newest, NONE_YET)
        self._first, self._newest = (np.concatenate([old, empty]) for old in (self._first, self._newest))
        if self._states is not None:
            self._states = torch.cat([self._states, torch.zeros_like(self._states)])
