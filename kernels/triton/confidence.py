"""update_confidence on a GPU: length, mean, variance and trace of every candidate in one launch.

Invariant: every slot is written by one program. The host never waits for the device.

The specification is `vllm_rollout.parts.observing.tracker.reference.update_confidence_reference`.
"""

import torch

import triton
import triton.language as tl

NUM_WARPS = 4
BLOCK_ROWS = 128


# The first three are parts of larger tensors: specialised by their alignment, kernels would be compiled in a step.
@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "positions_ptr",
        "values_ptr",
        "num_rows",
        "capacity",
        "num_kept",
        "trace_length",
    ]
)
def update_confidence_kernel(
    slots_ptr,
    positions_ptr,
    values_ptr,
    means_ptr,
    m2s_ptr,
    trace_ptr,
    moments_ptr,
    num_rows,
    capacity,
    num_kept,
    trace_length,
    BLOCK_ROWS: tl.constexpr,
):
    """Update the slots of one block of rows per program."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_batch = row < num_rows
    slot = tl.load(slots_ptr + row, mask=in_batch, other=-1)
    position = tl.load(positions_ptr + row, mask=in_batch, other=-1)
    value = tl.load(values_ptr + row, mask=in_batch, other=0.0)
    exists = (slot >= 0) & (slot < capacity) & (position >= 0)

    before = slot * num_kept + position % num_kept
    after = slot * num_kept + (position + 1) % num_kept
    has_before = exists & (position > 0)
    mean = tl.load(means_ptr + before, mask=has_before, other=0.0)
    m2 = tl.load(m2s_ptr + before, mask=has_before, other=0.0)
    count = (position + 1).to(tl.float32)
    delta = value - mean
    mean += delta / count
    m2 += delta * (value - mean)
    tl.store(means_ptr + after, mean, mask=exists)
    tl.store(m2s_ptr + after, m2, mask=exists)
    tl.store(trace_ptr + slot * trace_length + position, value, mask=exists & (position < trace_length))
    nan = float("nan")
    tl.store(moments_ptr + 2 * row, tl.where(exists, mean, nan), mask=in_batch)
    tl.store(moments_ptr + 2 * row + 1, tl.where(exists, tl.sqrt(m2 / count), nan), mask=in_batch)


def update_confidence_triton(
    slots: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    means: torch.Tensor,
    m2s: torch.Tensor,
    trace: torch.Tensor,
) -> torch.Tensor:
    """Mean and standard deviation, float32 [num_rows, 2]. `check_update_confidence` defines valid arguments."""
    num_rows = slots.shape[0]
    moments = torch.empty(num_rows, 2, dtype=torch.float32, device=means.device)
    if num_rows:
        update_confidence_kernel[(triton.cdiv(num_rows, BLOCK_ROWS),)](
            slots,
            positions,
            values,
            means,
            m2s,
            trace,
            moments,
            num_rows,
            means.shape[0],
            means.shape[1],
            trace.shape[1],
            BLOCK_ROWS=BLOCK_ROWS,
            num_warps=NUM_WARPS,
        )
    return moments
