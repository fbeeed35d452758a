"""Checks of operators' arguments.

Invariant: every check names the argument, its value and what is allowed. No check reads a tensor on another device than
the CPU, because the host would wait for that device.
"""

from __future__ import annotations

import torch
from torch import Tensor

END_OF_POSITIONS = 2**53
"""Positions are below it: numbers that float64 and JSON keep."""

ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The types that logits and hidden states may have."""


def check_token_confidence(logits: Tensor, rows: Tensor) -> None:
    """Raise ValueError unless dtypes, shapes, strides and devices are those of `token_confidence` and, on the CPU,
    every entry of `rows` is a row of `logits`."""
    check_rows_tensor("logits", logits, "vocab_size")
    check_vector("rows", rows, torch.int64, "num_seen", rows.numel())
    check_contiguous(rows=rows)
    check_devices("logits", logits, rows=rows)
    check_range("rows", rows, 0, logits.shape[0])


def check_update_confidence(
    slots: Tensor, positions: Tensor, values: Tensor, means: Tensor, m2s: Tensor, trace: Tensor
) -> None:
    """Raise ValueError unless dtypes, shapes, strides and devices are those of `update_confidence` and, on the CPU,
    every slot exists and no position is negative."""
    num_rows = slots.numel()
    check_vector("slots", slots, torch.int64, "num_rows", num_rows)
    check_vector("positions", positions, torch.int64, "num_rows", num_rows)
    check_vector("values", values, torch.float32, "num_rows", num_rows)
    check_state("means", means, "num_kept")
    check_state("m2s", m2s, "num_kept")
    check_state("trace", trace, "trace_length")
    if means.shape[1] < 2:
        raise ValueError(f"means must be [capacity, num_kept] with num_kept >= 2, got {list(means.shape)}")
    if m2s.shape != means.shape:
        raise ValueError(f"m2s must be {list(means.shape)}, as means are, got {list(m2s.shape)}")
    if trace.shape[0] != means.shape[0]:
        raise ValueError(f"trace must be [{means.shape[0]}, trace_length], got {list(trace.shape)}")
    check_contiguous(slots=slots, positions=positions, values=values)
    check_devices("means", means, slots=slots, positions=positions, values=values, m2s=m2s, trace=trace)
    check_range("slots", slots, 0, means.shape[0])
    check_range("positions", positions, 0, END_OF_POSITIONS)


def check_state(name: str, value: Tensor, columns: str) -> None:
    if value.dim() != 2 or value.dtype != torch.float32:
        raise ValueError(f"{name} must be float32 [capacity, {columns}], got {value.dtype} {list(value.shape)}")
    check_contiguous(**{name: value})


def check_rows_tensor(name: str, value: Tensor, columns: str) -> None:
    if value.dtype not in ROW_DTYPES:
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {value.dtype}")
    if value.dim() != 2 or value.shape[1] < 1:
        raise ValueError(f"{name} must be [num_rows, {columns}] with {columns} >= 1, got {list(value.shape)}")
    if value.stride(1) != 1 and value.shape[1] > 1:
        raise ValueError(f"{name} must have stride(1) == 1, got {value.stride(1)}: call .contiguous() on them")


def check_vector(name: str, value: Tensor, dtype: torch.dtype, size_name: str, size: int) -> None:
    if value.dtype != dtype:
        raise ValueError(f"{name} must be {str(dtype).removeprefix('torch.')}, got {value.dtype}")
    if value.shape != (size,):
        wanted = f"[{size_name}] = [{size}]" if size_name != str(size) else f"[{size}]"
        raise ValueError(f"{name} must be {wanted}, got {list(value.shape)}")


def check_contiguous(**values: Tensor) -> None:
    for name, value in values.items():
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(value.stride())}")


def check_devices(first_name: str, first: Tensor, **others: Tensor) -> None:
    for name, other in others.items():
        if other.device != first.device:
            raise ValueError(f"{name} must be on the device of {first_name}, {first.device}, got {other.device}")


def check_range(name: str, values: Tensor, lowest: int, end: int) -> None:
    """Raise ValueError unless every entry is in [lowest, end). Looks at CPU tensors only."""
    if values.device.type != "cpu" or not len(values):
        return
    wrong = (values < lowest) | (values >= end)
    if not wrong.any():
        return
    row = wrong.nonzero()[0].item()
    raise ValueError(f"{name}[{row}] must be in [{lowest}, {end}), got {values[row].item()}")  # type: ignore[index]
