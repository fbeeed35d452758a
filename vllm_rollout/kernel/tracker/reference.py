"""The specification of every operator, in torch and on any device. Invariant: obvious before fast.

What an operator takes, gives and refuses is said in `vllm_rollout.kernel.tracker.ops`, where it is called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rollout.kernel.tracker.arguments import (
    check_quality_head,
    check_token_confidence,
    check_update_confidence,
    check_windowed_confidence,
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


def quality_head_reference(hidden: Tensor, rows: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Writes the due rows in float32 and [num_due, num_hidden]."""
    check_quality_head(hidden, rows, w1, b1, w2, b2)
    if not len(rows):
        return hidden.new_empty(0, dtype=torch.float32)
    due = hidden.index_select(0, rows).float()
    return torch.addmv(b2, torch.addmm(b1, due, w1.T).relu(), w2)


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


def windowed_confidence_reference(trace: Tensor, lengths: Tensor, window: int) -> Tensor:
    """Window sums are differences of prefix sums, so that nothing of [num_due, max_len, window] is written.
    The prefix sums are float64, so that differences keep their digits."""
    check_windowed_confidence(trace, lengths, window)
    num_due, max_len = trace.shape
    positions = torch.arange(max_len + 1, device=trace.device)
    prefix = trace.new_zeros(num_due, max_len + 1, dtype=torch.float64)
    within = positions[:max_len] < lengths[:, None]
    torch.cumsum(trace.double().masked_fill_(~within, 0.0), dim=1, out=prefix[:, 1:])

    num_windows = (lengths - window + 1).clamp(min=1)
    starts = positions[: max(max_len - window + 1, 1)]
    ends = torch.minimum(starts + window, lengths[:, None])
    sums = prefix.gather(1, ends) - prefix[:, : len(starts)]
    window_means = (sums / lengths.clamp(max=window)[:, None]).masked_fill_(starts >= num_windows[:, None], torch.inf)
    lowest = window_means.topk(max(len(starts) // 10, 1), dim=1, largest=False).values  # ascending
    num_lowest = (num_windows // 10).clamp(min=1)[:, None]
    bottom = lowest.where(positions[: lowest.shape[1]] < num_lowest, 0.0).sum(dim=1) / num_lowest[:, 0]

    mean = prefix[:, -1] / lengths
    # Among the lowest a NaN is the last: the mean alone says that there was one, or an infinity.
    return torch.stack([mean, lowest[:, 0], bottom], dim=1).float().masked_fill_(~mean.isfinite()[:, None], torch.nan)
