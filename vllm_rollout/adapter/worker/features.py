"""Hidden states as they travel. Invariant: their numbers do not change on the way."""

from __future__ import annotations

import torch

from vllm_rollout.adapter.call_table import Features


def features_of(states: torch.Tensor) -> Features:
    """Of [num_states, hidden_size] on the host."""
    dtype = str(states.dtype).removeprefix("torch.")
    return Features(states.contiguous().view(torch.uint8).numpy().tobytes(), dtype)


def states_of(features: Features, num_states: int) -> torch.Tensor:
    """[num_states, hidden_size]."""
    dtype = getattr(torch, features.dtype)
    return torch.frombuffer(bytearray(features.data), dtype=dtype).reshape(num_states, -1)
