"""Compiles what a step can call, before the first step.

Invariant: afterwards no step compiles a kernel: which variant serves it depends on dtypes and layouts, which are those
of the tensors given here, and on whether few or many rows are due.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_rollout.parts.observing.tracker.ops import token_confidence, update_confidence
from vllm_rollout.parts.observing.tracker.rows import RowsPart
from vllm_rollout.parts.observing.tracker.tracker import NUM_KEPT


def warm_up(logits: torch.Tensor, hidden: torch.Tensor, parts: Sequence[RowsPart] = ()) -> None:
    """Call every operator once in each variant: those of the tracker, and those of `parts`.

    logits: [num_rows, vocab_size] as the model makes them, at least one row.
    hidden: [num_rows, hidden_size], the states they are made of.
    """
    device = hidden.device
    slots, positions = torch.zeros(2, 1, dtype=torch.int64, device=device).unbind()
    confidence = token_confidence(logits, slots)
    means, m2s = torch.zeros(2, 1, NUM_KEPT, device=device).unbind()
    trace = torch.zeros(1, 1, device=device)
    update_confidence(slots, positions, confidence, means, m2s, trace)
    for part in parts:
        part.warm_up(logits, hidden)
