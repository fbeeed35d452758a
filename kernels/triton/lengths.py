"""update_lengths and group_moments on a GPU, each alone and both in one launch.

Invariant: every slot is written by one program, so that nothing needs an atomic addition and results do not depend
on the order in which programs run; the host never waits for the device.
The specifications are the references of the same names in `vllm_rollout.tracker.reference`.
"""

import torch

import triton
import triton.language as tl

NUM_WARPS = 4
BLOCK_ROWS = 256
BLOCK_SLOTS = 1024


@triton.jit
def update_slots(slot, value, mask, counts_ptr, means_ptr, m2s_ptr):
    """Welford's step for the slots in the mask; their means after it."""
    count = tl.load(counts_ptr + slot, mask=mask, other=0.0) + 1.0
    mean = tl.load(means_ptr + slot, mask=mask, other=0.0)
    m2 = tl.load(m2s_ptr + slot, mask=mask, other=0.0)
    delta = value - mean
    mean += delta / count
    tl.store(counts_ptr + slot, count, mask=mask)
    tl.store(means_ptr + slot, mean, mask=mask)
    tl.store(m2s_ptr + slot, m2 + delta * (value - mean), mask=mask)
    return mean


@triton.jit
def merge_block(number, mean, m2, length, mask):
    """Moments with those of a block merged in (Chan). length, mask: [2, BLOCK_SLOTS]; the others [2]. All in float64:
    in float32 the mean of lengths around 1e6 is rounded by more than the lengths may differ."""
    block_number = tl.sum(mask.to(tl.float64), axis=1)
    block_mean = tl.sum(tl.where(mask, length, 0.0), axis=1) / tl.maximum(block_number, 1.0)
    difference = tl.where(mask, length - block_mean[:, None], 0.0)
    block_m2 = tl.sum(difference * difference, axis=1)
    delta = block_mean - mean
    total = number + block_number
    weight = block_number / tl.maximum(total, 1.0)
    return total, mean + delta * weight, m2 + block_m2 + delta * delta * number * weight


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def update_lengths_kernel(
    slots_ptr,
    values_ptr,
    running_means_ptr,
    counts_ptr,
    means_ptr,
    m2s_ptr,
    slots_stride,
    values_stride,
    num_rows,
    capacity,
    BLOCK_ROWS: tl.constexpr,
):
    """One program per block of rows."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_batch = row < num_rows
    slot = tl.load(slots_ptr + row * slots_stride, mask=in_batch, other=-1)
    value = tl.load(values_ptr + row * values_stride, mask=in_batch, other=0.0)
    has_slot = (slot >= 0) & (slot < capacity)
    mean = update_slots(slot, value, has_slot, counts_ptr, means_ptr, m2s_ptr)
    tl.store(running_means_ptr + row, tl.where(has_slot, mean, float("nan")), mask=in_batch)


@triton.jit(do_not_specialize=["num_rows", "capacity", "num_groups"])
def group_lengths_kernel(
    slots_ptr,
    values_ptr,
    running_means_ptr,
    counts_ptr,
    means_ptr,
    m2s_ptr,
    groups_ptr,
    finished_ptr,
    moments_ptr,
    slots_stride,
    values_stride,
    num_rows,
    capacity,
    num_groups,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """One program per group, which updates the group's slots and then looks at them. One more program has the rows
    that belong to no group. Without rows it is group_moments alone."""
    program = tl.program_id(0)
    for start in range(0, num_rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        in_batch = row < num_rows
        slot = tl.load(slots_ptr + row * slots_stride, mask=in_batch, other=-1)
        has_slot = (slot >= 0) & (slot < capacity)
        group = tl.load(groups_ptr + slot, mask=has_slot, other=-1)
        in_group = (group >= 0) & (group < num_groups)
        is_mine = in_batch & (tl.where(in_group, group, num_groups) == program)
        value = tl.load(values_ptr + row * values_stride, mask=is_mine, other=0.0)
        mean = update_slots(slot, value, has_slot & is_mine, counts_ptr, means_ptr, m2s_ptr)
        tl.store(running_means_ptr + row, tl.where(has_slot, mean, float("nan")), mask=is_mine)
    # The counts below were written by other threads of this program.
    tl.debug_barrier()

    if program < num_groups:
        kind = tl.arange(0, 2)  # live, finished
        number = tl.zeros([2], tl.float64)
        mean = tl.zeros([2], tl.float64)
        m2 = tl.zeros([2], tl.float64)
        for start in range(0, capacity, BLOCK_SLOTS):
            slot = start + tl.arange(0, BLOCK_SLOTS)
            in_capacity = slot < capacity
            is_mine = tl.load(groups_ptr + slot, mask=in_capacity, other=-1) == program
            finished = tl.load(finished_ptr + slot, mask=in_capacity, other=0).to(tl.int32)
            length = tl.load(counts_ptr + slot, mask=in_capacity, other=0.0).to(tl.float64)
            mask = is_mine[None, :] & (finished[None, :] == kind[:, None])
            number, mean, m2 = merge_block(number, mean, m2, length[None, :], mask)
        out = moments_ptr + (kind * num_groups + program) * 3
        tl.store(out, number.to(tl.float32))
        tl.store(out + 1, mean.to(tl.float32))
        tl.store(out + 2, m2.to(tl.float32))


def update_lengths_triton(
    slots: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, means: torch.Tensor, m2s: torch.Tensor
) -> torch.Tensor:
    """Running means, float32 [num_rows], of arguments that `check_update_lengths` accepts."""
    num_rows = slots.shape[0]
    running_means = torch.empty(num_rows, dtype=torch.float32, device=counts.device)
    if num_rows == 0:
        return running_means
    update_lengths_kernel[(triton.cdiv(num_rows, BLOCK_ROWS),)](
        slots,
        values,
        running_means,
        counts,
        means,
        m2s,
        slots.stride(0),
        values.stride(0),
        num_rows,
        counts.shape[0],
        BLOCK_ROWS=BLOCK_ROWS,
        num_warps=NUM_WARPS,
    )
    return running_means


def group_moments_triton(
    counts: torch.Tensor, groups: torch.Tensor, finished: torch.Tensor, num_groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of live and of finished candidates, float32 [num_groups, 3], of arguments that `check_group_moments`
    accepts."""
    moments = torch.empty(2, num_groups, 3, dtype=torch.float32, device=counts.device)
    if num_groups:
        # No rows: their pointers are never followed.
        launch_group_lengths(num_groups, groups, counts, counts, counts, counts, counts, groups, finished, moments, 0)
    live, finished_moments = moments.unbind()
    return live, finished_moments


def update_group_lengths_triton(
    slots: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    means: torch.Tensor,
    m2s: torch.Tensor,
    groups: torch.Tensor,
    finished: torch.Tensor,
    num_groups: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`update_lengths_triton` and `group_moments_triton` in one launch."""
    num_rows = slots.shape[0]
    running_means = torch.empty(num_rows, dtype=torch.float32, device=counts.device)
    moments = torch.empty(2, num_groups, 3, dtype=torch.float32, device=counts.device)
    if num_rows or num_groups:
        launch_group_lengths(
            num_groups + 1, slots, values, running_means, counts, means, m2s, groups, finished, moments, num_rows
        )
    return running_means, *moments.unbind()


def launch_group_lengths(
    num_programs: int,
    slots: torch.Tensor,
    values: torch.Tensor,
    running_means: torch.Tensor,
    counts: torch.Tensor,
    means: torch.Tensor,
    m2s: torch.Tensor,
    groups: torch.Tensor,
    finished: torch.Tensor,
    moments: torch.Tensor,
    num_rows: int,
) -> None:
    group_lengths_kernel[(num_programs,)](
        slots,
        values,
        running_means,
        counts,
        means,
        m2s,
        groups,
        finished,
        moments,
        slots.stride(0),
        values.stride(0),
        num_rows,
        counts.shape[0],
        moments.shape[1],
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_SLOTS=BLOCK_SLOTS,
        num_warps=NUM_WARPS,
    )
