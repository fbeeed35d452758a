"""The specification of every operator, in torch and on any device. Invariant: obvious before fast.

What an operator takes, gives and refuses is said in `vllm_rollout.tracker.ops`, where it is called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rollout.tracker.arguments import (
    NO_SLOT,
    NO_TOKEN,
    check_group_moments,
    check_quality_head,
    check_token_stats,
    check_update_group_lengths,
    check_update_lengths,
    check_windowed_confidence,
)


class TokenStats(NamedTuple):
    """Per row of logits, float32 [num_rows] each."""

    logprob: Tensor
    """Natural logarithm of the sampled token's probability; NaN for a row without a token."""
    entropy: Tensor
    """Entropy of the distribution over the vocabulary, in nats."""
    confidence: Tensor
    """Mean over the vocabulary of -log(probability), in nats; larger for a more peaked distribution."""


class GroupMoments(NamedTuple):
    """Lengths of each group's candidates, float32 [num_groups, 3] each: number, mean, M2.

    M2 is the sum of squared differences from the mean. A group without such candidates has (0, 0, 0), which is
    neutral when moments are merged.
    """

    live: Tensor
    finished: Tensor


class GroupLengths(NamedTuple):
    """What one step gives when both are wanted."""

    running_means: Tensor
    """float32 [num_rows], as `update_lengths` returns them."""
    moments: GroupMoments
    """Of the lengths after the update."""


def token_stats_reference(logits: Tensor, sampled: Tensor) -> TokenStats:
    """Writes several tensors of [num_rows, vocab_size]."""
    check_token_stats(logits, sampled)
    z = logits.float()
    # Not z - logsumexp(z), which loses the digits of a distribution around logits of 1e4. A row with nothing left,
    # a NaN or +inf is NaN throughout from here on.
    logprobs = z.log_softmax(dim=1)
    unmasked = z != -torch.inf
    surprisal = torch.where(unmasked, -logprobs, 0.0)
    logprob = logprobs.gather(1, sampled.clamp(min=0)[:, None])[:, 0]
    return TokenStats(
        logprob=logprob.masked_fill(sampled == NO_TOKEN, torch.nan),
        entropy=(logprobs.exp() * surprisal).sum(dim=1),
        confidence=surprisal.sum(dim=1) / unmasked.sum(dim=1),
    )


def quality_head_reference(hidden: Tensor, rows: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Writes the due rows in float32 and [num_due, num_hidden]."""
    check_quality_head(hidden, rows, w1, b1, w2, b2)
    if not len(rows):
        return hidden.new_empty(0, dtype=torch.float32)
    due = hidden.index_select(0, rows).float()
    return torch.addmv(b2, torch.addmm(b1, due, w1.T).relu(), w2)


def update_lengths_reference(slots: Tensor, values: Tensor, counts: Tensor, means: Tensor, m2s: Tensor) -> Tensor:
    """Nothing is selected by a condition, which would make the host wait: a row without a slot adds 0 to slot 0."""
    check_update_lengths(slots, values, counts, means, m2s)
    is_candidate = slots != NO_SLOT
    index = slots.clamp(min=0)
    counts.index_add_(0, index, is_candidate.float())
    delta = values - means[index]
    means.index_add_(0, index, torch.where(is_candidate, delta / counts[index], 0.0))
    running_means = means[index]
    m2s.index_add_(0, index, torch.where(is_candidate, delta * (values - running_means), 0.0))
    return running_means.masked_fill(~is_candidate, torch.nan)


def group_moments_reference(counts: Tensor, groups: Tensor, finished: Tensor, num_groups: int) -> GroupMoments:
    """In float64, where sums of lengths are exact: in any order of addition the result is the same."""
    check_group_moments(counts, groups, finished, num_groups)
    in_group = (groups >= 0) & (groups < num_groups)
    # Live groups, then finished ones, then one bucket for the slots that count for neither.
    bucket = torch.where(in_group, groups + num_groups * finished, 2 * num_groups)
    lengths = counts.double()
    sums = lengths.new_zeros(3, 2 * num_groups + 1)
    number, total, m2 = sums.unbind()
    number.index_add_(0, bucket, torch.ones_like(lengths))
    total.index_add_(0, bucket, lengths)
    mean = total.div_(number.clamp(min=1))
    m2.index_add_(0, bucket, (lengths - mean[bucket]).square_())
    live, finished_ones = sums[:, :-1].float().view(3, 2, num_groups).permute(1, 2, 0).contiguous().unbind()
    return GroupMoments(live, finished_ones)


def update_group_lengths_reference(
    slots: Tensor,
    values: Tensor,
    counts: Tensor,
    means: Tensor,
    m2s: Tensor,
    groups: Tensor,
    finished: Tensor,
    num_groups: int,
) -> GroupLengths:
    """All arguments are looked at before the first is changed."""
    check_update_group_lengths(slots, values, counts, means, m2s, groups, finished, num_groups)
    running_means = update_lengths_reference(slots, values, counts, means, m2s)
    return GroupLengths(running_means, group_moments_reference(counts, groups, finished, num_groups))


def windowed_confidence_reference(trace: Tensor, lengths: Tensor, window: int) -> Tensor:
    """Window sums are differences of prefix sums, so that nothing of [num_due, max_len, window] is written; in float64,
    so that differences keep their digits."""
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
