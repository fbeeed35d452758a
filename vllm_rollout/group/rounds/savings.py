"""What tail batching saved. Invariant: each prompt that is back counts once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Savings:
    """What tail batching saved, in decode steps of the longest trajectory.

    Synchronous rounds would have run the prompts in the order in which they were handed in, P0 at a time, each until
    its longest trajectory was over. An estimate from below: a prompt of a short round has its first R0 of eta R0
    candidates, so that its own longest is shorter than it would have been.
    """

    round_tokens: int = 0
    """Sum over rounds of their longest trajectory."""
    synchronous_tokens: int = 0
    """The same of synchronous rounds whose prompts are all back."""
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Synchronous round -> (prompts that are back, their longest trajectory), of those that are not all back."""

    def returned(self, entries: Iterable[tuple[int, int]], block_size: int) -> None:
        """Entries of one round came back: (number, tokens of the longest trajectory)."""
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
        """Synchronous over tail batched; None while no synchronous round is complete."""
        pending = sum(block_max for _, block_max in self.blocks.values())
        if not self.synchronous_tokens or not self.round_tokens:
            return None
        return (self.synchronous_tokens + pending) / self.round_tokens
