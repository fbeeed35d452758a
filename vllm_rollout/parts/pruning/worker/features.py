"""Hidden states as bytes. Invariant: their values do not change in transit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from vllm_rollout.parts.pruning.calls import Features
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey

_DECODER = msgspec.msgpack.Decoder(dict[int, Features])


def features_of(states: torch.Tensor) -> Features:
    """Features of states on the host, [num_states, hidden_size]."""
    dtype = str(states.dtype).removeprefix("torch.")
    return Features(states.contiguous().view(torch.uint8).numpy().tobytes(), dtype)  # type: ignore[arg-type]


def states_of(features: Features, num_states: int) -> torch.Tensor:
    """States of features, [num_states, hidden_size]."""
    dtype = getattr(torch, features.dtype)
    return torch.frombuffer(bytearray(features.data), dtype=dtype).reshape(num_states, -1)


def detach(ring: FeatureRing, request_id: str, lengths: Sequence[int]) -> bytes:
    """Take the states of a candidate that leaves out of the ring, as far as they are there, by length. Nothing for a
    candidate without states.
    """
    states = ring.hand_over([StateKey(request_id, length) for length in lengths])
    features = {key.num_tokens: features_of(state) for key, state in states.items()}
    return msgspec.msgpack.encode(features) if features else b""


def attach(ring: FeatureRing, request_id: str, data: bytes) -> None:
    """Put the states that came with a candidate into the ring."""
    for length, features in _DECODER.decode(data).items():
        ring.put([StateKey(request_id, length)], states_of(features, 1))
