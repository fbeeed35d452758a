"""Arguments of every operator, in the sizes that the kernel benchmark asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS

NUM_HIDDEN = 128
CANDIDATES_PER_GROUP = 16
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

    def token_stats(self, num_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.normal(num_rows, vocab_size, scale=4.0, dtype=dtype), self.integers(vocab_size, num_rows)

    def quality_head(self, num_due: int, hidden_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        weights = (self.normal(NUM_HIDDEN, hidden_size, scale=hidden_size**-0.5), self.normal(NUM_HIDDEN))
        rows = torch.randperm(num_due, generator=self.generator).to(self.device)
        return self.normal(num_due, hidden_size, dtype=dtype), rows, *weights, self.normal(NUM_HIDDEN), self.normal(1)

    def update_lengths(self, num_rows: int, capacity: int) -> tuple[Tensor, ...]:
        slots = torch.randperm(capacity, generator=self.generator)[:num_rows].to(self.device)
        counts = self.integers(MAX_LEN, capacity).float()
        return slots, self.normal(num_rows) + 8, counts, self.normal(capacity) + 8, counts * 2

    def group_moments(self, capacity: int) -> tuple[Any, ...]:
        groups = torch.arange(capacity, device=self.device) // CANDIDATES_PER_GROUP
        finished = self.integers(3, capacity) == 0
        return self.integers(MAX_LEN, capacity).float(), groups, finished, -(-capacity // CANDIDATES_PER_GROUP)

    def windowed_confidence(self, num_due: int) -> tuple[Any, ...]:
        trace = self.normal(num_due, MAX_LEN) + 8
        return trace, torch.full((num_due,), MAX_LEN, device=self.device), CONFIDENCE_WINDOW_TOKENS
