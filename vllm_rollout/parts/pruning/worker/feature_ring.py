"""Hidden states that wait for their reward, on the host.

Invariant: bounded memory; a state is kept until it is taken or the newest ones need its place.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_rollout.parts.pruning.options import PruningOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StateKey(NamedTuple):
    """Names a hidden state: the one that produced output token `num_tokens` of a request."""

    request_id: str
    num_tokens: int
    at_end: bool = False
    """It is, or may be, the last one; kept apart from one of a detection length that is as long."""


class FeatureRing:
    """The hidden states by which candidates were scored. Thread-safe: outputs arrive on a thread of their own.

    Args:
        hidden_size: numbers per state.
        dtype: of the model's hidden states, which are kept as they are.
        max_bytes: memory for all of them; at least one state is kept.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, max_bytes: int) -> None:
        self.hidden_size = hidden_size
        self.capacity = max(1, max_bytes // (hidden_size * dtype.itemsize))
        self._states = torch.empty(self.capacity, hidden_size, dtype=dtype)  # pages are committed when written
        self._slots: OrderedDict[StateKey, int] = OrderedDict()
        self._free: list[int] = []
        self._num_used = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, config: VllmConfig, hidden_size: int, dtype: torch.dtype) -> FeatureRing:
        return cls(hidden_size, dtype, PruningOptions.of(config).feature_ring_bytes)

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, keys: Sequence[StateKey], states: torch.Tensor) -> None:
        """Keep `states` [num_states, hidden_size], in one copy; where there is one already the first is kept.

        Raises: ValueError for states of another width.
        """
        if states.shape[1] != self.hidden_size:
            raise ValueError(f"states must have {self.hidden_size} numbers each, got {states.shape[1]}")
        with self._lock:
            rows: dict[int, int] = {}
            for row, key in enumerate(keys):
                if key not in self._slots:
                    self._slots[key] = slot = self._next_slot()
                    rows[slot] = row  # the last one, where there are more new states than places
            if rows:
                slots, its = torch.tensor([[*rows], [*rows.values()]])
                self._states[slots] = states[its].to(self._states.dtype)

    def take(self, keys: Sequence[StateKey]) -> tuple[torch.Tensor, list[int]]:
        """The states that are still there, [num_found, hidden_size], and their positions in `keys`."""
        with self._lock:
            taken = [(position, self._slots.pop(key, None)) for position, key in enumerate(keys)]
            found = [position for position, slot in taken if slot is not None]
            slots = [slot for _, slot in taken if slot is not None]
            self._free += slots
            return self._states[torch.tensor(slots, dtype=torch.int64)], found

    def drop(self, keys: Sequence[StateKey]) -> None:
        """Free the entries of these keys."""
        with self._lock:
            slots = [self._slots.pop(key, None) for key in keys]
            self._free += [slot for slot in slots if slot is not None]

    def hand_over(self, keys: Sequence[StateKey]) -> dict[StateKey, torch.Tensor]:
        """Let go of those states that are still there, each [1, hidden_size]."""
        states, found = self.take(keys)
        return {keys[position]: states[row : row + 1] for row, position in enumerate(found)}

    def _next_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_used < self.capacity:
            self._num_used += 1
            return self._num_used - 1
        _, oldest = self._slots.popitem(last=False)
        return oldest
