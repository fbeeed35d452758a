"""Operators of scoring: what each takes, gives and refuses. Each is defined as in `parts/observing/tracker/ops.py`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_rollout.parts.observing.tracker import arguments, dispatch
from vllm_rollout.parts.observing.tracker.dispatch import Operator


def quality_head(hidden: Tensor, rows: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The quality head's logit of the due rows: relu(hidden[rows] @ w1.T + b1) @ w2 + b2, float32 [num_due].

    hidden: float32, bfloat16 or float16 [num_rows, hidden_size], stride(1) == 1.
    rows: int64 [num_due], the rows to score. Without rows an empty tensor is returned, and nothing is launched.
    w1, b1, w2, b2: float32 [num_hidden, hidden_size], [num_hidden], [num_hidden], [1], all on the device of hidden.

    Sums are made in float32. Implementations agree within 1e-5 of the sums without signs:
    (abs(hidden[rows]) @ abs(w1).T + abs(b1)) @ abs(w2) + abs(b2).

    Raises ValueError for a wrong dtype, shape, stride or device, and on the CPU for a row that does not exist. On CUDA
    that check would make the host wait, so such a row's score is NaN.

    Source: ARRoL section 4.1, a two-layer MLP on the last hidden state.
    """
    return dispatch.active_implementation(hidden.device.type, "quality_head").compute(hidden, rows, w1, b1, w2, b2)


def quality_head_reference(hidden: Tensor, rows: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Writes the due rows in float32 and [num_due, num_hidden]."""
    check_quality_head(hidden, rows, w1, b1, w2, b2)
    if not len(rows):
        return hidden.new_empty(0, dtype=torch.float32)
    due = hidden.index_select(0, rows).float()
    return torch.addmv(b2, torch.addmm(b1, due, w1.T).relu(), w2)


def check_quality_head(hidden: Tensor, rows: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> None:
    """Raise ValueError unless dtypes, shapes, strides and devices are those of `quality_head` and, on the CPU, every
    entry of `rows` is a row of `hidden`."""
    arguments.check_rows_tensor("hidden", hidden, "hidden_size")
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise ValueError(f"rows must be int64 [num_due], got {rows.dtype} {list(rows.shape)}")
    if w1.dim() != 2 or w1.dtype != torch.float32 or w1.shape[0] < 1 or w1.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"w1 must be float32 [num_hidden, hidden_size] with hidden_size = {hidden.shape[1]}, got {w1.dtype} "
            f"{list(w1.shape)}"
        )
    if not w1.is_contiguous():
        raise ValueError(f"w1 must be contiguous, got strides {list(w1.stride())}: call .contiguous() on it")
    arguments.check_vector("b1", b1, torch.float32, "num_hidden", w1.shape[0])
    arguments.check_vector("w2", w2, torch.float32, "num_hidden", w1.shape[0])
    arguments.check_vector("b2", b2, torch.float32, "1", 1)
    arguments.check_contiguous(b1=b1, w2=w2)
    arguments.check_devices("hidden", hidden, rows=rows, w1=w1, b1=b1, w2=w2, b2=b2)
    arguments.check_range("rows", rows, 0, hidden.shape[0])


OPERATORS: Mapping[str, Operator] = {
    "quality_head": Operator(quality_head_reference, check_quality_head, "quality_head")
}
"""On a CPU the head is a matrix product, in which torch is as fast as csrc would be. Trace confidence is computed once
per candidate, in torch on any device."""


def windowed_confidence(trace: Tensor, lengths: Tensor, window: int) -> Tensor:
    """Trace confidence of candidates, float32 [num_due, 3]: mean, lowest window, bottom windows.

    trace: float32 [num_due, max_len], the confidence of each token. Entries at and after the length are not read.
    lengths: int64 [num_due], 0 to max_len.
    window: consecutive tokens of one window. A shorter trace has one window, the whole of it.

    The lowest window is the lowest mean of all windows at stride 1. The bottom windows are the mean of the lowest
    tenth of them, rounded down to whole windows but at least one. An empty trace, or one with a NaN or an infinity,
    gives NaN three times.

    Raises ValueError for a wrong dtype, shape or device, and on the CPU for a length out of range. On CUDA that check
    would make the host wait, so the caller vouches for the lengths.

    Window sums are differences of prefix sums, so that nothing of [num_due, max_len, window] is written. The prefix
    sums are float64, so that differences keep their digits.

    Source: DeepConf (Fu et al. 2025), group confidence, lowest group and bottom 10 % group confidence.
    """
    if trace.dim() != 2 or trace.dtype != torch.float32:
        raise ValueError(f"trace must be float32 [num_due, max_len], got {trace.dtype} {list(trace.shape)}")
    arguments.check_vector("lengths", lengths, torch.int64, "num_due", trace.shape[0])
    arguments.check_devices("trace", trace, lengths=lengths)
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    arguments.check_range("lengths", lengths, 0, trace.shape[1] + 1)
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
