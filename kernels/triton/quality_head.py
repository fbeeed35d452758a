"""quality_head on a GPU: gather the due rows, two layers and the logit, in one launch.

Invariant: a score does not depend on the order in which programs run, and the host never waits for the device.

The specification is `vllm_rollout.parts.pruning.worker.operators.quality_head_reference`.

The first layer has 2 MB of weights for a hidden size of 4096, and few rows. One program alone would wait for memory
most of the time. The hidden axis is therefore split: each program writes its part of the first layer's sums. The
program that arrives last at a block of rows adds the parts in their order, and computes the logit.
"""

import functools

import torch

import triton
import triton.language as tl

NUM_WARPS = 8
NUM_STAGES = 4
BLOCK_SIZE = 32
"""Entries of the hidden state per step of the loop."""
FEW_DUE, MANY_DUE = 16, 64
"""Rows of one program: the least that tensor cores take, and enough that 1024 rows read w1 only 16 times."""
MAX_SPLITS = 32
"""Most parts of the hidden axis. More parts are read sooner, but the last program adds them one after the other."""
PRECISION = "tf32x3"
"""Three products of tensor cores for one of float32, about its accuracy. Weights lose no significant digits."""


# rows are a part of a larger tensor: specialised by its alignment, kernels would be compiled in a step.
@triton.jit(do_not_specialize=["rows_ptr", "num_rows", "num_due", "split_steps"])
def quality_head_kernel(
    hidden_ptr,
    rows_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    score_ptr,
    parts_ptr,
    arrived_ptr,
    hidden_stride,
    rows_stride,
    num_rows,
    num_due,
    hidden_size,
    num_hidden,
    split_steps,
    PRECISION: tl.constexpr,
    BLOCK_DUE: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program per block of due rows and part of the hidden axis. Each counter is 0 before and after a launch."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    due = block * BLOCK_DUE + tl.arange(0, BLOCK_DUE)
    is_due = due < num_due
    row = tl.load(rows_ptr + due * rows_stride, mask=is_due, other=-1)
    exists = (row >= 0) & (row < num_rows)
    unit = tl.arange(0, BLOCK_HIDDEN)
    is_unit = unit < num_hidden

    sums = tl.zeros([BLOCK_DUE, BLOCK_HIDDEN], tl.float32)
    # Counted in steps, so that the compiler knows that loads are aligned.
    last_step = tl.minimum(tl.cdiv(hidden_size, BLOCK_SIZE), (split + 1) * split_steps)
    for step in range(split * split_steps, last_step):
        entry = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        is_entry = entry < hidden_size
        h = tl.load(
            hidden_ptr + row[:, None] * hidden_stride + entry[None, :],
            mask=exists[:, None] & is_entry[None, :],
            other=0.0,
        ).to(tl.float32)
        w1 = tl.load(
            w1_ptr + unit[None, :] * hidden_size + entry[:, None], mask=is_unit[None, :] & is_entry[:, None], other=0.0
        )
        sums = tl.dot(h, w1, sums, input_precision=PRECISION)

    part = due[:, None] * num_hidden + unit[None, :]
    in_part = is_due[:, None] & is_unit[None, :]
    part_size = num_due.to(tl.int64) * num_hidden
    tl.store(parts_ptr + split * part_size + part, sums, mask=in_part)
    # All of this program's stores come before its arrival, and arrival orders them before the last program's loads.
    tl.debug_barrier()
    num_before = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel")
    if num_before == num_splits - 1:
        sums = tl.zeros([BLOCK_DUE, BLOCK_HIDDEN], tl.float32)
        for other_split in tl.range(0, num_splits, loop_unroll_factor=4):
            sums += tl.load(parts_ptr + other_split * part_size + part, mask=in_part, other=0.0, cache_modifier=".cg")
        b1 = tl.load(b1_ptr + unit, mask=is_unit, other=0.0)
        w2 = tl.load(w2_ptr + unit, mask=is_unit, other=0.0)
        # Written so that a NaN is not taken for a negative number.
        sums += b1[None, :]
        activation = tl.where(sums <= 0.0, 0.0, sums)
        score = tl.sum(activation * w2[None, :], axis=1) + tl.load(b2_ptr)
        tl.store(score_ptr + due, tl.where(exists, score, float("nan")), mask=is_due)
        tl.store(arrived_ptr + block, 0)


def quality_head_triton(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    num_programs: int | None = None,
) -> torch.Tensor:
    """Scores, float32 [num_due]. `check_quality_head` defines valid arguments.

    `num_programs`: number of programs to spread the work over. Default: the device's multiprocessors.
    """
    num_due, num_hidden = rows.shape[0], w1.shape[0]
    score = torch.empty(num_due, dtype=torch.float32, device=hidden.device)
    if num_due == 0:
        return score
    block_due = FEW_DUE if num_due <= FEW_DUE else MANY_DUE
    num_blocks = triton.cdiv(num_due, block_due)
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    num_splits, split_steps = split(hidden.shape[1], num_blocks, num_programs)
    parts = torch.empty(num_splits, num_due, num_hidden, dtype=torch.float32, device=hidden.device)
    quality_head_kernel[(num_blocks, num_splits)](
        hidden,
        rows,
        w1,
        b1,
        w2,
        b2,
        score,
        parts,
        counters(hidden.device, num_blocks),
        hidden.stride(0),
        rows.stride(0),
        hidden.shape[0],
        num_due,
        hidden.shape[1],
        num_hidden,
        split_steps,
        PRECISION=PRECISION,
        BLOCK_DUE=block_due,
        BLOCK_HIDDEN=max(16, triton.next_power_of_2(num_hidden)),
        BLOCK_SIZE=BLOCK_SIZE,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return score


def split(hidden_size: int, num_blocks: int, num_programs: int) -> tuple[int, int]:
    """(parts of the hidden axis, loop steps in each part) for about `num_programs` programs."""
    num_steps = triton.cdiv(hidden_size, BLOCK_SIZE)
    num_splits = max(1, min(num_steps, MAX_SPLITS, num_programs // num_blocks))
    split_steps = triton.cdiv(num_steps, num_splits)
    return triton.cdiv(num_steps, split_steps), split_steps


def counters(device: torch.device, num_blocks: int) -> torch.Tensor:
    """Zeros for the current stream of the device. Two launches of one stream never run at the same time."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _counters(device, stream, triton.next_power_of_2(max(num_blocks, 64)))


@functools.cache
def _counters(device: torch.device, stream: int, size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
