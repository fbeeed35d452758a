"""Arguments of every operator, in the sizes that the kernel benchmark asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS
from vllm_rollout.tracker.tracker import NUM_KEPT

NUM_HIDDEN = 128
MAX_LEN = 512
"""Tokens of a trace."""


class Inputs:
    """Tensors of one device, from one seed."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(*size, generator=self.generator) * scale).to(self.device, dtype)

    def integers(self, end: int, size: int) -> Tensor:
        return torch.randint(end, (size,), generator=self.generator).to(self.device)

    def token_confidence(self, num_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        logits = self.normal(num_rows, vocab_size, scale=4.0, dtype=dtype)
        return logits, torch.arange(num_rows, device=self.device)

    def quality_head(self, num_due: int, hidden_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        weights = (self.normal(NUM_HIDDEN, hidden_size, scale=hidden_size**-0.5), self.normal(NUM_HIDDEN))
        rows = torch.randperm(num_due, generator=self.generator).to(self.device)
        return self.normal(num_due, hidden_size, dtype=dtype), rows, *weights, self.normal(NUM_HIDDEN), self.normal(1)

    def update_confidence(self, num_rows: int, capacity: int) -> tuple[Tensor, ...]:
        slots = torch.randperm(capacity, generator=self.generator)[:num_rows].to(self.device)
        state = (self.normal(capacity, NUM_KEPT) + 8, self.integers(MAX_LEN, capacity * NUM_KEPT).float())
        trace = torch.zeros(capacity, MAX_LEN, device=self.device)
        values = self.normal(num_rows) + 8
        return slots, self.integers(MAX_LEN, num_rows), values, state[0], state[1].view(capacity, NUM_KEPT), trace

    def windowed_confidence(self, num_due: int) -> tuple[Any, ...]:
        trace = self.normal(num_due, MAX_LEN) + 8
        return trace, torch.full((num_due,), MAX_LEN, device=self.device), CONFIDENCE_WINDOW_TOKENS
