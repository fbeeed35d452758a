"""What it costs to take the KV of a group along, learned from what it has cost.

Invariant: there is a price before anything has come, and it never becomes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ASSUMED_BYTES_PER_S = 1e9
"""Before the first transfer: a tenth of what two copies through the memory of a quiet host reach."""
NEWEST_WEIGHT = 0.25
"""Of the newest transfer in the moving average: one that met a busy host does not decide the next four moves."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What KV costs the rank to which it comes, while everybody there stands still."""

    s_per_token: float
    """Seconds; moving average."""
    block_size: int
    """Tokens. Whole blocks come; what is behind a candidate's last one is computed again, half a block on average."""

    @classmethod
    def assumed(cls, bytes_per_token: float, block_size: int) -> TransferCost:
        """bytes_per_token: of one worker, since all of an engine's copy at once."""
        return cls(bytes_per_token / ASSUMED_BYTES_PER_S, block_size)

    def after(self, num_tokens: int, seconds: float) -> TransferCost:
        """So many tokens have come."""
        newest = seconds / num_tokens
        return replace(self, s_per_token=self.s_per_token + NEWEST_WEIGHT * (newest - self.s_per_token))

    def num_computed(self, num_candidates: int) -> float:
        """Tokens that these candidates compute again, expected."""
        return num_candidates * self.block_size / 2
