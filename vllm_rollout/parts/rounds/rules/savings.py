"""Estimates the savings of tail batching. Invariant: each prompt that is back counts once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Savings:
    """Savings of tail batching, in decode steps of the longest trajectory.

    Synchronous rounds would have run the prompts in the order of arrival, P0 at a time, each round until its longest
    trajectory was over. The estimate is a lower bound, because a prompt of a short round keeps its first R0 of eta R0
    candidates. Its longest trajectory is therefore shorter than in a synchronous round.
    """

    round_tokens: int = 0
    """Sum over rounds of the tokens of the longest trajectory."""
    synchronous_tokens: int = 0
    """Sum over synchronous rounds whose prompts are all back, of the tokens of the longest trajectory."""
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Synchronous round -> (prompts that are back, tokens of their longest trajectory), while some prompts are not
    back."""

    def returned(self, entries: Iterable[tuple[int, int]], block_size: int) -> None:
        """Record the entries of one round that came back: (number, tokens of the longest trajectory)."""
        longest = 0
        for number, max_tokens in entries:
            longest = max(longest, max_tokens)
            block = number // block_size
            num_back, block_max = self.blocks.get(block, (0, 0))
            self.blocks[block] = num_back + 1, max(block_max, max_tokens)
            if num_back + 1 == block_size:
                self.synchronous_tokens += self.blocks.pop(block)[1]
        self.round_tokens += longest

    @property
    def ratio(self) -> float | None:
        """Synchronous tokens over tail-batched tokens. None while no synchronous round is complete."""
        pending = sum(block_max for _, block_max in self.blocks.values())
        if not self.synchronous_tokens or not self.round_tokens:
            return None
        return (self.synchronous_tokens + pending) / self.round_tokens
