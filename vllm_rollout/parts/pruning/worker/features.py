"""Hidden states as bytes. Invariant: their values do not change in transit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from vllm_rollout.kernel.call_table import Features
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey


def features_of(states: torch.Tensor) -> Features:
    """Features of states on the host, [num_states, hidden_size]."""
    dtype = str(states.dtype).removeprefix("torch.")
    return Features(states.contiguous().view(torch.uint8).numpy().tobytes(), dtype)  # type: ignore[arg-type]


def states_of(features: Features, num_states: int) -> torch.Tensor:
    """States of features, [num_states, hidden_size]."""
    dtype = getattr(torch, features.dtype)
    return torch.frombuffer(bytearray(features.data), dtype=dtype).reshape(num_states, -1)


def detach(ring: FeatureRing, scored_at: Mapping[str, Iterable[int]]) -> dict[str, dict[int, Features]]:
    """Take the remaining states of candidates that leave out of the ring, by request id and length.

    `scored_at`: lengths at which each candidate is scored.
    """
    keys = [StateKey(request_id, length) for request_id, lengths in scored_at.items() for length in lengths]
    features: dict[str, dict[int, Features]] = {request_id: {} for request_id in scored_at}
    for (request_id, length, _), state in ring.hand_over(keys).items():
        features[request_id][length] = features_of(state)
    return features


def attach(ring: FeatureRing, request_id: str, features: Mapping[int, Features]) -> None:
    """Put the states that came with a candidate into the ring, by length."""
    for length, its in features.items():
        ring.put([StateKey(request_id, length)], states_of(its, 1))
