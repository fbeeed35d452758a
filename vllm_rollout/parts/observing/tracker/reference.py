"""The specification of the tracker's operators, in torch and on any device. Invariant: obvious before fast.

What an operator takes, gives and refuses is said in `vllm_rollout.parts.observing.tracker.ops`, where it is called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rollout.parts.observing.tracker.arguments import (
    check_token_confidence,
    check_update_confidence,
)


def token_confidence_reference(logits: Tensor, rows: Tensor) -> Tensor:
    """Torch reference of the operator. It writes several temporary tensors of [num_seen, vocab_size]."""
    check_token_confidence(logits, rows)
    z = logits.index_select(0, rows).float()
    # z - logsumexp(z) would lose the digits of a distribution around logits of 1e4. A row with nothing left, a NaN
    # or +inf is NaN throughout from here on.
    logprobs = z.log_softmax(dim=1)
    unmasked = z != -torch.inf
    return torch.where(unmasked, -logprobs, 0.0).sum(dim=1) / unmasked.sum(dim=1)


def update_confidence_reference(
    slots: Tensor, positions: Tensor, values: Tensor, means: Tensor, m2s: Tensor, trace: Tensor
) -> Tensor:
    """Nothing is selected by a condition, which would make the host wait: an entry that must stay is written again."""
    check_update_confidence(slots, positions, values, means, m2s, trace)
    num_kept, trace_length = means.shape[1], trace.shape[1]
    before, after = positions % num_kept, (positions + 1) % num_kept
    is_first = positions == 0
    old_mean = means[slots, before].masked_fill(is_first, 0.0)
    old_m2 = m2s[slots, before].masked_fill(is_first, 0.0)
    counts = (positions + 1).float()
    delta = values - old_mean
    mean = old_mean + delta / counts
    m2 = old_m2 + delta * (values - mean)
    means.index_put_((slots, after), mean)
    m2s.index_put_((slots, after), m2)
    if trace_length:
        column = positions.clamp(max=trace_length - 1)
        trace.index_put_((slots, column), values.where(positions < trace_length, trace[slots, column]))
    return torch.stack([mean, (m2 / counts).sqrt()], dim=1)
