"""Compiles what a step can call, before the first step.

Invariant: afterwards no step compiles a kernel: which variant serves it depends on dtypes and layouts, which are those
of the tensors given here, and on whether few or many rows are due.
"""

from __future__ import annotations

import torch

from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS
from vllm_rollout.kernel.tracker.ops import quality_head, token_confidence, update_confidence, windowed_confidence
from vllm_rollout.kernel.tracker.tracker import NUM_KEPT
from vllm_rollout.parts.pruning.worker.quality_head import head_shapes

NUMBERS_DUE = (1, 17)
"""One row, and more than a program of quality_head takes: its two variants."""


def warm_up(logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """Call every operator once in each variant.

    logits: [num_rows, vocab_size] as the model makes them, at least one row.
    hidden: [num_rows, hidden_size], the states they are made of.
    """
    device, hidden_size = hidden.device, hidden.shape[1]
    slots, positions = torch.zeros(2, 1, dtype=torch.int64, device=device).unbind()
    confidence = token_confidence(logits, slots)
    means, m2s = torch.zeros(2, 1, NUM_KEPT, device=device).unbind()
    trace = torch.zeros(1, 1, device=device)
    update_confidence(slots, positions, confidence, means, m2s, trace)
    windowed_confidence(trace, slots + 1, CONFIDENCE_WINDOW_TOKENS)
    weights = [torch.zeros(shape, device=device) for shape in head_shapes(hidden_size)]
    for num_due in NUMBERS_DUE:
        quality_head(hidden, torch.zeros(num_due, dtype=torch.int64, device=device), *weights)
