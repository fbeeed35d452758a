"""Hidden states that wait for their reward, on the host.

Invariant: bounded memory; a state is kept until it is taken or the newest ones need its place.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch


class FeatureRing:
    """The last hidden states of scored candidates, by request id. Thread-safe: outputs arrive on a thread of their own.

    Args:
        hidden_size: numbers per state.
        dtype: of the model's hidden states, which are kept as they are.
        max_bytes: memory for all of them; at least one state is kept.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, max_bytes: int) -> None:
        self.capacity = max(1, max_bytes // (hidden_size * dtype.itemsize))
        self._states = torch.empty(self.capacity, hidden_size, dtype=dtype)  # pages are committed when written
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._free: list[int] = []
        self._num_used = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, request_ids: Sequence[str], states: torch.Tensor) -> None:
        """Keep `states` [num_candidates, hidden_size]; a request that has one already keeps its first."""
        with self._lock:
            for row, request_id in enumerate(request_ids):
                if request_id in self._slots:
                    continue
                self._slots[request_id] = slot = self._next_slot()
                self._states[slot] = states[row]

    def take(self, request_ids: Sequence[str]) -> tuple[torch.Tensor, list[int]]:
        """The states that are still there, [num_found, hidden_size], and their positions in `request_ids`."""
        with self._lock:
            taken = [(position, self._slots.pop(id, None)) for position, id in enumerate(request_ids)]
            found = [position for position, slot in taken if slot is not None]
            slots = [slot for _, slot in taken if slot is not None]
            self._free += slots
            return self._states[torch.tensor(slots, dtype=torch.int64)], found

    def hand_over(self, request_ids: Sequence[str]) -> dict[str, torch.Tensor]:
        """Let go of the states of these requests that are still there, each [1, hidden_size]."""
        states, found = self.take(request_ids)
        return {request_ids[position]: states[row : row + 1] for row, position in enumerate(found)}

    def _next_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_used < self.capacity:
            self._num_used += 1
            return self._num_used - 1
        _, oldest = self._slots.popitem(last=False)
        return oldest
