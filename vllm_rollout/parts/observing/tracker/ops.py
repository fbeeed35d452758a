"""Operators of the tracker: what each takes, gives and refuses. Parts have others (`dispatch.py`).

An operator has one name and up to three implementations: C++ for CPU tensors (csrc/), Triton for CUDA tensors
(kernels/triton/) and torch (reference.py), which is the specification and serves everything else. dispatch.py says
which one is active.
"""

from __future__ import annotations

from torch import Tensor

from vllm_rollout.parts.observing.tracker import dispatch


def token_confidence(logits: Tensor, rows: Tensor) -> Tensor:
    """Token confidence of the named rows, float32 [num_seen], in one pass. It is the mean over the vocabulary of
    -log(probability), in nats, and is larger for a more peaked distribution.

    logits: float32, bfloat16 or float16 [num_rows, vocab_size], stride(1) == 1. -inf marks a masked token.
    rows: int64 [num_seen], contiguous, the rows to look at, in any order, on the same device. No other row is read.

    If z are the V' entries of a row that are not -inf, it is log(sum(exp(z))) - mean(z), in float32 or better. A row
    with no entry left, with a NaN or with +inf gives NaN.

    Raises ValueError for a wrong dtype, shape, stride or device, and on the CPU for a row that does not exist. On CUDA
    that check would make the host wait, so such a row gives NaN.

    Source: H_t of ARRoL section 3 (self-uncertainty, Kang et al. 2025) divided by V', so that it does
    not depend on the size of the vocabulary.
    """
    return dispatch.active_implementation(logits.device.type).compute(logits, rows)


def update_confidence(
    slots: Tensor, positions: Tensor, values: Tensor, means: Tensor, m2s: Tensor, trace: Tensor
) -> Tensor:
    """Take one value per candidate into its running statistics. Returns mean and standard deviation of its values up
    to this position, float32 [num_rows, 2].

    slots: int64 [num_rows], distinct: the place of each candidate's statistics.
    positions: int64 [num_rows]: number of the candidate's values before this one, such as its number of output tokens.
    values: float32 [num_rows], such as the confidence of the token that the row sampled.
    means, m2s: float32 [capacity, num_kept], updated in place. Column c is about the first n values, for the
    newest n with n % num_kept == c. It has their mean, and the sum of squared differences from it (Welford). So a
    second value of a position replaces the first and all later values, if the first is among the newest num_kept - 1.
    At position 0 nothing is read, so that a slot needs no clearing. A NaN stays.
    trace: float32 [capacity, trace_length], updated in place: the values by position. Values beyond it are left out.

    The standard deviation is that of the values themselves (divided by their number). After 1e6 values the mean is
    within 1e-4 of the true one, relative, and M2 within 1e-3.

    Raises ValueError for a wrong dtype, shape, stride or device, and on the CPU for a missing slot or a negative
    position. Nothing is changed then. On CUDA a row with such a slot or position changes nothing and gives NaN.
    """
    compute = dispatch.active_implementation(means.device.type, "update_confidence").compute
    return compute(slots, positions, values, means, m2s, trace)
