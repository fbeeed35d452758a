"""token_confidence on a GPU: every row in one pass over the vocabulary.

Invariant: logits are read once, nothing of their size is written, and the host never waits for the device.
The specification is `vllm_rollout.parts.observing.tracker.reference.token_confidence_reference`.
"""

import torch

import triton
import triton.language as tl

NUM_WARPS = 8
BLOCK_SIZE = 32 * NUM_WARPS * 8
"""Entries that the program takes side by side: 8 for each thread, one 16-byte load of 16-bit logits."""
NUM_BLOCKS = 4
"""Blocks per step of the loop. A lane rescales its sums once per step, which saves a quarter of all instructions.

The kernel is bound by instructions, several per byte, and not by memory.
"""
NUM_STAGES = 3
"""Steps of the loop whose loads are under way or done, so that a program always has two loads on their way.

Two programs fit a multiprocessor of sm_90: docs/development/log.md.
"""
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def accumulate(z, peak, sum_exp, sum_z, num_unmasked):
    """The sums of every lane, updated with the entries z [NUM_BLOCKS, BLOCK_SIZE]."""
    unmasked = z != -float("inf")
    sum_z += tl.sum(tl.where(unmasked, z, 0.0), axis=0)
    num_unmasked += tl.sum(unmasked.to(tl.int32), axis=0)
    new_peak = tl.maximum(peak, tl.max(z, axis=0))
    scale = tl.exp2((peak - new_peak) * LOG2_E)
    sum_exp = scale * sum_exp + tl.sum(tl.exp2((z - new_peak[None, :]) * LOG2_E), axis=0)
    return new_peak, sum_exp, sum_z, num_unmasked


# rows is a part of a larger tensor: specialised by its alignment, kernels would be compiled in a step.
@triton.jit(do_not_specialize=["rows_ptr", "num_rows"])
def token_confidence_kernel(
    logits_ptr,
    rows_ptr,
    confidence_ptr,
    row_stride,
    num_rows,
    vocab_size,
    NUM_STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program per row in `rows`. Every lane keeps its own online log-sum-exp. Lanes are merged at the end."""
    seen = tl.program_id(0)
    row = tl.load(rows_ptr + seen)
    exists = (row >= 0) & (row < num_rows)
    # A row that does not exist is computed as row 0, and its result is dropped.
    logits_ptr += tl.where(exists, row, 0) * row_stride
    lanes = tl.arange(0, NUM_BLOCKS)[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]

    # A finite start keeps z - peak away from -inf - (-inf).
    peak = tl.full([BLOCK_SIZE], LOWEST, tl.float32)
    sum_exp = tl.zeros([BLOCK_SIZE], tl.float32)
    sum_z = tl.zeros([BLOCK_SIZE], tl.float32)
    num_unmasked = tl.zeros([BLOCK_SIZE], tl.int32)

    # Whole blocks without a mask, which would cut the loads of an odd vocabulary into single entries.
    end = vocab_size // (NUM_BLOCKS * BLOCK_SIZE) * (NUM_BLOCKS * BLOCK_SIZE)
    for start in tl.range(0, end, NUM_BLOCKS * BLOCK_SIZE, num_stages=NUM_STAGES):
        z = tl.load(logits_ptr + start + lanes).to(tl.float32)
        peak, sum_exp, sum_z, num_unmasked = accumulate(z, peak, sum_exp, sum_z, num_unmasked)
    if end < vocab_size:
        columns = end + lanes
        z = tl.load(logits_ptr + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
        peak, sum_exp, sum_z, num_unmasked = accumulate(z, peak, sum_exp, sum_z, num_unmasked)

    row_peak = tl.max(peak, axis=0)
    row_sum_exp = tl.sum(tl.exp2((peak - row_peak) * LOG2_E) * sum_exp, axis=0)
    row_sum_z = tl.sum(sum_z, axis=0)
    row_num_unmasked = tl.sum(num_unmasked, axis=0)

    # A NaN or +inf in the row has made row_sum_exp NaN by now.
    log_sum_exp = tl.where(exists & (row_num_unmasked > 0), tl.log(row_sum_exp), float("nan"))
    mean_z = row_sum_z / row_num_unmasked.to(tl.float32)
    tl.store(confidence_ptr + seen, log_sum_exp + (row_peak - mean_z))


def token_confidence_triton(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Confidence, float32 [num_seen]. `check_token_confidence` defines valid arguments."""
    (num_rows, vocab_size), num_seen = logits.shape, rows.shape[0]
    confidence = torch.empty(num_seen, dtype=torch.float32, device=logits.device)
    if num_seen and num_rows:
        token_confidence_kernel[(num_seen,)](
            logits,
            rows,
            confidence,
            logits.stride(0),
            num_rows,
            vocab_size,
            NUM_STAGES=NUM_STAGES,
            NUM_BLOCKS=NUM_BLOCKS,
            BLOCK_SIZE=BLOCK_SIZE,
            num_warps=NUM_WARPS,
        )
    else:
        confidence.fill_(torch.nan)
    return confidence
