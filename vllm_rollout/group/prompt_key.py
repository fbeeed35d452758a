"""A prompt's content as a name. Invariant: the same token ids give the same name, in every process and run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def digest_of(token_ids: Sequence[int]) -> str:
    """24 hexadecimal digits."""
    return blake2b(array("Q", token_ids).tobytes(), digest_size=12).hexdigest()


def seed_for(seed: int, token_ids: Sequence[int]) -> int:
    """A seed of chance for one prompt, below 2**62.

    A trainer that fixes its seed and names its prompts by their position would otherwise draw the same chance for the
    candidates of each position in every training step.
    """
    digest = blake2b(f"{seed}:{digest_of(token_ids)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
